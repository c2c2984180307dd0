"""Inputs of the engines' memory formulas, and the parts that several of them share.

Parameters, gradients and optimizer state follow from shapes, dtypes and the number of ranks alone
(tests/specs/schema/engines/test_held_model.py counts what the engines allocate). What an engine gathers to compute with
depends on timing, and is an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specs.memory_parts import ALWAYS, DTYPE_BYTES, GIB, LEARNING, SCORING, Moment, Part
from specs.model_facts import ModelFacts
from specs.model_shapes import SCORE_LAYER, ModelTensors, ParameterShape
from specs.schema.role_section import DType, Lora, Optimizer

FP32_BYTES = 4
REST_OF_SHARE = "KV cache and the rest of its share"
ASLEEP_GIB = 1.0  # what vLLM or SGLang keeps of a GPU while asleep: workspaces, kernels (an assumption)
_AWAKE: frozenset[Moment] = frozenset({"rollout"})


@dataclass(frozen=True)
class HeldTrainer:
    """Everything that decides how a train engine holds a model, besides its own keys. `optimizer` None: it never
    learns. `several_micro_batches`: of a rank's share of a mini-batch, which decides whether gradients wait whole."""

    tensors: ModelTensors
    dtype: DType
    ranks: int
    device: str
    optimizer: Optimizer | None
    lora: Lora | None = None
    several_micro_batches: bool = True

    @property
    def compute_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def frozen(self) -> Sequence[ParameterShape]:
        if self.optimizer is None:
            return self.tensors.parameters
        return () if self.lora is None else tuple(p for p in self.tensors.parameters if p.name != SCORE_LAYER)

    @property
    def trained(self) -> Sequence[ParameterShape]:
        return () if self.optimizer is None else trained(self.tensors, self.lora)


@dataclass(frozen=True)
class Replica:
    """Everything that decides what a replica of a rollout engine holds, besides its own keys. `parallel`: GPUs that
    hold it together. `sequences`: those that one replica completes in a step. `gpu_GiB`: memory of a GPU; 0 on the CPU.
    `several_turns`: whether sequences wait for their next turn. `lora`: adapters that it applies itself."""

    parallel: int
    tensors: ModelTensors
    facts: ModelFacts
    dtype: DType
    sequences: int
    max_sequence_tokens: int
    max_prompt_tokens: int
    gpu_GiB: float
    colocated: bool
    several_turns: bool = False
    lora: Lora | None = None

    @property
    def weights(self) -> int:
        return self.tensors.elements * DTYPE_BYTES[self.dtype] // self.parallel

    @property
    def cache_bytes_per_token(self) -> int:
        """The keys and values of all layers, on each GPU of the replica."""
        heads = max(1, self.facts.kv_heads // self.parallel)
        return 2 * self.facts.cached_layers * heads * self.facts.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def state_bytes_per_sequence(self) -> int:
        """The states of layers that carry one, in fp32, on each GPU of the replica."""
        return self.facts.state_layers * self.facts.state.size * FP32_BYTES // self.parallel

    @property
    def awake(self) -> frozenset[Moment]:
        """Phases in which it holds its cache."""
        return _AWAKE if self.colocated else ALWAYS


def trained(tensors: ModelTensors, lora: Lora | None) -> Sequence[ParameterShape]:
    """Return what an optimizer changes: all, or adapters and a new head."""
    if lora is None:
        return tensors.parameters
    return (*adapters(tensors, lora), *(p for p in tensors.parameters if p.name == SCORE_LAYER))


def adapters(tensors: ModelTensors, lora: Lora) -> tuple[ParameterShape, ...]:
    """Return the shapes of A [rank, in] and B [out, rank] of every linear layer that `lora.targets` means."""
    found = []
    for parameter in tensors.adaptable:
        layer = parameter.name.removesuffix(".weight")
        chosen = any(t in ("all-linear", layer) or layer.endswith(f".{t}") for t in lora.targets)
        if chosen:
            out, into = parameter.shape
            found.append(ParameterShape(f"{layer}.lora_A.weight", (lora.rank, into), parameter.layer))
            found.append(ParameterShape(f"{layer}.lora_B.weight", (out, lora.rank), parameter.layer))
    return tuple(found)


def state(name: str, nbytes: int, **more: Any) -> Part:
    """Return a part that a trainer always holds, and that leaves a shared device."""
    return Part(name, nbytes, exact=True, leaves=True, **more)


def elements(parameters: Sequence[ParameterShape]) -> int:
    return sum(parameter.elements for parameter in parameters)


def replica_weights(replica: Replica, *, kept: bool = False, adapter_bytes: int = 0) -> Iterator[Part]:
    """Count a replica's weights. Asleep they are dropped, or, `kept`, wait in host memory; they come back for the sync.
    `adapter_bytes`: room for one set of adapters."""
    stay = not replica.colocated or (kept and not replica.gpu_GiB)
    awake: frozenset[Moment] = ALWAYS if stay else frozenset({"rollout", "sync"})
    yield Part("weights", replica.weights, awake, exact=True)
    if kept and not stay:
        asleep = SCORING | LEARNING
        yield Part("weights, asleep", replica.weights, asleep, exact=True, host=True)
        if replica.gpu_GiB:  # vLLM pins them piece by piece; 1 / ln 2 is the mean of rounding up to a power of two
            yield Part("weights, asleep, rounding of pinned memory", int(0.44 * replica.weights), asleep, host=True)
    if adapter_bytes:
        yield Part("adapters", adapter_bytes, awake)


def share_of_gpu(
    replica: Replica, nbytes: int, *, kept: bool = False, adapter_bytes: int = 0, asleep_GiB: float = ASLEEP_GIB
) -> Iterator[Part]:
    """Count a replica that was told to take `nbytes` of each GPU: weights, and the rest for its cache."""
    yield from replica_weights(replica, kept=kept, adapter_bytes=adapter_bytes)
    if nbytes:  # 0: the GPU's size is not known
        rest = max(0, nbytes - replica.weights - adapter_bytes)
        yield Part(REST_OF_SHARE, rest, replica.awake, exact=True)
    if replica.colocated:
        asleep: frozenset[Moment] = frozenset({"score", "train", "optimizer", "sync"})
        yield Part("left while asleep", int(asleep_GiB * GIB), asleep)

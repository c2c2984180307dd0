"""What a replica of each rollout engine holds. Weights and the `torch` engine's cache follow from shapes; the rest of
vLLM and SGLang is what they were told to take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlctl.memory_parts import ALWAYS, DTYPE_BYTES, GIB, LEARNING, Part, Phase
from rlctl.memory_states import adapters
from specs.engine_tables import SglangEngine, TorchRolloutEngine, VllmEngine
from specs.model_facts import ModelFacts
from specs.model_tensors import ModelTensors
from specs.schema import DType, Lora
from specs.vllm_rules import lora_room

VLLM_CPU_KV_GIB = 1.0  # backends/vllm_rollout/start.py
ASLEEP_GIB = 1.0  # what vLLM or SGLang keeps of a GPU while asleep: graphs, workspaces (an assumption)
BEYOND_FRACTION_GIB = 2.0  # SGLang's memory beside weights and cache: activations, graphs (an assumption)
_AWAKE: frozenset[Phase] = frozenset({"generate"})


@dataclass(frozen=True)
class Replica:
    """`sequences`: those that one replica answers in a step. `gpu_GiB`: memory of a GPU; 0 on the CPU. `lora`: adapters
    that it applies itself."""

    engine: object
    tensors: ModelTensors
    facts: ModelFacts
    dtype: DType
    sequences: int
    max_sequence_tokens: int
    max_prompt_tokens: int
    gpu_GiB: float
    colocated: bool
    lora: Lora | None = None

    @property
    def keeps_weights(self) -> bool:
        """Whether weights wait in host memory while it sleeps: a sync brings adapters alone, or it was asked to."""
        return self.lora is not None or bool(getattr(self.engine, "weights_backup", False))

    @property
    def adapters(self) -> int:
        """Bytes of the room that vLLM makes for one set of adapters."""
        if self.lora is None:
            return 0
        room = self.lora.model_copy(update={"rank": lora_room(self.lora.rank)})
        elements = sum(parameter.elements for parameter in adapters(self.tensors, room))
        return elements * DTYPE_BYTES[self.dtype] // int(getattr(self.engine, "tensor_parallel", 1))

    @property
    def weights(self) -> int:
        parallel = int(getattr(self.engine, "tensor_parallel", 1))
        return self.tensors.elements * DTYPE_BYTES[self.dtype] // parallel

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of all layers, on each GPU of the replica."""
        parallel = int(getattr(self.engine, "tensor_parallel", 1))
        heads = max(1, self.facts.kv_heads // parallel)
        return 2 * self.facts.layers * heads * self.facts.head_dim * DTYPE_BYTES[self.dtype]

    def slots(self) -> int:
        return min(int(getattr(self.engine, "max_sequences", 1)), self.sequences)

    def cache_bytes(self) -> int:
        """A cache in which as many sequences as are decoded at a time are as long as they may be."""
        return self.slots() * self.max_sequence_tokens * self.cache_bytes_per_token


def replica_parts(replica: Replica) -> Iterator[Part]:
    """Nothing for an engine that is not rlctl's own, or the fake one."""
    if isinstance(replica.engine, TorchRolloutEngine):
        yield from _torch(replica, replica.engine)
    elif isinstance(replica.engine, VllmEngine):
        yield from _vllm(replica, replica.engine)
    elif isinstance(replica.engine, SglangEngine):
        fraction = int(replica.engine.memory_fraction * replica.gpu_GiB * GIB)
        yield from _reserved(replica, fraction)
        yield Part("activations, graphs", int(BEYOND_FRACTION_GIB * GIB), _awake(replica))


def _awake(replica: Replica) -> frozenset[Phase]:  # phases in which it holds its cache
    return _AWAKE if replica.colocated else ALWAYS


def _weights(replica: Replica) -> Iterator[Part]:
    """Asleep they are dropped, or wait in host memory; they come back for the sync."""
    stay = not replica.colocated or (replica.keeps_weights and not replica.gpu_GiB)
    awake: frozenset[Phase] = ALWAYS if stay else frozenset({"generate", "sync"})
    yield Part("weights", replica.weights, awake, exact=True)
    if replica.keeps_weights and not stay:
        yield Part("weights, asleep", replica.weights, LEARNING, exact=True, host=True)
    if replica.adapters:
        yield Part("adapters", replica.adapters, awake)


def _torch(replica: Replica, engine: TorchRolloutEngine) -> Iterator[Part]:
    yield from _weights(replica)
    yield Part("KV cache", replica.cache_bytes(), _awake(replica), exact=True)
    facts, size = replica.facts, DTYPE_BYTES[replica.dtype]
    prompts = max(1, min(engine.prefill_tokens, replica.sequences * replica.max_prompt_tokens))
    inner = facts.intermediate_size or 4 * facts.hidden_size
    forward = prompts * (3 * inner + 4 * facts.hidden_size) * size
    yield Part("prompts going through", forward + prompts * replica.cache_bytes_per_token, _awake(replica))
    yield Part("logits", 3 * replica.slots() * facts.vocab_size * 4, _awake(replica))


def _vllm(replica: Replica, engine: VllmEngine) -> Iterator[Part]:
    if replica.gpu_GiB and engine.kv_cache_GiB is None:
        yield from _reserved(replica, int(engine.gpu_memory_utilization * replica.gpu_GiB * GIB))
        return
    yield from _weights(replica)
    cache_GiB = VLLM_CPU_KV_GIB if engine.kv_cache_GiB is None else engine.kv_cache_GiB
    yield Part("KV cache", int(cache_GiB * GIB), _awake(replica), exact=True)
    if replica.gpu_GiB:
        yield Part("activations, graphs", int(ASLEEP_GIB * GIB), ALWAYS)


def _reserved(replica: Replica, nbytes: int) -> Iterator[Part]:
    yield from _weights(replica)
    yield Part(
        "KV cache and the rest of its share",
        max(0, nbytes - replica.weights - replica.adapters),
        _awake(replica),
        exact=True,
    )
    if replica.colocated:
        asleep: frozenset[Phase] = frozenset({"learn", "step", "sync"})
        yield Part("left while asleep", int(ASLEEP_GIB * GIB), asleep)

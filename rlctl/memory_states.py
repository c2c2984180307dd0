"""Parameters, gradients and optimizer state as each train engine holds them, on the rank that holds most.

Exact: they follow from shapes, dtypes and the number of ranks alone (tests/backends/test_memory_exact.py counts what
the engines allocate). What an engine gathers to compute with depends on timing, and is an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from rlctl.memory_parts import ADAM_BYTES, DTYPE_BYTES, LEARNING, Part
from specs.deepspeed_config import deepspeed_config
from specs.engine_tables import DdpEngine, Fsdp2Engine, ZeroEngine
from specs.model_tensors import ModelTensors, ParameterShape
from specs.schema import DType, Lora, Optimizer

_FLAT_ALIGN = 16  # elements (backends/ddp/flat.py)
_FP32 = 4


@dataclass(frozen=True)
class Held:
    """What decides how a trainer is held. `optimizer` None: it never learns. `several_micro_batches`: of a rank's share
    of a mini-batch, which decides whether gradients wait whole."""

    engine: object
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
        all_frozen = self.lora is not None or self.optimizer is None
        return self.tensors.parameters if all_frozen else ()

    @property
    def trained(self) -> Sequence[ParameterShape]:
        if self.optimizer is None:
            return ()
        return self.tensors.parameters if self.lora is None else adapters(self.tensors, self.lora)


def adapters(tensors: ModelTensors, lora: Lora) -> tuple[ParameterShape, ...]:
    """A [rank, in] and B [out, rank] of every linear layer that `lora.targets` means."""
    found = []
    for parameter in tensors.parameters:
        layer = parameter.name.removesuffix(".weight")
        chosen = any(t in ("all-linear", layer) or layer.endswith(f".{t}") for t in lora.targets)
        if parameter.linear and chosen:
            out, into = parameter.shape
            found.append(ParameterShape(f"{layer}.lora_A.weight", (lora.rank, into), parameter.layer))
            found.append(ParameterShape(f"{layer}.lora_B.weight", (out, lora.rank), parameter.layer))
    return tuple(found)


def state_parts(held: Held) -> Iterator[Part]:
    """The engine's memory but for activations. Nothing for an engine that is not rlctl's own, or the fake one."""
    if isinstance(held.engine, DdpEngine):
        yield from _ddp(held)
    elif isinstance(held.engine, Fsdp2Engine):
        yield from _fsdp2(held, held.engine)
    elif isinstance(held.engine, ZeroEngine):
        yield from _zero(held, held.engine)


def _state(name: str, nbytes: int, **more: Any) -> Part:
    return Part(name, nbytes, exact=True, leaves=True, **more)


def _elements(parameters: Sequence[ParameterShape]) -> int:
    return sum(parameter.elements for parameter in parameters)


def _ddp(held: Held) -> Iterator[Part]:
    def flat(parameters: Sequence[ParameterShape]) -> int:
        return sum(ceil(p.elements / _FLAT_ALIGN) * _FLAT_ALIGN for p in parameters)

    size, whole = held.compute_bytes, flat(held.trained)
    frozen = flat(held.frozen) if held.optimizer is None else _elements(held.frozen)
    yield _state("weights", (frozen + whole) * size)
    if not whole:
        return
    if size < _FP32:
        yield _state("master weights", whole * _FP32)
    yield _state("gradients", whole * _FP32, dropped=True)
    yield _state("Adam moments", whole * ADAM_BYTES)


def _fsdp2(held: Held, engine: Fsdp2Engine) -> Iterator[Part]:
    shard = engine.shard or max(1, held.ranks // engine.replicate)
    host = engine.offload == "cpu" and held.device != "cpu"

    def rows(parameters: Sequence[ParameterShape]) -> int:
        return sum(ceil(p.shape[0] / shard) * (p.elements // max(1, p.shape[0])) for p in parameters)

    size, mine = held.compute_bytes, rows(held.trained)
    stored = _FP32 if held.optimizer is not None else size
    yield _state("master weights" if stored > size else "weights", (rows(held.frozen) + mine) * stored, host=host)
    if mine:
        yield Part("gradients", mine * _FP32, LEARNING, exact=True, host=host)
        yield _state("Adam moments", mine * ADAM_BYTES, host=host)
        if not engine.sync_every_micro_batch and held.several_micro_batches:
            waiting = _elements(held.trained) * _FP32
            yield Part("gradients, whole, until the last micro-batch", waiting, frozenset({"learn"}))
    tensors = held.tensors
    layers = tensors.elements - tensors.outside_layers
    live = min(layers, 2 * tensors.largest_layer) if engine.reshard_after_forward else layers
    yield Part("gathered layers", (tensors.outside_layers + live) * size, frozenset({"learn"}))
    if mine:
        both_ways = 2 * max(tensors.largest_layer, tensors.outside_layers) * _FP32
        yield Part("gradients under way", both_ways, frozenset({"learn"}))


def _zero(held: Held, engine: ZeroEngine) -> Iterator[Part]:
    config = deepspeed_config(engine, held.dtype, held.optimizer, device=held.device)["zero_optimization"]
    if engine.stage == 3:
        yield from _zero3(held, engine, config)
    elif held.optimizer is None:  # nothing to cut: without DeepSpeed
        yield _state("weights", _elements(held.frozen) * held.compute_bytes)
    else:
        yield from _zero12(held, engine, config)


def _zero12(held: Held, engine: ZeroEngine, config: dict[str, Any]) -> Iterator[Part]:
    host, ranks, size = engine.offload_optimizer and held.device != "cpu", held.ranks, held.compute_bytes
    groups = ([p for p in held.trained if len(p.shape) >= 2], [p for p in held.trained if len(p.shape) < 2])
    whole = sum(ceil(_elements(group) / (2 * ranks)) * 2 * ranks for group in groups)
    mine = whole // ranks
    yield _state("weights", (_elements(held.frozen) + whole) * size)
    yield _state("master weights", mine * _FP32, host=host)
    gradients = whole if engine.stage == 1 else mine
    yield Part("gradients", gradients * _FP32, LEARNING, exact=True, host=host and engine.stage == 2)
    yield _state("Adam moments", mine * ADAM_BYTES, host=host)
    yield Part("reduce bucket", _bucket(config), LEARNING, exact=True)
    yield Part("gradients of this rank, flat", mine * _FP32, frozenset({"step"}), host=host)


def _zero3(held: Held, engine: ZeroEngine, config: dict[str, Any]) -> Iterator[Part]:
    on_host = held.device != "cpu"
    optimizer_host, weights_host = engine.offload_optimizer and on_host, engine.offload_parameters and on_host

    def parts(parameters: Sequence[ParameterShape]) -> int:
        return sum(ceil(p.elements / held.ranks) for p in parameters)

    size, mine = held.compute_bytes, parts(held.trained)
    adapter_bytes = size if held.lora is None else _FP32  # peft makes them in fp32, and DeepSpeed leaves them so
    weights = parts(held.frozen) * size + mine * adapter_bytes
    yield _state("weights", weights, host=weights_host)
    if mine:
        yield _state("master weights", mine * _FP32, host=optimizer_host)
        yield _state("gradients", mine * _FP32, host=optimizer_host, dropped=True)
        yield _state("Adam moments", mine * ADAM_BYTES, host=optimizer_host)
        yield Part("reduce bucket", _bucket(config), exact=True)
    threshold = int(config["stage3_param_persistence_threshold"])
    everything = [*held.tensors.parameters, *held.trained] if held.lora else held.tensors.parameters
    persistent = _elements([p for p in everything if p.elements <= threshold]) if held.ranks > 1 else 0
    yield Part("small weights, gathered for good", persistent * size, exact=True)
    live = min(held.tensors.elements, int(config.get("stage3_max_live_parameters", 1e9)), _live(held.tensors, config))
    yield Part("gathered layers", live * size, frozenset({"learn"}))


def _live(tensors: ModelTensors, config: dict[str, Any]) -> int:
    """Elements that are gathered at a time: what stays because it is needed again soon, the layer, what is fetched
    ahead of it."""
    reuse = int(config.get("stage3_max_reuse_distance", 1e9))
    return reuse + tensors.outside_layers + tensors.largest_layer + int(config["stage3_prefetch_bucket_size"])


def _bucket(config: dict[str, Any]) -> int:
    return int(config["reduce_bucket_size"]) * _FP32

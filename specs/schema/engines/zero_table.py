"""The static side of the train engine `zero` (`backends/zero/`), DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, isfinite
from typing import Any, ClassVar, Literal

from pydantic import Field

from specs.errors import Problem
from specs.memory_parts import ADAM_BYTES, LEARNING, Part
from specs.model_shapes import ModelTensors, ParameterShape
from specs.schema.engines.deepspeed_config import DEEPSPEED, deepspeed_json, deepspeed_settings
from specs.schema.engines.engine_table import EngineContext
from specs.schema.engines.held_model import FP32_BYTES, HeldTrainer, elements, state
from specs.schema.engines.library_keys import Settings
from specs.schema.engines.transformers_tables import HUGGING_FACE, OwnModules
from specs.schema.mesh import Mesh
from specs.schema.role_section import DType, Optimizer
from specs.schema.roles import ROLES, RoleName
from specs.text import show


class ZeroTable(OwnModules):
    """DeepSpeed ZeRO: optimizer state (1), gradients too (2), parameters too (3) are cut across the ranks."""

    kind: Literal["zero", "zero3"] = "zero"
    stage: Literal[1, 2, 3] = 3
    """What is cut across ranks. `zero3` is `zero` with stage 3."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory and step there."""
    offload_parameters: bool = False
    """Keep parameters in host memory; stage 3 only."""
    deepspeed: dict[str, Any] = Field({})
    """More keys for DeepSpeed's configuration, which checks them (`rlctl train --dry-run` shows all of it). A key
    that the spec decides elsewhere is refused."""

    engine_class: ClassVar[str | None] = "backends.zero.engine:ZeroTrainEngine"
    packages: ClassVar[tuple[str, ...] | None] = (*HUGGING_FACE, "deepspeed")
    where_to_get: ClassVar[str] = "rlctl setup-engine deepspeed adds it"

    def mesh(self, processes: int) -> Mesh:
        return Mesh(1, processes, axes={"shard": processes})

    def problems(self, context: EngineContext) -> Iterator[Problem]:
        """Refuse stages and offloads that cannot be, and extra keys that contradict the spec."""
        role, optimizer = context.role, getattr(context.section, "optimizer", None)
        yield from self._stage_problems(role, context.dtype)
        yield from self._offload_problems(role, context.device)
        settings = self._settings(context.dtype, optimizer, context.device)
        yield from DEEPSPEED.problems(role, optimizer is not None, self.deepspeed, settings)

    def memory_hint(self, role: RoleName) -> str | None:
        own = "offload_optimizer" if ROLES[role].learns else "offload_parameters"
        return None if getattr(self, own) else f"use more GPUs, or set {role}.engine.{own} = true"

    def library_config(self, dtype: DType, optimizer: Optimizer | None, device: str) -> Mapping[str, Mapping[str, Any]]:
        return {"deepspeed": deepspeed_json(self._settings(dtype, optimizer, device), self.deepspeed)}

    def _settings(self, dtype: DType, optimizer: Optimizer | None, device: str) -> Settings:
        offload = (self.offload_optimizer, self.offload_parameters)
        return deepspeed_settings(dtype, optimizer, device, self.stage, offload=offload)

    def memory(self, held: HeldTrainer) -> Iterator[Part]:
        config = self.library_config(held.dtype, held.optimizer, held.device)["deepspeed"]["zero_optimization"]
        if self.stage == 3:
            yield from _zero3(held, self, config)
        elif held.optimizer is None:  # nothing to cut: without DeepSpeed
            yield state("weights", elements(held.frozen) * held.compute_bytes)
        else:
            yield from _zero12(held, self, config)

    def _stage_problems(self, role: RoleName, dtype: DType) -> Iterator[Problem]:
        key = f"{role}.engine.stage"
        if self.kind == "zero3" and self.stage != 3:
            hint = f'remove the key, or write {role}.engine.kind = "zero"'
            yield Problem(key, f'contradicts {role}.engine.kind = "zero3", which means stage 3', hint, str(self.stage))
        elif not ROLES[role].learns and self.stage != 3:
            message = f"cuts what only learning needs, and {ROLES[role].title} does not learn"
            yield Problem(key, message, f'use stage 3, or {role}.engine.kind = "ddp"', str(self.stage))
        elif self.stage == 1 and dtype == "bf16":
            # DeepSpeed has another optimizer for just this, with another layout.
            message = f'does not go with {role}.dtype = "bf16" here'
            yield Problem(key, message, "stage 2 takes less memory for the same result", "1")

    def _offload_problems(self, role: RoleName, device: str) -> Iterator[Problem]:
        if self.offload_parameters and self.stage != 3:
            message = f"needs stage 3, and {role}.engine.stage is {self.stage}: below it every rank has all parameters"
            yield Problem(f"{role}.engine.offload_parameters", message, f"set {role}.engine.stage = 3", "true")
        for name in ("offload_optimizer", "offload_parameters"):
            key, value = f"{role}.engine.{name}", getattr(self, name)
            if value and device == "cpu":
                yield Problem(key, f"has no effect: {role} runs on the CPU", "remove the key", show(value))
            elif name == "offload_optimizer" and name in self.model_fields_set and not ROLES[role].learns:
                yield Problem(key, f"has no effect: {ROLES[role].title} does not learn", "remove the key", show(value))


def _zero12(held: HeldTrainer, engine: ZeroTable, config: dict[str, Any]) -> Iterator[Part]:
    host, ranks, size = engine.offload_optimizer and held.device != "cpu", held.ranks, held.compute_bytes
    groups = ([p for p in held.trained if len(p.shape) >= 2], [p for p in held.trained if len(p.shape) < 2])
    whole = sum(ceil(elements(group) / (2 * ranks)) * 2 * ranks for group in groups)
    mine = whole // ranks
    yield state("weights", (elements(held.frozen) + whole) * size)
    yield state("master weights", mine * FP32_BYTES, host=host)
    gradients = whole if engine.stage == 1 else mine
    yield Part("gradients", gradients * FP32_BYTES, LEARNING, exact=True, host=host and engine.stage == 2)
    yield state("Adam moments", mine * ADAM_BYTES, host=host)
    yield Part("reduce bucket", _bucket(config), LEARNING, exact=True)
    yield Part("gradients of this rank, flat", mine * FP32_BYTES, frozenset({"optimizer"}), host=host)


def _zero3(held: HeldTrainer, engine: ZeroTable, config: dict[str, Any]) -> Iterator[Part]:
    on_host = held.device != "cpu"
    optimizer_host, weights_host = engine.offload_optimizer and on_host, engine.offload_parameters and on_host

    def parts(parameters: Sequence[ParameterShape]) -> int:
        return sum(ceil(p.elements / held.ranks) for p in parameters)

    size, mine = held.compute_bytes, parts(held.trained)
    adapter_bytes = size if held.lora is None else FP32_BYTES  # peft makes them in fp32, and DeepSpeed leaves them so
    weights = parts(held.frozen) * size + mine * adapter_bytes
    yield state("weights", weights, host=weights_host)
    if mine:
        yield state("master weights", mine * FP32_BYTES, host=optimizer_host)
        yield state("gradients", mine * FP32_BYTES, host=optimizer_host, dropped=True)
        yield state("Adam moments", mine * ADAM_BYTES, host=optimizer_host)
        yield Part("reduce bucket", _bucket(config), exact=True)
    threshold = _number(config, "stage3_param_persistence_threshold")
    everything = [*held.frozen, *held.trained]
    persistent = elements([p for p in everything if p.elements <= threshold]) if held.ranks > 1 else 0
    yield Part("small weights, gathered for good", persistent * size, exact=True)
    live = min(held.tensors.elements, _number(config, "stage3_max_live_parameters", 1e9), _live(held.tensors, config))
    yield Part("gathered layers", live * size, frozenset({"train"}))


def _live(tensors: ModelTensors, config: dict[str, Any]) -> int:
    """Return the elements that are gathered at a time: what stays because it is needed again soon, the layer, and what
    is fetched ahead of it."""
    ahead, reuse = _number(config, "stage3_prefetch_bucket_size"), _number(config, "stage3_max_reuse_distance", 1e9)
    return reuse + tensors.outside_layers + tensors.largest_layer + ahead


def _bucket(config: dict[str, Any]) -> int:
    return _number(config, "reduce_bucket_size") * FP32_BYTES


def _number(config: dict[str, Any], key: str, default: float = 0) -> int:
    """Return a number of DeepSpeed's configuration. One that it would refuse counts as the default."""
    value = config.get(key, default)
    return int(value) if isinstance(value, int | float) and isfinite(value) else int(default)

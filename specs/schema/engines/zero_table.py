"""The static side of the train engine `zero` (`backends/zero/`), DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from specs.errors import Problem
from specs.memory_parts import ADAM_BYTES, LEARNING, Part
from specs.model_shapes import ModelTensors, ParameterShape
from specs.schema.engines.deepspeed_config import deepspeed_config, deepspeed_problems
from specs.schema.engines.held_model import FP32_BYTES, HeldTrainer, elements, state
from specs.schema.engines.transformers_tables import HUGGING_FACE, OwnModules
from specs.schema.mesh import Mesh
from specs.schema.roles import ROLES, RoleName
from specs.text import show

if TYPE_CHECKING:
    from specs.schema.role_section import DType, Optimizer, RoleSection
    from specs.schema.spec import Spec


class ZeroTable(OwnModules):
    """DeepSpeed ZeRO: optimizer state (1), gradients too (2), parameters too (3) are cut across the ranks."""

    kind: Literal["zero", "zero3"] = "zero"
    stage: Literal[1, 2, 3] = Field(3, description="What is cut across ranks. `zero3` is `zero` with stage 3.")
    offload_optimizer: bool = Field(False, description="Keep optimizer state in host memory and step there.")
    offload_parameters: bool = Field(False, description="Keep parameters in host memory; stage 3 only.")
    deepspeed: dict[str, Any] = Field(
        {},
        description="More keys for DeepSpeed's configuration (`rlctl train --dry-run` shows all of it). A key that the "
        "spec decides elsewhere is refused.",
    )

    engine_class: ClassVar[str | None] = "backends.zero.engine:ZeroTrainEngine"
    packages: ClassVar[tuple[str, ...] | None] = (*HUGGING_FACE, "deepspeed")
    where_to_get: ClassVar[str | None] = "rlctl setup-engine deepspeed adds it"

    def mesh(self, processes: int) -> Mesh:
        return Mesh(1, processes)

    def reported_mesh(self, processes: int) -> dict[str, int]:
        return {"shard": processes}

    def alone(self) -> Self:
        return self

    def problems(self, spec: Spec, role: RoleName, section: RoleSection) -> Iterator[Problem]:
        """What is wrong with its stage, with what it keeps on the host, and with its extra keys."""
        dtype = spec.dtype(role)
        yield from _stage(role, dtype, self)
        yield from _offload(role, section, self)
        optimizer = getattr(section, "optimizer", None)
        device = "cuda" if section.devices else "cpu"
        yield from deepspeed_problems(self, dtype, optimizer, role=role, device=device)

    def node_hint(self, section: RoleSection, mesh: Mesh) -> None:
        return None

    def memory_hint(self, processes: int) -> str | None:
        return None if self.offload_optimizer else "use more GPUs, or actor.engine.offload_optimizer = true"

    def library_config(self, dtype: DType, optimizer: Optimizer | None, device: str) -> Mapping[str, Mapping[str, Any]]:
        return {"deepspeed": deepspeed_config(self, dtype, optimizer, device=device)}

    def memory(self, held: HeldTrainer) -> Iterator[Part]:
        config = deepspeed_config(self, held.dtype, held.optimizer, device=held.device)["zero_optimization"]
        if self.stage == 3:
            yield from _zero3(held, self, config)
        elif held.optimizer is None:  # nothing to cut: without DeepSpeed
            yield state("weights", elements(held.frozen) * held.compute_bytes)
        else:
            yield from _zero12(held, self, config)


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
    threshold = int(config["stage3_param_persistence_threshold"])
    everything = [*held.frozen, *held.trained]
    persistent = elements([p for p in everything if p.elements <= threshold]) if held.ranks > 1 else 0
    yield Part("small weights, gathered for good", persistent * size, exact=True)
    live = min(held.tensors.elements, int(config.get("stage3_max_live_parameters", 1e9)), _live(held.tensors, config))
    yield Part("gathered layers", live * size, frozenset({"train"}))


def _live(tensors: ModelTensors, config: dict[str, Any]) -> int:
    """Elements that are gathered at a time: what stays because it is needed again soon, the layer, what is fetched
    ahead of it."""
    reuse = int(config.get("stage3_max_reuse_distance", 1e9))
    return reuse + tensors.outside_layers + tensors.largest_layer + int(config["stage3_prefetch_bucket_size"])


def _bucket(config: dict[str, Any]) -> int:
    return int(config["reduce_bucket_size"]) * FP32_BYTES


def _stage(role: RoleName, dtype: DType, engine: ZeroTable) -> Iterator[Problem]:
    key = f"{role}.engine.stage"
    if engine.kind == "zero3" and engine.stage != 3:
        hint = f'remove the key, or write {role}.engine.kind = "zero"'
        yield Problem(key, f'contradicts {role}.engine.kind = "zero3", which means stage 3', hint, str(engine.stage))
    elif not ROLES[role].learns and engine.stage != 3:
        message = f"cuts what only learning needs, and {ROLES[role].title} does not learn"
        yield Problem(key, message, f'use stage 3, or {role}.engine.kind = "ddp"', str(engine.stage))
    elif engine.stage == 1 and dtype == "bf16":
        # DeepSpeed has another optimizer for just this, with another layout; stage 2 costs the same traffic or less.
        message = f'does not go with {role}.dtype = "bf16" here'
        yield Problem(key, message, "stage 2 takes less memory for the same result", "1")


def _offload(role: RoleName, section: RoleSection, engine: ZeroTable) -> Iterator[Problem]:
    if engine.offload_parameters and engine.stage != 3:
        message = f"needs stage 3, and {role}.engine.stage is {engine.stage}: below it every rank has all parameters"
        yield Problem(f"{role}.engine.offload_parameters", message, f"set {role}.engine.stage = 3", "true")
    for name in ("offload_optimizer", "offload_parameters"):
        key, value = f"{role}.engine.{name}", getattr(engine, name)
        if value and not section.devices:
            yield Problem(key, f"has no effect: {role} runs on the CPU", "remove the key", show(value))
        elif name == "offload_optimizer" and name in engine.model_fields_set and not ROLES[role].learns:
            yield Problem(key, f"has no effect: {ROLES[role].title} does not learn", "remove the key", show(value))

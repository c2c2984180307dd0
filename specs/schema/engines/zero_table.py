"""The static side of the train engine `zero` (`backends/zero/`), DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, isfinite
from typing import Any, ClassVar, Literal

from pydantic import Field

from specs.errors import Problem
from specs.memory_parts import ADAM_BYTES, LEARNING, Part
from specs.model_shapes import ModelTensors, ParameterShape
from specs.schema.engines.engine_table import EngineContext
from specs.schema.engines.held_model import FP32_BYTES, HeldTrainer, elements, state
from specs.schema.engines.library_keys import Library, Settings, leaves
from specs.schema.engines.transformers_tables import HUGGING_FACE, OwnModules
from specs.schema.mesh import Mesh
from specs.schema.role_section import DType, Optimizer
from specs.schema.roles import ROLES, RoleName
from specs.schema.table import no_effect

# DeepSpeed measures the gradient norm at every stage only when it clips; no norm in fp32 reaches this.
_NEVER_CLIPS = 1e38
ZERO = "zero_optimization"

# The keys of `[actor.engine.deepspeed]` that a spec may not change. It may add what it does not say elsewhere (bucket
# sizes, logging, …); DeepSpeed itself checks names and values (`backends/zero/deepspeed_start.py`).
DEEPSPEED = Library(
    "DeepSpeed",
    "deepspeed",
    decided_by={
        "data.prompts_per_step": "train_batch_size",
        "{role}.micro_batch_tokens": "train_micro_batch_size_per_gpu gradient_accumulation_steps "
        "managed_gradient_accumulation",
        "{role}.optimizer.max_grad_norm": "gradient_clipping",
        "{role}.optimizer": "optimizer",
        "{role}.optimizer.schedule": "scheduler",
        "{role}.dtype": "fp16 bf16 bfloat16 amp torch_autocast data_types",
        "{role}.gradient_checkpointing": "activation_checkpointing",
        "{role}.sequence_parallel": "sequence_parallel_size",
        "run.seed": "seed",
        "checkpoint.every": "checkpoint",
        "{role}.engine.stage": f"{ZERO}.stage",
        "{role}.engine.offload_optimizer": f"{ZERO}.offload_optimizer.device {ZERO}.cpu_offload",
        "{role}.engine.offload_parameters": f"{ZERO}.offload_param.device {ZERO}.cpu_offload_param",
    },
    # What lays tensors out otherwise than checkpoints and weight export expect, or cannot work.
    refused={
        "a second partition of the parameters": f"tensor_parallel {ZERO}.zero_hpz_partition_size",
        "quantised weights would not be those that are synced": f"{ZERO}.zero_quantized_weights "
        f"{ZERO}.zero_quantized_nontrainable_weights",
        "gradients would depend on the number of ranks": f"{ZERO}.zero_quantized_gradients",
        "steps that see part of the gradients": f"{ZERO}.zenflow",
        "DeepSpeed has dropped it": f"{ZERO}.legacy_stage1",
        "a gradient that is not finite must be found": f"{ZERO}.compute_grad_norm",
    },
    no_auto=(
        "is filled in by the Trainer of transformers, which is not here",
        "write a value, or leave it out for DeepSpeed's default",
    ),
)


class ZeroTable(OwnModules):
    """DeepSpeed ZeRO: optimizer state (1), gradients too (2), parameters too (3) are sharded across the ranks."""

    kind: Literal["zero", "zero3"] = "zero"
    stage: Literal[1, 2, 3] = 3
    """Choose what is sharded across ranks. `zero3` is `zero` with stage 3."""
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
        yield from self._stage_problems(role, context)
        yield from self._offload_problems(role, context)
        settings = self._settings(context.dtype, optimizer, context.device)
        yield from DEEPSPEED.problems(role, optimizer is not None, self.deepspeed, settings)

    def library_config(self, dtype: DType, optimizer: Optimizer | None, device: str) -> Mapping[str, Mapping[str, Any]]:
        """Return DeepSpeed's configuration: what rlctl sets, and the spec's own keys, which merge at every depth."""
        settings, config = self._settings(dtype, optimizer, device), dict[str, Any]()
        for path, value in {**settings.fixed, **settings.defaults, **dict(leaves(self.deepspeed))}.items():
            *tables, name = path.split(".")
            inner = config
            for table in tables:
                inner = inner.setdefault(table, {})
            inner[name] = value
        return {"deepspeed": config}

    def _settings(self, dtype: DType, optimizer: Optimizer | None, device: str) -> Settings:
        """Return what rlctl tells DeepSpeed. `optimizer` None: a role that does not learn."""
        fixed: dict[str, object] = {
            # Micro-batches are made by tokens, so DeepSpeed counts nothing: a step ends where the engine says.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "data_types.grad_accum_dtype": "fp32",
            f"{ZERO}.stage": self.stage,
            f"{ZERO}.memory_efficient_linear": False,  # it would exchange torch's linear function in the whole process
        }
        defaults: dict[str, object] = {"communication_data_type": "fp32"}
        if dtype == "bf16":
            fixed |= {"bf16.enabled": True, "bf16.check_grad_overflow": True}
        # DeepSpeed overlaps by default at stage 3 only. At stage 1 it reduces once, at the step, beside nothing.
        (fixed if self.stage == 1 else defaults)[f"{ZERO}.overlap_comm"] = self.stage == 3
        offloads = {"param": self.offload_parameters, "optimizer": self.offload_optimizer and optimizer is not None}
        for what in (what for what, leaves_device in offloads.items() if leaves_device):
            fixed[f"{ZERO}.offload_{what}.device"] = "cpu"
            defaults[f"{ZERO}.offload_{what}.pin_memory"] = device.startswith("cuda")
        if self.stage == 3:
            defaults[f"{ZERO}.stage3_param_persistence_threshold"] = 100_000
            defaults[f"{ZERO}.stage3_prefetch_bucket_size"] = 50_000_000
        if optimizer is not None:
            fixed |= {
                "gradient_clipping": optimizer.max_grad_norm or _NEVER_CLIPS,
                # torch's fused AdamW on both devices: DeepSpeed's own would be compiled at the first start.
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            }
            for bucket in ("reduce", "allgather")[: 1 if self.stage == 3 else 2]:
                defaults[f"{ZERO}.{bucket}_bucket_size"] = 50_000_000
        return Settings(fixed, defaults)

    def memory(self, held: HeldTrainer) -> Iterator[Part]:
        config = self.library_config(held.dtype, held.optimizer, held.device)["deepspeed"][ZERO]
        if self.stage == 3:
            yield from _zero3(held, self, config)
        elif held.optimizer is None:  # nothing to shard: without DeepSpeed
            yield state("weights", elements(held.frozen) * held.compute_bytes)
        else:
            yield from _zero12(held, self, config)

    def _stage_problems(self, role: RoleName, context: EngineContext) -> Iterator[Problem]:
        key = f"{role}.engine.stage"
        if self.kind == "zero3" and self.stage != 3:
            hint = f'remove the key, or write {role}.engine.kind = "zero"'
            yield Problem(key, f'contradicts {role}.engine.kind = "zero3", which means stage 3', hint)
        elif not context.learns and self.stage != 3:
            message = f"shards what only learning needs, and {ROLES[role].title} does not learn"
            yield Problem(key, message, f'use stage 3, or {role}.engine.kind = "ddp"')
        elif self.stage == 1 and context.dtype == "bf16":
            # DeepSpeed has another optimizer for just this, with another layout.
            hint = "stage 2 takes less memory for the same result"
            yield Problem(key, f'does not go with {role}.dtype = "bf16" here', hint)

    def _offload_problems(self, role: RoleName, context: EngineContext) -> Iterator[Problem]:
        if self.offload_parameters and self.stage != 3:
            message = f"needs stage 3, and {role}.engine.stage is {self.stage}: below it every rank has all parameters"
            yield Problem(f"{role}.engine.offload_parameters", message, f"set {role}.engine.stage = 3")
        for name in ("offload_optimizer", "offload_parameters"):
            if getattr(self, name) and context.device == "cpu":
                yield no_effect(f"{role}.engine.{name}", f"{role} runs on the CPU")
            elif name == "offload_optimizer" and name in self.model_fields_set and not context.learns:
                yield no_effect(f"{role}.engine.{name}", f"{ROLES[role].title} does not learn")


def _zero12(held: HeldTrainer, engine: ZeroTable, config: dict[str, Any]) -> Iterator[Part]:
    host, ranks, size = engine.offload_optimizer and held.device != "cpu", held.ranks, held.compute_bytes
    groups = ([p for p in held.trained if len(p.shape) >= 2], [p for p in held.trained if len(p.shape) < 2])
    whole = sum(ceil(elements(group) / (2 * ranks)) * 2 * ranks for group in groups)
    mine = whole // ranks
    yield state("weights", (elements(held.frozen) + whole) * size)
    yield state("master weights", mine * FP32_BYTES, host=host)
    gradients = whole if engine.stage == 1 else mine
    on_host = host and engine.stage == 2 and held.dtype == "fp32"  # sums in another dtype than its own stay
    yield Part("gradients", gradients * FP32_BYTES, LEARNING, exact=True, host=on_host)
    yield state("Adam moments", mine * ADAM_BYTES, host=host)
    yield Part("reduce bucket", _bucket(config), LEARNING, exact=True)
    yield Part("gradients of this rank, flat", mine * FP32_BYTES, frozenset({"optimizer"}), host=host)


def _zero3(held: HeldTrainer, engine: ZeroTable, config: dict[str, Any]) -> Iterator[Part]:
    on_host = held.device != "cpu"
    optimizer_host, weights_host = engine.offload_optimizer and on_host, engine.offload_parameters and on_host

    def parts(parameters: Sequence[ParameterShape]) -> int:
        return sum(ceil(p.elements / held.ranks) for p in parameters)

    size, mine = held.compute_bytes, parts(held.trained)
    yield state("weights", (parts(held.frozen) + mine) * size, host=weights_host)
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

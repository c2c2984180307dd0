"""DeepSpeed's JSON configuration, derived from the spec.

The spec decides what is trained and how; `[actor.engine.deepspeed]` may add what the spec does not say (bucket sizes,
logging, …), nested tables merging with what is derived. A key that says otherwise than the spec, that DeepSpeed does
not know (`deepspeed_keys.py`), or that cuts tensors in a way the engine cannot save, is a problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from specs.errors import Problem
from specs.schema.engines.deepspeed_keys import key_problem
from specs.schema.engines.library_keys import Library, Setting, extra_problems

if TYPE_CHECKING:
    from specs.schema.engines.zero_table import ZeroTable
    from specs.schema.role_section import DType, Optimizer

# DeepSpeed measures the gradient norm at every stage only when it clips; no norm in fp32 reaches this.
NEVER_CLIPS = 1e38

# What the spec or rlctl itself decides, and where a person says it instead. Prefixes count for everything below them.
_DECIDED_BY = {
    "train_batch_size": "data.prompts_per_step",
    "train_micro_batch_size_per_gpu": "{role}.micro_batch_tokens",
    "gradient_accumulation_steps": "{role}.micro_batch_tokens",
    "managed_gradient_accumulation": "{role}.micro_batch_tokens",
    "gradient_clipping": "{role}.optimizer.max_grad_norm",
    "optimizer": "{role}.optimizer",
    "scheduler": "{role}.optimizer.schedule",
    "fp16": "{role}.dtype",
    "bf16": "{role}.dtype",
    "bfloat16": "{role}.dtype",
    "amp": "{role}.dtype",
    "torch_autocast": "{role}.dtype",
    "data_types": "{role}.dtype",
    "activation_checkpointing": "{role}.gradient_checkpointing",
    "seed": "run.seed",
    "checkpoint": "checkpoint.every",
    "zero_optimization.stage": "{role}.engine.stage",
    "zero_optimization.offload_optimizer.device": "{role}.engine.offload_optimizer",
    "zero_optimization.offload_param.device": "{role}.engine.offload_parameters",
    "zero_optimization.cpu_offload": "{role}.engine.offload_optimizer",
    "zero_optimization.cpu_offload_param": "{role}.engine.offload_parameters",
}
# Below `zero_optimization`: what lays tensors out otherwise than checkpoints and weight export expect, or cannot work.
_UNSUPPORTED = {
    "zero_hpz_partition_size": "a second partition of the parameters",
    "zero_quantized_weights": "quantised weights would not be those that are synced",
    "zero_quantized_nontrainable_weights": "quantised weights would not be those that are synced",
    "zero_quantized_gradients": "gradients would depend on the number of ranks",
    "zenflow": "steps that see part of the gradients",
    "legacy_stage1": "DeepSpeed has dropped it",
    "compute_grad_norm": "a gradient that is not finite must be found",
}


def _unsupported(path: str) -> str | None:
    parent, _, name = path.partition(".")
    return _UNSUPPORTED.get(name.partition(".")[0]) if parent == "zero_optimization" else None


_DEEPSPEED = Library("DeepSpeed", "deepspeed", _DECIDED_BY, _unsupported, key_problem)


def deepspeed_config(
    engine: ZeroTable, dtype: DType, optimizer: Optimizer | None, *, device: str = "cpu"
) -> dict[str, Any]:
    """The whole configuration of a role's engine, whose own keys `deepspeed_problems` has found nothing wrong with.
    `optimizer` None: a role that does not learn."""
    config: dict[str, Any] = {}
    for setting in _derived(engine, dtype, optimizer, device):
        _put(config, setting.path, setting.value)
    return _merged(config, engine.deepspeed)


def deepspeed_problems(
    engine: ZeroTable, dtype: DType, optimizer: Optimizer | None, *, role: str, device: str = "cpu"
) -> Iterator[Problem]:
    """What is wrong with the keys of `[<role>.engine.deepspeed]`."""
    derived = _derived(engine, dtype, optimizer, device)
    yield from extra_problems(_DEEPSPEED, role, optimizer, engine.deepspeed, derived)


def _derived(engine: ZeroTable, dtype: DType, optimizer: Optimizer | None, device: str) -> Iterator[Setting]:
    def fixed(path: str, value: object) -> Setting:
        return Setting(path, value, True)

    def default(path: str, value: object) -> Setting:
        return Setting(path, value, False)

    # Micro-batches are cut by tokens, so DeepSpeed counts nothing: a step ends where the engine says.
    yield fixed("train_micro_batch_size_per_gpu", 1)
    yield fixed("gradient_accumulation_steps", 1)
    yield fixed("managed_gradient_accumulation", False)
    if dtype == "bf16":
        yield fixed("bf16.enabled", True)
        yield fixed("bf16.check_grad_overflow", True)
    yield fixed("data_types.grad_accum_dtype", "fp32")
    yield default("communication_data_type", "fp32")
    zero = "zero_optimization"
    yield fixed(f"{zero}.stage", engine.stage)
    # It would exchange torch's linear function in the whole process.
    yield fixed(f"{zero}.memory_efficient_linear", False)
    # DeepSpeed overlaps by default at stage 3 only. At stage 1 it reduces once, at the step: nothing to overlap with.
    yield Setting(f"{zero}.overlap_comm", engine.stage == 3, fixed=engine.stage == 1)
    pinned = device.startswith("cuda")
    if engine.offload_parameters:
        yield fixed(f"{zero}.offload_param.device", "cpu")
        yield default(f"{zero}.offload_param.pin_memory", pinned)
    if engine.stage == 3:
        yield default(f"{zero}.stage3_param_persistence_threshold", 100_000)
        yield default(f"{zero}.stage3_prefetch_bucket_size", 50_000_000)
    if optimizer is None:
        return
    yield fixed("gradient_clipping", optimizer.max_grad_norm or NEVER_CLIPS)
    # torch's fused AdamW on both devices: DeepSpeed's own would be compiled at the first start.
    yield fixed("zero_allow_untested_optimizer", True)
    yield fixed("zero_force_ds_cpu_optimizer", False)
    if engine.offload_optimizer:
        yield fixed(f"{zero}.offload_optimizer.device", "cpu")
        yield default(f"{zero}.offload_optimizer.pin_memory", pinned)
    yield default(f"{zero}.reduce_bucket_size", 50_000_000)
    if engine.stage < 3:
        yield default(f"{zero}.allgather_bucket_size", 50_000_000)


def _put(config: dict[str, Any], path: str, value: object) -> None:
    *tables, name = path.split(".")
    for table in tables:
        config = config.setdefault(table, {})
    config[name] = value


def _merged(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in extra.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if both else value
    return merged

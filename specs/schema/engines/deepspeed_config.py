"""DeepSpeed's JSON configuration: what follows from the spec, and the keys of `[actor.engine.deepspeed]`.

The spec decides what is trained and how; its own table may add what the spec does not say (bucket sizes, logging, …),
nested tables merging with what is derived. DeepSpeed itself checks names and values
(`backends/zero/deepspeed_start.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specs.schema.engines.library_keys import Library, Settings, leaves
from specs.schema.role_section import DType, Optimizer

# DeepSpeed measures the gradient norm at every stage only when it clips; no norm in fp32 reaches this.
NEVER_CLIPS = 1e38
ZERO = "zero_optimization"

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
        "run.seed": "seed",
        "checkpoint.every": "checkpoint",
        "{role}.engine.stage": f"{ZERO}.stage",
        "{role}.engine.offload_optimizer": f"{ZERO}.offload_optimizer.device {ZERO}.cpu_offload",
        "{role}.engine.offload_parameters": f"{ZERO}.offload_param.device {ZERO}.cpu_offload_param",
    },
    # What lays tensors out otherwise than checkpoints and weight export expect, or cannot work.
    refused={
        "a second partition of the parameters": f"{ZERO}.zero_hpz_partition_size",
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


def deepspeed_settings(
    dtype: DType, optimizer: Optimizer | None, device: str, stage: int, *, offload: tuple[bool, bool]
) -> Settings:
    """Return what rlctl tells DeepSpeed. `optimizer` None: a role that does not learn. `offload`: whether optimizer
    state and parameters are kept on the host."""
    offload_optimizer, offload_parameters = offload
    fixed: dict[str, object] = {
        # Micro-batches are made by tokens, so DeepSpeed counts nothing: a step ends where the engine says.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "data_types.grad_accum_dtype": "fp32",
        f"{ZERO}.stage": stage,
        f"{ZERO}.memory_efficient_linear": False,  # it would exchange torch's linear function in the whole process
    }
    defaults: dict[str, object] = {"communication_data_type": "fp32"}
    if dtype == "bf16":
        fixed |= {"bf16.enabled": True, "bf16.check_grad_overflow": True}
    # DeepSpeed overlaps by default at stage 3 only. At stage 1 it reduces once, at the step: nothing to overlap with.
    (fixed if stage == 1 else defaults)[f"{ZERO}.overlap_comm"] = stage == 3
    pinned = device.startswith("cuda")
    if offload_parameters:
        fixed[f"{ZERO}.offload_param.device"] = "cpu"
        defaults[f"{ZERO}.offload_param.pin_memory"] = pinned
    if stage == 3:
        defaults[f"{ZERO}.stage3_param_persistence_threshold"] = 100_000
        defaults[f"{ZERO}.stage3_prefetch_bucket_size"] = 50_000_000
    if optimizer is None:
        return Settings(fixed, defaults)
    fixed |= {
        "gradient_clipping": optimizer.max_grad_norm or NEVER_CLIPS,
        # torch's fused AdamW on both devices: DeepSpeed's own would be compiled at the first start.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if offload_optimizer:
        fixed[f"{ZERO}.offload_optimizer.device"] = "cpu"
        defaults[f"{ZERO}.offload_optimizer.pin_memory"] = pinned
    defaults[f"{ZERO}.reduce_bucket_size"] = 50_000_000
    if stage < 3:
        defaults[f"{ZERO}.allgather_bucket_size"] = 50_000_000
    return Settings(fixed, defaults)


def deepspeed_json(settings: Settings, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole configuration: what rlctl sets, with the spec's own keys in it."""
    config: dict[str, Any] = {}
    for path, value in {**settings.fixed, **settings.defaults, **dict(leaves(own))}.items():
        *tables, name = path.split(".")
        inner = config
        for table in tables:
            inner = inner.setdefault(table, {})
        inner[name] = value
    return config

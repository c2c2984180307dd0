"""The keys of `[actor.engine.deepspeed]` that a spec may not change.

The spec decides what is trained and how; its own table may add what the spec does not say (bucket sizes, logging, …).
DeepSpeed itself checks names and values (`backends/zero/deepspeed_start.py`).
"""

from __future__ import annotations

from specs.schema.engines.library_keys import Library

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

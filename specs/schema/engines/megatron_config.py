"""Megatron-core's options: what follows from the spec, and the keys of `[actor.engine.megatron]`.

The spec decides what is trained and how; its own table may add options that it does not have, under Megatron-core's own
names. An option goes to each of its classes that has it (the transformer's, the optimizer's, the one of gradients),
and these check names and values (`backends/megatron/own_options.py`).
"""

from __future__ import annotations

from specs.packages import page
from specs.schema.engines.library_keys import Library
from specs.schema.role_section import Optimizer

LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"
"""Whose layers: values of Megatron-core's `transformer_impl`."""

MEGATRON = Library(
    "Megatron-core",
    "megatron",
    decided_by={
        "{role}.engine.tensor_parallel": "tensor_model_parallel_size",
        "{role}.engine.pipeline_parallel": "pipeline_model_parallel_size",
        "{role}.engine.virtual_pipeline": "virtual_pipeline_model_parallel_size overlap_p2p_comm",
        "{role}.engine.tensor_sequence_parallel": "sequence_parallel",
        "{role}.engine.context_parallel": "context_parallel_size",
        "{role}.engine.expert_parallel": "expert_model_parallel_size",
        "{role}.engine.expert_tensor_parallel": "expert_tensor_parallel_size",
        "{role}.dtype": "params_dtype pipeline_dtype bf16 fp16 enable_autocast autocast_dtype main_params_dtype",
        "{role}.gradient_checkpointing": "recompute_granularity recompute_method recompute_num_layers "
        "recompute_modules num_microbatches_with_partial_activation_checkpoints",
        "{role}.optimizer.lr": "lr decoupled_lr decoupled_min_lr",
        "{role}.optimizer.schedule": "min_lr",
        "{role}.optimizer.weight_decay": "weight_decay",
        "{role}.optimizer.betas": "adam_beta1 adam_beta2",
        "{role}.optimizer.eps": "adam_eps",
        "{role}.optimizer.max_grad_norm": "clip_grad",
        "{role}.optimizer": "optimizer",
    },
    # What would change results, checkpoints or syncs without a word. What else rlctl sets is compared at build.
    refused={
        "config.json of the model says it": "num_layers rotary_ no_rope_freq window_ layernorm_ activation_func "
        "glu_linear_offset",
        "rlctl computes experts as config.json of the model says": "moe_",
        "rlctl trains in fp32 and bf16": "fp8 fp4 keep_fp8 reuse_grad_buf loss_scale",
        "of TransformerEngine, rlctl takes the layers alone": "tp_comm_ cpu_offloading use_te_ cuda_graph "
        "apply_rope_fusion",
        f"attention is rlctl's own ({page('engines.md')})": "attention_ softmax_",
        "weights would be a step old when they are sent to samplers": "overlap_param_gather",
        "a step that is not finite is skipped, not an error": "check_for_",
        "checkpoints and weight sync read the distributed optimizer's layout": "use_megatron_fsdp use_custom_fsdp "
        "num_distributed_optimizer_instances",
        "AdamW decays matrices alone, apart from their gradients": "decoupled_weight_decay apply_wd_to_qk_layernorm",
        "Adam's moments are fp32": "use_precision_aware_optimizer",
        "optimizer state in host memory is not in rlctl yet for this engine": "optimizer_cpu_offload",
        "losses divide by global counts": "average_in_collective",
    },
)

GRADIENTS = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True}


def adam_settings(optimizer: Optimizer) -> dict[str, object]:
    """Return Megatron-core's settings of AdamW with weight decay on matrices alone, over the data ranks."""
    return {
        "optimizer": "adam",
        "lr": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_eps": optimizer.eps,
        "clip_grad": optimizer.max_grad_norm,
        "use_distributed_optimizer": True,
    }

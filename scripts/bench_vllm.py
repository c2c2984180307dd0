"""The rollout engines torch and vllm on the same work, each in an interpreter of its own, taking turns.

    scripts/setup-engine vllm
    python scripts/bench_vllm.py [--repeats 5] [--threads 2] [--hidden 256] [--vllm .venv-vllm/bin/python]

The same random model, prompts, temperature and limits on both sides; one warm-up each, then pairs whose order changes
from one to the next. Seconds are per generated token, because the two draw different random numbers and so different
lengths. Reported: medians, and the median of the pairwise ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from _bench import (
    GROUP_SIZE,
    GROUPS,
    PROMPT_TOKENS,
    ROOT,
    SMALL,
    WORKS,
    group_prompts,
    model_config,
    rollout_config,
    write_model,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256, help="hidden size; a multiple of 128")
    parser.add_argument("--vllm", default=str(ROOT / ".venv-vllm" / "bin" / "python"), help="interpreter that has vLLM")
    parser.add_argument("--serve", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    with tempfile.TemporaryDirectory() as folder:
        hidden = options.hidden
        parameters = write_model(folder, {**SMALL, "hidden_size": hidden, "intermediate_size": 2 * hidden})
        print(f"{parameters:,} parameters, {GROUPS} prompts x {GROUP_SIZE} answers, {options.threads} threads")
        sides = [Side("torch", sys.executable, folder, options), Side("vllm", options.vllm, folder, options)]
        try:
            for name, limit in WORKS.items():
                print(compare(name, limit, sides, options.repeats))
        finally:
            for side in sides:
                side.close()


def compare(name: str, limit: int, sides: list[Side], repeats: int) -> str:
    """One line: tokens per second of both, and how many times quicker torch was."""
    for side in sides:
        side.run(limit, seed=0)
    pairs = []
    for number in range(1, repeats + 1):
        order = sides if number % 2 else sides[::-1]
        seconds = {side.kind: side.run(limit, seed=number) for side in order}
        pairs.append((seconds["torch"], seconds["vllm"]))
    torch_s, vllm_s = (median(side) for side in zip(*pairs, strict=True))
    ratio = median(theirs / ours for ours, theirs in pairs)
    return f"{name} (limit {limit}): torch {1 / torch_s:,.0f} tok/s, vllm {1 / vllm_s:,.0f} tok/s, ratio {ratio:.2f}"


class Side:
    """An engine in a process of its own: takes `LIMIT SEED`, answers with seconds and tokens."""

    def __init__(self, kind: str, python: str, folder: str, options: argparse.Namespace) -> None:
        self.kind = kind
        threads = str(options.threads)
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",  # as rlctl starts its roles
            "GOMP_SPINCOUNT": "20000",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), "--serve", kind, folder],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, limit: int, *, seed: int) -> float:
        """Seconds per generated token."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(limit, seed, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith('{"seconds"'):
                answer = json.loads(line)
                return float(answer["seconds"]) / int(answer["tokens"])
        raise SystemExit(f"the {self.kind} side ended with code {self.process.wait()}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def serve(kind: str, folder: str) -> None:
    """The other end of a `Side`."""
    from safetensors.numpy import load_file

    from backends.protocol import Rank
    from backends.registry import rollout_engine
    from specs.wire.role_config import Sampling

    model = model_config(folder, PROMPT_TOKENS + max(WORKS.values()), from_scratch=False)
    config = rollout_config(model, {"kind": kind, "max_sequences": GROUPS * GROUP_SIZE}, PROMPT_TOKENS)
    engine = rollout_engine(kind).build(config, Rank())
    weights = load_file(str(Path(folder) / "model.safetensors"))
    for spec in engine.weight_specs():
        engine.import_weight(spec, np.ascontiguousarray(weights[spec.name]).reshape(-1).view(np.uint8))
    engine.finish_import()
    prompts = group_prompts(GROUPS, GROUP_SIZE, PROMPT_TOKENS)
    for line in sys.stdin:
        limit, seed = map(int, line.split())
        started = time.monotonic()
        told = engine.generate(prompts, Sampling(seed=seed, max_response_tokens=limit), lambda batch: None)
        answer = {"seconds": time.monotonic() - started, "tokens": told["generated_tokens"]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
GROUPS, GROUP_SIZE, PROMPT_TOKENS, END_TOKEN, VOCAB = 8, 16, 24, 1, 52
WORKS = {"short ragged": 64, "long tail": 256}


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
        parameters = write_model(folder, options.hidden)
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


def write_model(folder: str, hidden: int) -> int:
    """A random Qwen2 with weights in `folder`; returns its number of parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            eos_token_id=END_TOKEN,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    )
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def serve(kind: str, folder: str) -> None:
    """The other end of a `Side`."""
    from safetensors.numpy import load_file

    from backends.protocol import Rank
    from backends.registry import rollout_engine
    from specs.batch import Batch
    from specs.role_config import ModelConfig, RolloutConfig, Sampling

    model = ModelConfig(
        path=folder,
        from_scratch=False,
        seed=0,
        dtype="fp32",
        attn_implementation="auto",
        trust_remote_code=False,
        device="cpu",
        max_sequence_tokens=PROMPT_TOKENS + max(WORKS.values()),
    )
    table = {"kind": kind, "max_sequences": GROUPS * GROUP_SIZE}
    config = RolloutConfig.model_validate(
        {
            "model": model,
            "engine": table,
            "max_prompt_tokens": PROMPT_TOKENS,
            "max_response_tokens": max(WORKS.values()),
            "stop": (),
        }
    )
    engine = rollout_engine(kind).build(config, Rank())
    weights = load_file(str(Path(folder) / "model.safetensors"))
    for spec in engine.weight_specs():
        engine.import_weight(spec, np.ascontiguousarray(weights[spec.name]).reshape(-1).view(np.uint8))
    engine.finish_import()
    prompts = Batch(columns())
    for line in sys.stdin:
        limit, seed = map(int, line.split())
        started = time.monotonic()
        told = engine.generate(prompts, Sampling(seed=seed, max_response_tokens=limit), lambda batch: None)
        answer = {"seconds": time.monotonic() - started, "tokens": told["generated_tokens"]}
        print(json.dumps(answer), flush=True)


def columns() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    group_B = np.repeat(np.arange(GROUPS), GROUP_SIZE)
    return {
        "tokens_T": np.repeat(rng.integers(2, VOCAB, (GROUPS, PROMPT_TOKENS)), GROUP_SIZE, axis=0).reshape(-1),
        "length_B": np.full(len(group_B), PROMPT_TOKENS),
        "group_B": group_B,
        "id_B": np.arange(len(group_B)),
        "row_B": group_B,
    }


if __name__ == "__main__":
    main()

"""Seconds per GRPO step: rlctl against TRL's GRPOTrainer, on the CPU, on the same work.

    .venv/bin/python scripts/bench_vs_trl.py                     both works, two rounds each
    .venv/bin/python scripts/bench_vs_trl.py --work long-tail --rounds 1

The same model folder (2.4M-parameter Qwen2, random weights, fp32), the same prompts, group size, token limit and
thread count; learning rate 0, so that lengths stay put; steps after the third; the sides take turns, so that both see
the same machine. TRL is 1.16 with transformers generation, in its own environment (`.venv-trl`, made on the first
call).

rlctl's side is `rlctl train` itself, its numbers are those of `metrics.jsonl`: processes, wire, rewards, verified
weight sync and all.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
TRL_PACKAGES = ("trl==1.16.*", "transformers==5.23.0", "datasets", "accelerate")
TORCH = "torch==2.13.0"
WARM_UP = 3  # steps left out
ENVIRONMENT = dict(os.environ)  # before `_bench` says how OpenMP threads wait


@dataclass(frozen=True)
class Work:
    """Describe 128 answers per step. A random model ends each with probability 1 / vocabulary at each token, about."""

    name: str
    vocab: int
    limit: int
    prompts: int = 8
    group: int = 16
    prompt_tokens: int = 12


WORKS = {
    "short-ragged": Work("short-ragged", vocab=128, limit=64),
    "long-tail": Work("long-tail", vocab=52, limit=256),
}


Timings = dict[str, list[float]]
"""Name → a value for each step after the warm-up."""
RECORDED = {"step_s": "time/step_s", "generate_s": "time/rollout_s", "length": "rollout/length_mean"}


def add(timings: Timings, found: Timings) -> None:
    for name, values in found.items():
        timings.setdefault(name, []).extend(values[WARM_UP:])


@dataclass(frozen=True)
class Bench:
    """Lay one work out in a folder that both sides read, and run each."""

    work: Work
    folder: Path
    threads: int

    @property
    def prompts(self) -> list[str]:
        draw = random.Random(0)
        return ["".join(draw.choices("!#$%&()*+,-./0", k=self.work.prompt_tokens)) for _ in range(self.work.prompts)]

    def lay_out(self) -> None:
        """Write the model folder with weights, the data file and the reward."""
        from _bench import SMALL, write_model
        from tiny_model import write_bytes_tokenizer, write_task

        shape = {**SMALL, "vocab_size": self.work.vocab, "max_position_embeddings": 512}
        count = write_model(self.folder / "model", {**shape, "bos_token_id": None, "eos_token_id": 0})
        write_bytes_tokenizer(self.folder / "model", self.work.vocab)
        write_task(self.folder, self.prompts)
        print(f"model: {count / 1e6:.2f}M parameters, vocabulary {self.work.vocab}")

    @property
    def environment(self) -> dict[str, str]:
        return {**ENVIRONMENT, "OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}

    def run_trl(self, timings: Timings, steps: int) -> None:
        order = {
            "model": str(self.folder / "model"),
            "prompts": self.prompts,
            "group": self.work.group,
            "limit": self.work.limit,
            "steps": WARM_UP + steps,
            "threads": self.threads,
            "seed": len(timings.get("step_s", [])),
            "out": str(self.folder / "trl"),
        }
        text = call([TRL_PYTHON, ROOT / "scripts" / "trl_side.py", json.dumps(order)], self.environment)
        found = json.loads(next(line for line in text.splitlines() if line.startswith("RESULT "))[7:])
        add(timings, found)

    def run_rlctl(self, timings: Timings, steps: int) -> None:
        spec = self.folder / "spec.toml"
        spec.write_text(self.spec(WARM_UP + steps, seed=len(timings.get("step_s", []))))
        run_dir = Path(tempfile.mkdtemp(dir=self.folder)) / "run"
        call([sys.executable, "-m", "rlctl", "train", spec, "--run-dir", run_dir], self.environment)
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        add(timings, {name: [record[key] for record in records] for name, key in RECORDED.items()})

    def spec(self, steps: int, seed: int) -> str:
        from _bench import spec_text

        work, role = self.work, f"threads = {self.threads}"
        actor = f"micro_batch_tokens = 4096\noptimizer = {{ lr = 0.0 }}\n{role}"
        more = {"run": f"seed = {seed}", "actor": actor, "rollout": role}
        return spec_text(self.folder, steps, (work.prompts, work.group), (work.prompt_tokens, work.limit), more)


def call(command: list[Any], environment: dict[str, str]) -> str:
    """Return the output of a command; end with its last words where it fails."""
    done = subprocess.run(
        [str(part) for part in command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=3600
    )
    if done.returncode:
        raise SystemExit(f"{command[1]} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def ensure_trl() -> None:
    if TRL_PYTHON.exists() and subprocess.run([TRL_PYTHON, "-c", "import trl"], capture_output=True).returncode == 0:
        return
    print("making .venv-trl (once) …")
    call([sys.executable, "-m", "venv", "--clear", TRL_PYTHON.parent.parent], ENVIRONMENT)
    call([TRL_PYTHON, "-m", "pip", "install", "--upgrade", "pip>=24.1"], ENVIRONMENT)
    has_gpu = Path("/proc/driver/nvidia/version").exists()
    kind = "cuda" if has_gpu else "cpu"
    extra = call([TRL_PYTHON, ROOT / "scripts" / "_pick_torch.py", TORCH, kind], ENVIRONMENT).split()
    call([TRL_PYTHON, "-m", "pip", "install", "--no-deps", *extra, TORCH], ENVIRONMENT)
    call([TRL_PYTHON, "-m", "pip", "install", TORCH, *TRL_PACKAGES], ENVIRONMENT)


def measure(bench: Bench, rounds: int, steps: int) -> tuple[Timings, Timings]:
    """Return the timings of TRL and of rlctl, which take turns."""
    bench.lay_out()
    trl: Timings = {}
    ours: Timings = {}
    for number in range(rounds):
        bench.run_trl(trl, steps)
        bench.run_rlctl(ours, steps)
        print(f"{bench.work.name}, round {number + 1}: TRL {statistics.median(trl['step_s']):.2f} s, "
              f"rlctl {statistics.median(ours['step_s']):.2f} s per step")  # fmt: skip
    return trl, ours


def show(results: dict[str, tuple[Timings, Timings]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Seconds per step (median; steps after the third, 128 answers each)")
    for name in ("work", "side", "mean length", "step s", "generation s", "rest s", "ratio"):
        table.add_column(name, justify="left" if name in ("work", "side") else "right")
    for work, sides in results.items():
        theirs = statistics.median(sides[0]["step_s"])
        for side, timings in zip(("TRL 1.16", "rlctl"), sides, strict=True):
            step, generate = statistics.median(timings["step_s"]), statistics.median(timings["generate_s"])
            ratio = "" if timings is sides[0] else f"{theirs / step:.2f}×"
            times = [f"{seconds:.2f}" for seconds in (step, generate, step - generate)]
            table.add_row(work, side, f"{statistics.fmean(timings['length']):.1f}", *times, ratio)
        table.add_section()
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=[*WORKS, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="measured steps per round")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    ensure_trl()
    results = {}
    for name in WORKS if asked.work == "all" else [asked.work]:
        with tempfile.TemporaryDirectory(prefix="rlctl-bench-") as folder:
            bench = Bench(WORKS[name], Path(folder), asked.threads)
            results[name] = measure(bench, asked.rounds, asked.steps)
    show(results)


if __name__ == "__main__":
    main()

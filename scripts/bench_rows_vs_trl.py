"""Losses and seconds per step of recipes that learn from rows: `rlctl train` against TRL's own trainers, on the CPU.

    .venv/bin/python scripts/bench_rows_vs_trl.py                     every objective that TRL has: losses, step by step
    .venv/bin/python scripts/bench_rows_vs_trl.py --speed --rounds 2  sft, dpo and the reward model, by turns

The same model folder (2.4M-parameter Qwen2, random weights, fp32), the same rows in the same order, full batches, AdamW
without decay. Losses are compared at every step, so they follow from the gradients of those before. For the speed rows
are ragged, and the prompts of pairs are four times as long as their answers. TRL is 1.16 in its own environment
(`.venv-trl`, made on the first call), padded as on any machine without flash attention.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_vs_trl import ENVIRONMENT, ROOT, TRL_PYTHON, call, ensure_trl

THREADS, WARM_UP, VOCABULARY = 2, 3, 128
LETTERS = "!#$%&()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Work:
    """One objective on both sides."""

    recipe: str
    objective: dict[str, Any]
    trainer: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def role(self) -> str:
        return "reward_model" if self.recipe == "reward_model" else "actor"


def of_dpo(loss_type: Any, **options: Any) -> dict[str, Any]:
    return {"beta": 0.1, "loss_type": loss_type, **options}


WORKS = {
    "nll": Work("sft", {"kind": "nll"}, "sft", {"loss_type": "nll"}),
    "dft": Work("sft", {"kind": "dft"}, "sft", {"loss_type": "dft"}),
    "dpo": Work("preference", {"kind": "dpo"}, "dpo", of_dpo(["sigmoid"])),
    "ipo": Work("preference", {"kind": "ipo"}, "dpo", of_dpo(["ipo"])),
    "hinge": Work("preference", {"kind": "hinge"}, "dpo", of_dpo(["hinge"])),
    "robust": Work("preference", {"kind": "robust"}, "dpo", of_dpo(["robust"], label_smoothing=0.1)),
    "apo_zero": Work("preference", {"kind": "apo_zero"}, "dpo", of_dpo(["apo_zero"])),
    "sppo": Work("preference", {"kind": "sppo"}, "dpo", of_dpo(["sppo_hard"])),
    "rpo": Work("preference", {"mixture": [{"kind": "dpo"}, {"kind": "nll"}]}, "dpo", of_dpo(["sigmoid", "sft"])),
    "kto": Work(
        "preference", {"kind": "kto", "undesirable_weight": 1.5}, "kto", {"beta": 0.1, "undesirable_weight": 1.5}
    ),
    "simpo": Work(
        "preference",
        {"kind": "simpo", "beta": 2.0, "gamma": 0.5},
        "cpo",
        {"beta": 2.0, "simpo_gamma": 0.5, "loss_type": "simpo", "cpo_alpha": 0.0},
    ),
    "bradley_terry": Work(
        "reward_model", {"kind": "bradley_terry", "center_coef": 0.01}, "reward", {"center_rewards_coefficient": 0.01}
    ),
}
SPEED = {"nll": (64, 12, 96), "dpo": (32, 96, 24), "bradley_terry": (32, 96, 24)}
"""Rows of a step, tokens of a prompt, mean tokens of an answer."""


def rows_of(work: Work, count: int, prompt: int, answer: int) -> list[dict[str, Any]]:
    draw = random.Random(0)

    def text(tokens: int) -> str:
        return "".join(draw.choices(LETTERS, k=tokens))

    def ragged() -> str:
        return text(max(2, min(4 * answer, round(draw.expovariate(1 / answer)))))

    def row() -> dict[str, Any]:
        if work.recipe == "sft":
            return {"prompt": text(prompt), "completion": ragged()}
        before = text(draw.randint(prompt // 2, prompt))
        if work.trainer == "kto":
            return {"prompt": before, "completion": ragged(), "label": draw.random() < 0.5}
        return {"prompt": before, "chosen": ragged(), "rejected": ragged()}

    return [row() for _ in range(count)]


def lay_out(folder: Path, work: Work, rows: list[dict[str, Any]]) -> None:
    """Write the model folder with weights, and the rows."""
    from _bench import SMALL, write_model
    from tiny_model import write_bytes_tokenizer

    shape = {**SMALL, "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": 0}
    write_model(folder / "model", shape)
    if work.recipe == "reward_model":
        import torch
        from transformers import AutoModelForSequenceClassification

        torch.manual_seed(0)
        scorer = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
        scorer.save_pretrained(folder / "model")
    write_bytes_tokenizer(folder / "model", VOCABULARY)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }"
    return "[" + ", ".join(map(toml, value)) + "]" if isinstance(value, list) else json.dumps(value)


def run_rlctl(folder: Path, work: Work, batch: int, steps: int, lr: float) -> dict[str, list[float]]:
    tables = {
        "run": {"recipe": work.recipe, "name": "bench", "steps": steps},
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "rows.jsonl"), "rows_per_step": batch, "max_tokens": 1024, "shuffle": False},
        "objective": work.objective,
        work.role: {"micro_batch_tokens": 4096, "threads": THREADS, "optimizer": {"lr": lr}},
        "checkpoint": {"every": steps},
    }
    spec = "schema = 1\n" + "".join(
        f"[{name}]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )
    (folder / "spec.toml").write_text(spec)
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    call([sys.executable, "-m", "rlctl", "train", folder / "spec.toml", "--run-dir", run], ENVIRONMENT)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = {"loss": f"{work.role}/loss", "step_s": "time/step_s"}
    return {name: [record[key] for record in records] for name, key in keys.items()}


def run_trl(folder: Path, work: Work, batch: int, steps: int, lr: float) -> dict[str, list[float]]:
    order = {
        **{"trainer": work.trainer, "options": work.options, "model": str(folder / "model"), "max_tokens": 1024},
        **{"rows": str(folder / "rows.jsonl"), "batch": batch, "steps": steps, "lr": lr, "threads": THREADS},
        "out": str(folder / "trl"),
    }
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    text = call([TRL_PYTHON, ROOT / "scripts" / "trl_rows_side.py", json.dumps(order)], environment)
    found: dict[str, list[float]] = json.loads(next(x for x in text.splitlines() if x.startswith("RESULT "))[7:])
    return found


def compare_losses(name: str, steps: int = 4, batch: int = 16) -> None:
    work = WORKS[name]
    with tempfile.TemporaryDirectory(prefix="rlctl-bench-") as text:
        folder = Path(text)
        lay_out(folder, work, rows_of(work, steps * batch, 24, 16))
        ours, theirs = (run(folder, work, batch, steps, 1e-4)["loss"] for run in (run_rlctl, run_trl))
    gap = max(abs(one - other) / max(1.0, abs(other)) for one, other in zip(ours, theirs, strict=True))
    print(f"{name:14} rlctl {ours[0]:.6f} … {ours[-1]:.6f}, TRL {theirs[0]:.6f} … {theirs[-1]:.6f}: gap {gap:.1e}")


def compare_speed(name: str, rounds: int, steps: int = 8) -> None:
    work, (batch, prompt, answer) = WORKS[name], SPEED[name]
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory(prefix="rlctl-bench-") as text:
        folder = Path(text)
        lay_out(folder, work, rows_of(work, (WARM_UP + steps) * batch, prompt, answer))
        for _ in range(rounds):
            theirs += run_trl(folder, work, batch, WARM_UP + steps, 1e-5)["step_s"][WARM_UP:]
            ours += run_rlctl(folder, work, batch, WARM_UP + steps, 1e-5)["step_s"][WARM_UP:]
    medians = statistics.median(theirs), statistics.median(ours)
    print(f"{name:14} TRL {medians[0]:.3f} s, rlctl {medians[1]:.3f} s per step: {medians[0] / medians[1]:.2f}×")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true", help="seconds per step, by turns, instead of losses")
    parser.add_argument("--objective", choices=list(WORKS))
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    ensure_trl()
    for name in [asked.objective] if asked.objective else SPEED if asked.speed else WORKS:
        if asked.speed:
            compare_speed(name, asked.rounds)
        else:
            compare_losses(name)


if __name__ == "__main__":
    main()

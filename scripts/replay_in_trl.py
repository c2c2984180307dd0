"""Weights after runs of GRPO and its kin: rlctl's against those of TRL's trainers, on the same completions.

    .venv/bin/python scripts/replay_in_trl.py                  every case
    .venv/bin/python scripts/replay_in_trl.py gspo kl          some of them

`rlctl train` takes four steps of two updates each (`rloo`: one), and its reward function writes down what it grades.
TRL then gets these completions instead of its own; scores, advantages, losses, clipping and AdamW are its own.
What is printed is the distance between both models, as a share of the way that rlctl's has gone. One number of TRL's is
changed: it divides a group's scores by their deviation plus 1e-4, rlctl by that plus 1e-6.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_rows_vs_trl import LETTERS
from bench_vs_trl import ENVIRONMENT, ROOT, TRL_PYTHON, call, ensure_trl

STEPS, EPOCHS, PROMPTS, GROUP, LIMIT = 4, 2, 8, 4, 96
OPTIMIZER = {"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
PRINTABLE = 95  # the end token and those of ASCII: of these a text has its tokens back
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token-mean": ({}, {"loss_type": "dapo"}),
    "seq-mean": ({"loss_aggregation": "seq-mean-token-mean"}, {"loss_type": "grpo"}),
    "clip_high": ({"clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dual_clip": ({"dual_clip": 1.3}, {"loss_type": "dapo", "delta": 1.3}),
    "truncated": ({"mask_truncated": True}, {"loss_type": "dapo", "mask_truncated_completions": True}),
    "dr_grpo": ({"kind": "dr_grpo"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "batch": ({"scale": "batch"}, {"loss_type": "dapo", "scale_rewards": "batch"}),
    "gspo": (
        {"kind": "gspo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": ({"kind": "cispo", "clip_high": 1.0}, {"loss_type": "cispo", "epsilon_high": 2.0}),
    "sapo": ({"kind": "sapo"}, {"loss_type": "sapo"}),
    "kl": ({"kl_coef": 0.04}, {"loss_type": "dapo", "beta": 0.04, "use_bias_correction_kl": False}),
    "kl-unbiased": ({"kl_coef": 0.04, "kl_estimator": "k3-unbiased"}, {"loss_type": "dapo", "beta": 0.04}),
    "entropy": ({"entropy_coef": 0.01}, {"loss_type": "dapo", "entropy_coef": 0.01}),
    # TRL's ratio is a sequence's, rlctl's a token's: the same in a step's first update.
    "rloo": (
        {"kind": "rloo", "epochs_per_step": 1, "kl_coef": 0.05, "kl_in": "reward", "kl_estimator": "k1"},
        {"beta": 0.05},
    ),
}
REWARD = """
import json

def score(prompt: str, completion: str) -> float:
    with open({seen!r}, "a") as file:
        file.write(json.dumps([prompt, completion]) + "\\n")
    return sum(letter in "AEIOU12345" for letter in completion) / 8 - len(completion) / 100
"""


def lay_out(folder: Path) -> None:
    """Write the model folder with weights, the rows and the reward. The answer is what check-config grades."""
    from _bench import SMALL, write_model
    from tiny_model import write_bytes_tokenizer

    draw = random.Random(0)
    write_model(folder / "model", {**SMALL, "vocab_size": PRINTABLE, "bos_token_id": None, "eos_token_id": 0})
    write_bytes_tokenizer(folder / "model", PRINTABLE)
    prompts = ["".join(draw.choices(LETTERS, k=draw.randint(4, 12))) for _ in range(STEPS * PROMPTS)]
    rows = [json.dumps({"prompt": prompt, "answer": "\n"}) for prompt in prompts]
    (folder / "data.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "reward.py").write_text(REWARD.format(seen=str(folder / "seen.jsonl")))


def run_rlctl(folder: Path, algorithm: dict[str, Any]) -> list[list[tuple[str, str]]]:
    """Train and export; return prompt and completion of each sample, by step, a group's together."""
    from _bench import spec_text

    spec, run = folder / "spec.toml", folder / "run"
    alone = dict.fromkeys(("actor", "rollout"), "threads = 1")
    spec.write_text(spec_text(folder, STEPS, (PROMPTS, GROUP), (12, LIMIT), alone))
    keys = {f"algorithm.{key}": value for key, value in {"epochs_per_step": EPOCHS, **algorithm}.items()}
    keys |= {f"actor.optimizer.{key}": value for key, value in OPTIMIZER.items()}
    changes = [word for key, value in keys.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    call([sys.executable, "-m", "rlctl", "train", spec, "--run-dir", run, *changes], ENVIRONMENT)
    exported = [run, folder / "ours", "--dtype", "fp32"]
    call([sys.executable, "-m", "rlctl", "export-checkpoint", *exported], ENVIRONMENT)
    found = [tuple(json.loads(line)) for line in (folder / "seen.jsonl").read_text().splitlines()]
    graded = [(prompt, completion) for prompt, completion in found if completion != "\n"]
    size = PROMPTS * GROUP
    assert len(graded) == STEPS * size, f"{len(graded)} completions were graded"
    return [sorted(graded[step * size : (step + 1) * size]) for step in range(STEPS)]


def run_trl(folder: Path, samples: list[list[tuple[str, str]]], algorithm: Any, options: dict[str, Any]) -> None:
    optimizer = {{"lr": "learning_rate"}.get(key, key): value for key, value in OPTIMIZER.items()}
    order = {"folder": str(folder), "samples": samples, "limit": LIMIT, "group": GROUP}
    order["options"] = {**optimizer, **options}
    order["trainer"] = "RLOO" if algorithm.get("kind") == "rloo" else "GRPO"
    (folder / "order.json").write_text(json.dumps({**order, "epochs": algorithm.get("epochs_per_step", EPOCHS)}))
    environment = {**ENVIRONMENT, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    call([TRL_PYTHON, ROOT / "scripts" / "trl_replay_side.py", folder / "order.json"], environment)


def distance(folder: Path) -> float:
    """Return how far both models are apart, as a share of the way that ours has gone."""
    import numpy as np
    from safetensors.numpy import load_file

    places = [folder / "model", folder / "ours", folder / "theirs"]
    start, ours, theirs = (load_file(place / "model.safetensors") for place in places)
    apart, gone = (sum(float(((ours[name] - other[name]) ** 2).sum()) for name in ours) for other in (theirs, start))
    return float(np.sqrt(apart / gone))


def main() -> None:
    ensure_trl()
    for name in sys.argv[1:] or CASES:
        algorithm, options = CASES[name]
        with tempfile.TemporaryDirectory(prefix="rlctl-bench-") as text:
            folder = Path(text)
            lay_out(folder)
            run_trl(folder, run_rlctl(folder, algorithm), algorithm, options)
            print(f"{name:12} {distance(folder):.1e}", flush=True)


if __name__ == "__main__":
    main()

"""The end of `scripts/quickstart`: how the reward rose, and the exported model at work in plain transformers."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from rich.text import Text

from rlctl.show.metrics_file import read_metrics
from rlctl.show.screen import Screen
from rlctl.show.text_format import duration, number, sparkline

GOAL = 0.95
SHOWN = 8


def show_reward(run: Path, console: Screen) -> None:
    steps = [record for record in read_metrics(run / "metrics.jsonl") if record.get("reward/mean") is not None]
    rewards = [record["reward/mean"] for record in steps]
    spent, reached = 0.0, None
    for record in steps:
        spent += record.get("time/wall_s") or record["time/step_s"]
        if reached is None and record["reward/mean"] >= GOAL:
            reached = spent
    line = (sparkline(rewards, 60), "green")
    first, last = number(rewards[0]), number(rewards[-1])
    console.print(Text.assemble("\n", ("mean reward", "bold"), f"  {first}  ", line, f"  {last}"))
    when = f", {GOAL} reached after {duration(reached)}" if reached is not None else ""
    console.print(f"{len(steps)} steps in {duration(spent)}{when}")


def show_answers(folder: Path, console: Screen) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    draw = random.Random()
    numbers = ["".join(draw.choices("0123456789", k=4)) for _ in range(SHOWN)]
    console.print(Text.assemble("\n", (str(folder), "bold"), ", loaded by transformers, answers greedily:"))
    for digits in numbers:
        inputs = tokenizer(f"{digits}>", return_tensors="pt")
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right = answer == "".join(sorted(digits))
        console.print(Text.assemble(f"  {digits} → {answer}  ", ("✓", "green") if right else ("✗", "red")))


if __name__ == "__main__":
    run_dir, export_dir = Path(sys.argv[1]), Path(sys.argv[2])
    screen = Screen(soft_wrap=True)
    show_reward(run_dir, screen)
    show_answers(export_dir, screen)
    screen.print(f"\nthe run on one page: {run_dir / 'report.html'}")

"""The other side of `replay_in_trl.py`: TRL's trainers on completions of others. Runs in its own environment.

python scripts/trl_replay_side.py ORDER.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from _trl import QUIET_ON_CPU

OURS, THEIRS = 1e-6, 1e-4  # what is added to the deviation by which a group's scores are divided


def main(order: dict[str, Any]) -> None:
    """Train on the samples of each step in turn, and write the model."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer import grpo_trainer

    is_rloo = order["trainer"] == "RLOO"
    base, configs = (getattr(trl, order["trainer"] + what) for what in ("Trainer", "Config"))
    folder = Path(order["folder"])
    sys.path.insert(0, str(folder))
    from reward import score  # type: ignore[import-not-found]

    deviation = grpo_trainer.nanstd
    grpo_trainer.nanstd = lambda *given, **named: deviation(*given, **named) - THEIRS + OURS
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    steps = iter(order["samples"])

    class Replayed(base):  # type: ignore[misc, valid-type]
        def _generate_single_turn(self, *_: Any, **__: Any) -> Any:
            texts = [text for _, text in next(steps)]
            ended = [[tokenizer.eos_token_id] if len(text) < order["limit"] else [] for text in texts]
            completions = [tokenizer(text).input_ids + end for text, end in zip(texts, ended, strict=True)]
            return completions if is_rloo else (completions, None)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [score("", completion) for completion in completions]

    prompts = [prompt for samples in order["samples"] for prompt in dict.fromkeys(prompt for prompt, _ in samples)]
    config = configs(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=len(order["samples"][0]),
        num_generations=order["group"],
        num_iterations=order["epochs"],
        max_steps=len(order["samples"]) * order["epochs"],
        max_completion_length=order["limit"],
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        **QUIET_ON_CPU,
        **order["options"],
    )
    trainer = Replayed(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.model.save_pretrained(folder / "theirs")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))

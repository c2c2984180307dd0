"""The other side of `replay_in_trl.py`: TRL's GRPOTrainer on completions of others. Runs in its own environment.

python scripts/trl_replay_side.py ORDER.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

OURS, THEIRS = 1e-6, 1e-4  # what is added to the deviation by which a group's scores are divided


def main(order: dict[str, Any]) -> None:
    """Train on the samples of each step in turn, and write the model."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    folder = Path(order["folder"])
    sys.path.insert(0, str(folder))
    from reward import score  # type: ignore[import-not-found]

    deviation = grpo_trainer.nanstd
    grpo_trainer.nanstd = lambda *given, **named: deviation(*given, **named) - THEIRS + OURS
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    steps = iter(order["samples"])

    def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
        samples = next(steps)
        ended = [[tokenizer.eos_token_id] if len(text) < order["limit"] else [] for _, text in samples]
        completions = [tokenizer(text).input_ids + end for (_, text), end in zip(samples, ended, strict=True)]
        return {
            "prompt_ids": [tokenizer(prompt).input_ids for prompt, _ in samples],
            "completion_ids": completions,
            "logprobs": [[0.0] * len(tokens) for tokens in completions],  # only read with vLLM
        }

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [score("", completion) for completion in completions]

    size = len(order["samples"][0])
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=size,
        num_generations=order["group"],
        num_iterations=order["epochs"],
        max_steps=len(order["samples"]) * order["epochs"],
        max_completion_length=order["limit"],
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        max_grad_norm=0.5,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **order["options"],
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": str(number)} for number in range(size)]),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    trainer.train()
    trainer.model.save_pretrained(folder / "theirs")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))

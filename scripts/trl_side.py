"""The other side of `bench_vs_trl.py`: TRL's GRPOTrainer on the same work. Runs in its own environment, prints JSON.

python scripts/trl_side.py '{"model": …, "prompts": …, "group": …, "limit": …, "steps": …, "out": …}'
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from _trl import QUIET_ON_CPU


def main(work: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of each step, of its generation, and the mean length of its answers."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(work["threads"])
    seen: dict[str, list[float]] = {"step_s": [], "generate_s": [], "length": []}

    class Timed(GRPOTrainer):
        """Times what TRL itself does; changes nothing."""

        def _generate(self, prompts: list[Any]) -> Any:
            started = time.perf_counter()
            answer = super()._generate(prompts)
            seen["generate_s"].append(time.perf_counter() - started)
            return answer

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen["step_s"].append(time.perf_counter() - self.started)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "completions/mean_length" in logs:
                seen["length"].append(logs["completions/mean_length"])

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text) % 2) for text in completions]

    config = GRPOConfig(
        output_dir=work["out"],
        per_device_train_batch_size=len(work["prompts"]) * work["group"],
        num_generations=work["group"],
        max_completion_length=work["limit"],
        max_steps=work["steps"],
        learning_rate=0.0,
        beta=0.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        logging_steps=1,
        seed=work["seed"],
        **QUIET_ON_CPU,
    )
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    trainer = Timed(
        model=work["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in work["prompts"]]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    return seen


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(json.loads(sys.argv[1]))))

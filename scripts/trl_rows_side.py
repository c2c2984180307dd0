"""The other side of `bench_rows_vs_trl.py`: TRL's own trainers on the same rows. Runs in its own environment, prints
JSON.

python scripts/trl_rows_side.py '{"trainer": …, "model": …, "rows": …, "batch": …, "steps": …, "options": …, "out": …}'
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from _trl import QUIET_ON_CPU

TRAINERS = {
    "sft": ("trl", "SFT"),
    "dpo": ("trl", "DPO"),
    "kto": ("trl", "KTO"),
    "reward": ("trl", "Reward"),
    "orpo": ("trl.experimental.orpo", "ORPO"),
    "cpo": ("trl.experimental.cpo", "CPO"),
}


def main(work: dict[str, Any]) -> dict[str, list[float]]:
    """Loss and seconds of each step."""
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

    torch.set_num_threads(work["threads"])
    seen: dict[str, list[float]] = {"loss": [], "step_s": []}
    module, name = TRAINERS[work["trainer"]]
    base, configs = getattr(import_module(module), f"{name}Trainer"), getattr(import_module(module), f"{name}Config")

    class Watched(base):
        """Keeps the loss of each step, and rows in their order; changes nothing else."""

        def compute_loss(self, *given: Any, **named: Any) -> Any:
            found = super().compute_loss(*given, **named)
            seen["loss"].append(float(found[0] if isinstance(found, tuple) else found))
            return found

        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen["step_s"].append(time.perf_counter() - self.started)

    config = configs(
        output_dir=work["out"],
        per_device_train_batch_size=work["batch"],
        max_steps=work["steps"],
        learning_rate=work["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_length=work["max_tokens"],
        **QUIET_ON_CPU,
        **work["options"],
    )
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    auto = AutoModelForSequenceClassification if work["trainer"] == "reward" else AutoModelForCausalLM
    models = {"model": auto.from_pretrained(work["model"], dtype=torch.float32)}
    if work["trainer"] in ("dpo", "kto"):
        models["ref_model"] = auto.from_pretrained(work["model"], dtype=torch.float32)
    rows = [json.loads(line) for line in Path(work["rows"]).read_text(encoding="utf-8").splitlines()]
    trainer = Watched(
        **models, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[Clock()]
    )
    trainer.train()
    return seen


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(json.loads(sys.argv[1]))))

"""Write the model card of an export, `README.md`: what was trained on what, how far it came, what was proven.

A card may become public: nothing of it is a path of this machine or a variable's value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl import __version__
from rlctl.models.paths import public_name
from rlctl.show import eval_keys
from rlctl.show.charts import points
from rlctl.show.metrics_file import read_metrics
from rlctl.show.text_format import number
from specs.errors import RunDirError
from specs.json_file import read_or_empty
from specs.load.dotted_keys import value_at

SETTINGS = {
    "recipe": "run.recipe",
    "objective": "objective.kind",
    "rows per step": "data.rows_per_step",
    "algorithm": "algorithm.kind",
    "prompts per step": "data.prompts_per_step",
    "completions of each": "algorithm.group_size",
    "max response tokens": "data.max_response_tokens",
    "KL coefficient": "algorithm.kl_coef",
    "seed": "run.seed",
}
RECIPE_TAGS = {"sft": "supervised-fine-tuning", "preference": "preference-tuning", "reward_model": "reward-model"}
_LOADED_BY = {  # what a class is called → which of transformers' finds it
    "SequenceClassification": "AutoModelForSequenceClassification",
    "ConditionalGeneration": "AutoModelForImageTextToText",
}
RESULTS = (*(each.key for each in eval_keys.HEADLINES), "rollout/length_mean", "rollout/finished")


@dataclass(frozen=True)
class ExportedModel:
    """Hold what an export knows of itself. `about`: what the checkpoint's manifest says of the role; `name`: the
    repository on the hub, or the folder."""

    run_dir: Path
    step: int
    about: Mapping[str, Any]
    role: str
    dtype: str
    adapter_only: bool
    name: str


def model_card(exported: ExportedModel, proof: Mapping[str, Any], folder: Path) -> str:
    """Return the card of the model in `folder`. What of the run directory cannot be read is left out."""
    spec = read_or_empty(exported.run_dir / "resolved.json")
    alone = " (LoRA adapters alone)" if exported.adapter_only else ""
    same = f"{proof['values']} values" if proof.get("values") else f"{proof.get('greedy_tokens', 0)} greedy tokens"
    parts = [
        _metadata(exported, spec, "" if proof.get("values") else "text-generation"),
        f"# {exported.name}",
        f"Step {exported.step} of the run `{exported.about['run']}`, trained by rlctl "
        f"{__version__}: the weights of the {exported.role}{alone} in {exported.dtype}.",
        _use(exported, folder),
        _table("## Training", ("", ""), _training(exported, spec)),
        _table("## Results", ("", "first", f"step {exported.step}"), _results(exported)),
        f"## Proof\n\nBefore it was written, the export was loaded again: {proof['tensors']} tensors equal the "
        f"checkpoint's, and {same} equal the trainer's. `rlctl_export.json` has the details.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _metadata(exported: ExportedModel, spec: Mapping[str, Any], pipeline: str) -> str:
    """Return the head that the hub reads: JSON values are YAML."""
    base = _chain(exported)[0 if exported.adapter_only else -1]  # adapters fit what they were trained on alone
    train = [name.partition(":")[0] for name in _sources(spec)]  # without its configuration
    kind = value_at(spec, "algorithm.kind") or value_at(spec, "objective.kind")
    recipe = str(value_at(spec, "run.recipe"))
    values = {
        "base_model": base if "/" in base else None,
        "datasets": [name for name in train if "/" in name],
        "library_name": "peft" if exported.adapter_only else "transformers",
        "pipeline_tag": pipeline,
        "tags": ["rlctl", RECIPE_TAGS.get(recipe, "reinforcement-learning"), *([kind] if kind else [])],
    }
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items() if value]
    return "\n".join(["---", *lines, "---"])


def _chain(exported: ExportedModel) -> list[str]:
    """Return where the weights come from, newest first; of a single model of this machine no name."""
    chain = exported.about.get("made_from") or []
    return chain if len(chain) > 1 else [public_name(str(exported.about["model_path"]))]


def _use(exported: ExportedModel, folder: Path) -> str:
    names = "".join(read_or_empty(folder / "config.json").get("architectures") or ())
    auto = next((auto for part, auto in _LOADED_BY.items() if part in names), "AutoModelForCausalLM")
    package, auto = ("peft", "AutoPeftModelForCausalLM") if exported.adapter_only else ("transformers", auto)
    return f'```python\nfrom {package} import {auto}\n\nmodel = {auto}.from_pretrained("{exported.name}")\n```'


def _sources(spec: Mapping[str, Any]) -> list[str]:
    """Return the names of what the run learned from; "" for files of this machine."""
    sets = value_at(spec, "data.sets") or []
    return [public_name(str(path)) for path in ([one["path"] for one in sets] or [value_at(spec, "data.train") or ""])]


def _training(exported: ExportedModel, spec: Mapping[str, Any]) -> list[tuple[str, str]]:
    section = value_at(spec, exported.role) or value_at(spec, "actor")
    sampled = spec if "algorithm" in spec else {}  # elsewhere completions are sampled and graded to evaluate
    terms, versions = value_at(sampled, "reward.terms") or [], value_at(exported.about, "versions") or {}
    rows = {
        "base model": " ← ".join(_chain(exported)) or "local files",
        "data": ", ".join(dict.fromkeys(name or "local files" for name in _sources(spec))) if spec else None,
        "reward": ", ".join(str(term.get("kind")) for term in terms if isinstance(term, Mapping)),
        "learning rate": value_at(section, "optimizer.lr"),
        "LoRA rank": value_at(section, "lora.rank"),
        **{label: value_at(spec, key) for label, key in SETTINGS.items()},
        "temperature": value_at(sampled, "rollout.temperature"),
        "versions": ", ".join(f"{name} {found}" for name, found in versions.items()),
    }
    return [(name, f"`{value}`") for name, value in rows.items() if value not in (None, "")]


def _results(exported: ExportedModel) -> list[tuple[str, ...]]:
    try:
        records = [line for line in read_metrics(exported.run_dir / "metrics.jsonl") if line["step"] <= exported.step]
    except RunDirError:
        return []
    rows: list[tuple[str, ...]] = []
    for key in (*eval_keys.keys(records).values(), *RESULTS):
        if found := points(records, key):
            (_, first), (step, last) = found[0], found[-1]
            of_step = "" if step == exported.step else f" (step {step})"
            rows.append((f"`{key}`", number(first), number(last) + of_step))
    return rows


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return f"{title}\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines) if rows else ""

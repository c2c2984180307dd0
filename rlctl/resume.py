"""What may differ between the attempts of one run, and whether a checkpoint is of this run's model.

Both are decided from the spec, the manifest and `config.json`, before any process is started. docs/checkpoints.md says
the same in words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specs.errors import CheckpointError
from specs.hub_cache import hub_snapshot
from specs.model_files import resolve_model
from specs.schema import Spec

# How a run is watched, where it runs and how its models are held: not what it computes, to rounding.
MAY_CHANGE = (
    *("run.steps", "run.dir", "run.start_timeout_s", "run.verb_timeout_s", "run.heartbeat_timeout_s", "run.colocate"),
    *("run.max_memory_growth_GiB", "checkpoint", "cluster", "eval", "tracking", "sync", "ref"),
    *("reward.workers", "reward.timeout_s", "reward.threads", "reward.env", "reward.python"),
    *("actor.env", "actor.python", "actor.threads", "actor.devices"),
    *("actor.processes", "actor.nodes", "actor.launcher", "actor.engine"),
    *("actor.micro_batch_tokens", "actor.gradient_checkpointing"),
    *("rollout.env", "rollout.python", "rollout.threads", "rollout.devices"),
    *("rollout.processes", "rollout.nodes", "rollout.launcher", "rollout.engine", "rollout.max_probe_gap"),
    *("rollout.warn_logprob_gap", "rollout.max_logprob_gap", "rollout.max_staleness", "rollout.max_restarts"),
    *("model.attn_implementation", "actor.attn_implementation", "rollout.attn_implementation"),
)
MAY_NOT_CHANGE = ("ref.model",)  # within the above

# Train engines that read each other's checkpoints (backends/train/shards.py).
SHARED_FORMAT = frozenset({"ddp", "fsdp2", "zero", "zero3"})
# Keys of a config.json that say nothing about what the model computes.
_NOT_THE_MODEL = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)


def differing_keys(before: Any, after: Any, prefix: str = "") -> list[str]:
    """Dotted keys whose values differ between two resolved specs."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(before.keys() | after.keys())
        return [
            found
            for key in keys
            for found in differing_keys(before.get(key), after.get(key), f"{prefix}.{key}" if prefix else key)
        ]
    return [] if before == after else [prefix]


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Differences between two resolved specs as lines `key: old → new`: those that a resume refuses, and the others."""
    refused: list[str] = []
    allowed: list[str] = []
    keys = [key for key in differing_keys(before, after) if key != "ref"]
    if before.get("ref") != after.get("ref") and "ref" in differing_keys(before, after):
        # The section came or went: what counts is the model that it names.
        keys.append("ref.model" if (_at(before, "ref.model") or "") != (_at(after, "ref.model") or "") else "ref")
    for key in keys:
        line = f"{key}: {_show(_at(before, key))} → {_show(_at(after, key))}"
        (allowed if _may_change(key) else refused).append(line)
    return refused, allowed


def _may_change(key: str) -> bool:
    return key not in MAY_NOT_CHANGE and any(key == each or key.startswith(f"{each}.") for each in MAY_CHANGE)


def _at(values: Any, key: str) -> Any:
    """The value at a dotted key; all values at an empty one."""
    for part in key.split(".") if key else ():
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _show(value: Any) -> str:
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)


# ── is it this model? ─────────────────────────────────────────────────────────────────────────────


def about_model(spec: Spec, spec_dir: Path) -> dict[str, Any]:
    """What a manifest says of the model, for `check_fits` and for people."""
    lora = spec.actor.lora
    return {
        "engine": spec.actor.engine.kind,
        "lora": None if lora is None else lora.model_dump(mode="json"),
        "model_config": _read_config(spec, spec_dir),
    }


def check_fits(manifest: Mapping[str, Any], spec: Spec, spec_dir: Path) -> None:
    """Raises CheckpointError naming every way in which a checkpoint is not of the spec's actor."""
    now = about_model(spec, spec_dir)
    step = manifest.get("step")
    kinds = manifest.get("engine"), now["engine"]
    if kinds[0] != kinds[1] and not SHARED_FORMAT.issuperset(kinds):
        raise CheckpointError(
            f"the checkpoint of step {step} was written by the train engine {kinds[0]}: {kinds[1]} cannot read it",
            hint=f'set actor.engine.kind = "{kinds[0]}", or start a new run with --run-dir',
        )
    found = []
    for what, table in (("lora", "actor.lora"), ("model_config", "config.json")):
        before, after = manifest.get(what), now[what]
        if what in manifest and (what == "lora" or (before and after)):
            for key in differing_keys(before, after):
                name = f"{table}.{key}" if key else table
                found.append(f"{name}: {_show(_at(before, key))} → {_show(_at(after, key))}")
    if found:
        raise CheckpointError(
            f"the checkpoint of step {step} is of another model:\n" + "\n".join(f"  - {line}" for line in found),
            hint=f"put the model at {spec.model.path} back as it was, or start a new run with --run-dir",
        )


def _read_config(spec: Spec, spec_dir: Path) -> dict[str, Any] | None:
    """The actor's `config.json`, less what does not matter; None where it is not on this host yet."""
    where = resolve_model(spec.model_path("actor"), spec_dir)
    folder = where if isinstance(where, Path) else hub_snapshot(where)
    if folder is None:
        return None
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return {key: value for key, value in content.items() if key not in _NOT_THE_MODEL}

"""Decide what may differ between the attempts of one run, and whether a checkpoint is of this run's model.

Both are decided from the spec, the manifest and `config.json`, before any process is started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import PydanticCustomError

from rlctl.models.hub import hub_snapshot
from rlctl.models.paths import resolve_model
from specs.errors import CheckpointError
from specs.json_file import read_or_empty
from specs.load.dotted_keys import differing_keys, value_at
from specs.schema.engines.engine_registry import readers_of, table_of
from specs.schema.engines.engine_table import TrainTable
from specs.schema.role_section import RoleSection
from specs.schema.roles import ACTOR, REWARD_MODEL, ROLES
from specs.schema.spec import Spec
from specs.schema.table import Table

# How a run is watched, where it runs and how its models are held: not what it computes, to rounding.
_MAY_CHANGE = (
    *("run.steps", "run.dir", "run.start_timeout_s", "run.verb_timeout_s", "run.heartbeat_timeout_s"),
    *("run.stall_timeout_s", "run.colocate"),
    "run.max_memory_growth_GiB",  # of earlier versions
    *("checkpoint", "cluster", "eval", "tracking", "sync", "model.attn_implementation"),
    *("reward.workers", "reward.timeout_s", "rollout.max_probe_gap"),
    *("rollout.warn_logprob_gap", "rollout.max_logprob_gap", "rollout.max_staleness", "rollout.max_restarts"),
    *("actor.min_nodes", "rollout.min_processes", "rollout.first_node", "reward.max_restarts", "reward.min_processes"),
)
# The same of every role: where it runs, and how its model is held.
_OF_A_ROLE = (
    *RoleSection.model_fields,
    *("engine", "micro_batch_tokens", "sequence_parallel", "attn_implementation"),
    *("gradient_checkpointing", "activation_offload"),
)

_SHAPES = ("engine", "processes", "nodes", "sequence_parallel")
# What only an engine may change of itself whose table says so (`resumes_reshaped`).
_SHAPE = tuple(f"{role}.{key}" for role in (ACTOR, REWARD_MODEL) for key in _SHAPES)
# Keys of a config.json that say nothing about what the model computes.
_NOT_THE_MODEL = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], engine: TrainTable | None = None
) -> tuple[list[str], list[str]]:
    """List differences between two resolved specs as lines `key: old → new`: those that a resume refuses, and the
    others.

    `engine`: that of the actor now. Where its table does not say that a resume may change its shape, it may not."""
    refused: list[str] = []
    allowed: list[str] = []
    if (was := held_out(before)) != (now := held_out(after)):
        refused.append(f"rows of data.train held out for evaluation: {was} → {now}")
    for key in differing_keys(before, after):
        if _is_of_another_kind(key, before, after):
            continue
        if _is_frozen(key) and (value_at(before, f"{key}.model") or "") != (value_at(after, f"{key}.model") or ""):
            key = f"{key}.model"  # the section came or went: what counts is the model that it names
        line = f"{key}: {_show(value_at(before, key))} → {_show(value_at(after, key))}"
        if key == "run.steps":
            schedules = {value_at(section, "optimizer.schedule") for section in after.values()} - {None, "constant"}
            if schedules:
                line += f", where the {' and '.join(sorted(schedules))} schedule of the learning rate now ends"
        if may_change(key) and engine is not None and not engine.resumes_reshaped and _is_of(key, _SHAPE):
            refused.append(f"{line} (not known whether the engine {engine.kind} can resume so)")
        else:
            (allowed if may_change(key) else refused).append(line)
    return refused, allowed


def with_new_keys(before: Any, after: Any, now: Any) -> Any:
    """Return what an older rlctl resolved with the keys that came since, where these have their defaults `now`: in the
    spec that was resolved `after` it."""
    if isinstance(now, tuple) and isinstance(before, list) and len(now) == len(before):
        return [with_new_keys(*each) for each in zip(before, after, now, strict=True)]
    if not isinstance(now, Table) or not isinstance(before, dict) or before.get("kind") != after.get("kind"):
        return before
    found = {**before}
    for name, field in type(now).model_fields.items():
        key, value = field.alias or name, getattr(now, name)
        if key in before:
            found[key] = with_new_keys(before[key], after[key], value)
        elif not field.is_required() and value == field.get_default(call_default_factory=True):
            found[key] = after[key]
    return found


def held_out(resolved: Mapping[str, Any]) -> int:
    """Return how many rows of `data.train` a spec evaluates on, and so does not train on."""
    section = value_at(resolved, "eval") or {}
    sets = value_at(section, "sets") or [section]
    counts = [[value_at(table, key) for table in (one, section) for key in ("prompts", "rows")] for one in sets]
    rows = [next(filter(None, found), 0) for one, found in zip(sets, counts, strict=True) if not value_at(one, "data")]
    return max((count for count in rows if isinstance(count, int)), default=0)


def _is_of_another_kind(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Tell whether a key came or went with the kind of an engine, whose own line says it all."""
    section, engine, own = key.partition(".engine.")
    kinds = [value_at(values, f"{section}.engine.kind") for values in (before, after)]
    went = None in (value_at(before, key), value_at(after, key))
    return bool(engine) and own != "kind" and went and None not in kinds and kinds[0] != kinds[1]


def may_change(key: str) -> bool:
    """Tell whether a resume takes another value of a dotted key. docs/checkpoints.md has a table of these."""
    role, _, own_key = key.partition(".")
    if _is_frozen(role):
        return own_key not in ("model", "dtype")
    return _is_of(key, _MAY_CHANGE) or (role in ROLES and _is_of(own_key, _OF_A_ROLE))


def _is_frozen(role: str) -> bool:
    """Tell whether a role's model is the same throughout a run, so that all else of its section may change."""
    return role in ROLES and ROLES[role].holds == "frozen"


def _is_of(key: str, tables: Sequence[str]) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in tables)


def _show(value: Any) -> str:
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)


# ── is it this model? ─────────────────────────────────────────────────────────────────────────────


def about_model(spec: Spec, spec_dir: Path) -> dict[str, Any]:
    """Describe the model in a manifest, for `check_fits` and for people."""
    lora, engine = spec.lead_section.lora, spec.lead_engine
    return {
        "engine": engine.kind,
        "resumes_as": readers_of(engine),
        "lora": None if lora is None else lora.model_dump(mode="json"),
        "model_config": _read_config(spec, spec_dir),
    }


def check_fits(manifest: Mapping[str, Any], spec: Spec, spec_dir: Path) -> None:
    """Raises CheckpointError naming every way in which a checkpoint is not of the spec's actor."""
    now = about_model(spec, spec_dir)
    step = manifest.get("step")
    kinds = manifest.get("engine"), now["engine"]
    if kinds[0] != kinds[1] and not _same_format(kinds[0], spec.lead_engine):
        raise CheckpointError(
            f"the checkpoint of step {step} was written by the train engine {kinds[0]}: {kinds[1]} cannot read it",
            hint=f'set {spec.lead}.engine.kind = "{kinds[0]}", or start a new run with --run-dir',
        )
    found = []
    for what, table in (("lora", f"{spec.lead}.lora"), ("model_config", "config.json")):
        before, after = manifest.get(what), now[what]
        if what in manifest and (what == "lora" or (before and after)):
            for key in differing_keys(before, after):
                name = f"{table}.{key}" if key else table
                found.append(f"{name}: {_show(value_at(before, key))} → {_show(value_at(after, key))}")
    if found:
        raise CheckpointError(
            "\n  - ".join([f"the checkpoint of step {step} belongs to another model:", *found]),
            hint="put back what differs; a new run takes these weights, adapters merged, as model.path = RUN_DIR",
        )


def _same_format(written_by: object, reader: TrainTable) -> bool:
    """Tell whether an engine reads another's checkpoints: both say what format theirs have, and it is the same."""
    if not isinstance(written_by, str) or reader.checkpoint_format is None:
        return False
    try:
        table = table_of("train", written_by)
    except PydanticCustomError:  # its package is broken
        return False
    return table is not None and getattr(table, "checkpoint_format", None) == reader.checkpoint_format


def _read_config(spec: Spec, spec_dir: Path) -> dict[str, Any] | None:
    """Return the actor's `config.json`, less what does not matter; None where it is not on this host yet."""
    where = resolve_model(spec.model_path(spec.lead), spec_dir)
    folder = where if isinstance(where, Path) else hub_snapshot(where)
    if folder is None:
        return None
    content = read_or_empty(folder / "config.json")
    return {key: value for key, value in content.items() if key not in _NOT_THE_MODEL} or None

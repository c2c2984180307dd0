"""No dead keys: every key of the schema, of every engine and every reward term, changes what the run does.

Each key is changed alone, in a spec where it has a meaning (`CONTEXT`), and then something must differ: the plan with
its commands and environments, the request that a role is built with, the driver's requests, or what the spec derives
for the driver (`observed`). Keys that act only while a run goes on are listed (`AT_RUN_TIME`).
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from corpus import base, edited
from pydantic.fields import FieldInfo

from rlctl.loop.logprob_gap import gap_limits
from rlctl.loop.sync import probe_tolerance
from rlctl.loop.weight_transport import plan_transport
from rlctl.processes.placement import make_plan
from rlctl.processes.role_configs import build_bodies
from specs.errors import SpecError
from specs.load.keys import kind_of, tables_of, walk
from specs.load.load import spec_from
from specs.rules.transport_rules import choose_transport
from specs.schema.algorithms.algorithm import Algorithm
from specs.schema.rank_groups import shard_groups
from specs.schema.recipes import RlSpec
from specs.schema.table import Table, meaning_of

DERIVED = ("roles", "evaluations", "samples_per_step", "max_sequence_tokens")

# Keys that act only while a run goes on. Each has its test where it acts.
AT_RUN_TIME = {
    *(f"run.{key}_timeout_s" for key in ("start", "verb", "stall", "heartbeat")),
    *("reward.max_restarts", "reward.min_processes", "rollout.top_p", "rollout.top_k"),
    *("rollout.repeatable", "rollout.in_flight", "eval.every", "checkpoint.every", "checkpoint.keep"),
    *("sync.bucket_MiB", "cluster.kind", "cluster.address", "actor.min_nodes"),
    *(f"algorithm.correction.{key}" for key in ("level", "mode", "low", "high")),
    *(f"algorithm.kl_{key}" for key in ("target", "horizon")),
    *(f"algorithm.{key}" for key in ("dynamic_sampling", "max_refills", "mask_truncated")),
    *("algorithm.advantage_function", "algorithm.loss_function"),
    *(f"tracking.N.{key}" for key in ("kind", "project", "entity", "space_id", "samples_every")),
    *("tracking.N.experiment", "tracking.N.tracking_uri"),
}

# Keys that only ever take one value, repeat what others say, or permit what they ask for: any other is refused.
ONE_VALUE = {"schema", "run.recipe"}
ONE_VALUE |= {"rollout.engine.tensor_parallel", "rollout.allow_pickle_between_nodes"}
ONE_VALUE |= {"environment.name"}  # of one environment, as here; of several no two may have the same

# Values where the next one of the type would not do.
OTHER: dict[str, Any] = {
    "run.name": "other",
    "run.dir": "elsewhere",
    "model.path": "builtin:tiny-bytes",
    "data.train": "rows.jsonl",
    "data.template": "{prompt}!",
    "reward.terms": [{"kind": "exact_match", "weight": 2.0}],
    "reward.terms.N.path": "other.py:score",
    "reward.terms.N.base_url": "https://other/v1",
    "reward.terms.N.prompt": "Rate: {completion}",
    "reward.terms.N.score_pattern": "(.*)",
    "reward.terms.N.body": {"top_p": 0.5},
    "reward.terms.N.key_env": "OTHER_KEY",
    "algorithm.mini_batches_per_step": 2,
    "actor.optimizer.betas": [0.8, 0.9],
    "algorithm.dual_clip": 3.0,
    "algorithm.anchor": "sampler",
    "algorithm.kl_estimator": "k2",
    **dict.fromkeys(("model.attn_implementation", "actor.attn_implementation"), "eager"),
    **dict.fromkeys(("actor.dtype", "rollout.dtype"), "bf16"),
    "actor.lora.targets": ["q_proj"],
    "actor.env": {"A": "b"},
    "actor.engine.megatron": {"batch_p2p_sync": False},
    "actor.devices": [1],
    "actor.threads": 3,  # a test has one core
    "actor.engine.stage": 2,
    "actor.engine.deepspeed": {"steps_per_print": 7},
    "rollout.stop": ["1"],
    **dict.fromkeys(("eval.data", "eval.sets.N.data"), "held.jsonl"),
    **dict.fromkeys(("eval.sets.N.prompts", "eval.sets.N.samples_per_prompt"), 7),
    **dict.fromkeys(("eval.pass_term", "eval.sets.N.pass_term"), 0),
    **dict.fromkeys(("eval.sets.N.temperature", "eval.sets.N.top_p"), 0.5),
    **dict.fromkeys(("eval.pass_score", "eval.sets.N.pass_score"), 0.5),
    "environment.tools": ["other.py:add"],
    "environment.path": "other.py:own",
    "environment.agent.command": ["other"],
    "environment.agent.env": {"A": "b"},
    "environment.agent.reward": "other.py:own",
}

JUDGE = {"base_url": "https://host/v1", "model": "m", "prompt": "{completion}", "min_score": 1, "max_score": 10}
NODES = {"actor": {"nodes": 2, "processes": 2, "launcher": "torchrun"}, "cluster": {"kind": "ray"}}
# Longest matching prefix → what the spec needs so that the key means something.
SCORES = {"reward_model": {"model": "scores", "max_sequence_tokens": 64}, "reward.terms": [{"kind": "model"}]}
CONTEXT: dict[str, dict[str, Any]] = {
    **{
        f"actor.engine.{axis}_parallel": {"actor.processes": 2, "actor.launcher": "torchrun"}
        for axis in ("tensor", "pipeline", "context", "expert")
    },
    **{
        f"actor.engine.{key}": {"actor.processes": 2, "actor.launcher": "torchrun", f"actor.engine.{axis}": 2}
        for key, axis in (("tensor_sequence_parallel", "tensor_parallel"), ("virtual_pipeline", "pipeline_parallel"))
    },
    "reward_model": SCORES,
    "ref": {"algorithm.kl_coef": 0.1, "ref": {}},
    "critic": {"algorithm.kind": "ppo", "critic": {}},
    "actor.sequence_parallel": {"actor.processes": 2, "actor.launcher": "torchrun"},
    "rollout.in_flight": {"rollout.max_staleness": 1},
    "rollout.engine.keep_cache": {"rollout.max_staleness": 1, "rollout.in_flight": True},
    "rollout.first_node": {"rollout.processes": 2, **NODES},
    "actor.nodes": {"actor": {"processes": 2, "launcher": "srun"}},
    "actor.launcher": {"actor.processes": 2},
    "actor.lora": {"actor.lora": {}, "model.from_scratch": False},
    "actor.optimizer.min_lr_ratio": {"actor.optimizer.schedule": "linear"},
    "actor.optimizer.warmup_steps": {"actor.optimizer.schedule": "linear"},
    "actor.activation_offload": {"actor.devices": [0]},
    "actor.engine.offload": {"actor.devices": [0]},
    "actor.engine.offload_optimizer": {"actor.devices": [0]},
    "actor.engine.offload_parameters": {"actor.devices": [0]},
    "actor.engine.shard": {"actor.processes": 4, "actor.launcher": "torchrun"},
    "actor.engine.replicate": {"actor.processes": 2, "actor.launcher": "torchrun"},
    "algorithm.anchor": {"algorithm.mini_batches_per_step": 2},
    "algorithm.kl_target": {"algorithm.kl_coef": 0.1},
    "algorithm.kl_horizon": {"algorithm.kl_coef": 0.1, "algorithm.kl_target": 0.01},
    "algorithm.kl_in": {"algorithm.kl_coef": 0.1, "algorithm.kl_estimator": "k3"},
    "algorithm.kl_estimator": {"algorithm.kl_coef": 0.1, "algorithm.kl_in": "loss", "algorithm.kl_estimator": "k3"},
    "data.split": {"data.train": "some/rows"},
    "data.system": {"data.chat": "always"},
    "eval": {"eval": {"every": 2}},
    "eval.samples_per_prompt": {"eval.temperature": 0.6},
    "eval.sets": {"eval": {"every": 2, "temperature": 0.6, "sets": [{"name": n, "data": "some/rows"} for n in "ab"]}},
    "cluster": NODES,
    "sync.folder": {"sync": {"transport": "folder"}},
    "sync.delta": {"sync": {"transport": "folder"}},
    "model.attn_implementation": {"rollout.attn_implementation": "sdpa"},
    "rollout.warn_logprob_gap": {"rollout.max_logprob_gap": 1.0},
    "rollout.engine.lora": {"actor.lora": {}, "model.from_scratch": False},
    "rollout.engine.gpu_memory_utilization": {"rollout.devices": [0]},
    "environment": {"environment": {"tools": ["tools.py:add"], "max_episode_tokens": 64}},
    "environment.path": {"environment": {"path": "own.py:Own"}},
    "environment.agent": {"environment": {"agent": {"command": ["own"], "cwd": "fresh"}}},
    "environment.learn_from": {"environment": {"agent": "own.py:run"}},
    "environment.credit": {"algorithm.kind": "reinforce++", "reward.terms": [{"kind": "environment"}]},
    "data.environment_column": {
        "environment": [{"name": name, "tools": ["tools.py:add"]} for name in ("one", "other")],
        "data.environment_column": "kind",
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return where relative paths of a spec begin."""
    return tmp_path


def changed(key: str, table: type[Table], before: Any) -> Any:
    """Another value for the key than `before`: from OTHER, else the next one of its type."""
    if key in OTHER:
        return OTHER[key]
    types = _types(_field(key, table).annotation)
    choices = [value for one in types if get_origin(one) is Literal for value in get_args(one)]
    if choices and before in (*choices, None):
        return next((value for value in choices if value != before), f"not {before}")
    if bool in types:
        return not before
    if int in types:
        return before * 2 if before else 1
    if float in types:
        return before / 2 if before else 0.25
    assert str in types, f"say in OTHER what {key} may be instead of {before!r}"
    return f"{before or 'other'}x"


def _field(key: str, table: type[Table]) -> FieldInfo:
    name = key.rpartition(".")[2]
    return next(field for own, field in table.model_fields.items() if name in (own, field.alias))


def _types(annotation: Any) -> tuple[Any, ...]:
    """The types that an annotation joins, e.g. of `int | None` or `Annotated[str, ...]`."""
    if not get_args(annotation) or get_origin(annotation) is Literal:
        return (annotation,)
    return tuple(part for one in get_args(annotation) for part in _types(one))


def specs_that_differ(key: str, table: type[Table]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Raw specs that differ in `key` alone."""
    place = key.replace(".N.", ".0.")
    context = {**of_kind(place, table), **context_of(key)}
    whole = {name: value for name, value in context.items() if "." not in name}
    before = edited(edited(base(), whole), {name: value for name, value in context.items() if "." in name})
    if key.endswith("engine.kind"):
        other = "torch" if key.startswith("rollout.") else "ddp"
        other = other if kind_of(table) != other else {"ddp": "fsdp2", "torch": "vllm"}[other]
        return before, edited(before, {place: other})
    if key == "algorithm.kind":
        return before, edited(before, {place: "rloo" if kind_of(table) != "rloo" else "gspo"})
    if key == "reward.terms.N.kind":
        other = "math_verify" if kind_of(table) == "exact_match" else "exact_match"
        return before, edited(before, {"reward.terms": [{"kind": other}]})
    return before, edited(before, {place: changed(key, table, in_effect(before, place, table))})


def context_of(key: str) -> dict[str, Any]:
    fitting = [prefix for prefix in CONTEXT if key == prefix or key.startswith(f"{prefix}.")]
    return {name: value for prefix in sorted(fitting, key=len) for name, value in CONTEXT[prefix].items()}


def of_kind(place: str, table: type[Table]) -> dict[str, Any]:
    """What makes the table at `place` the one of its kind."""
    kind, family = kind_of(table), place.rpartition(".")[0]
    if family.startswith("reward.terms"):
        required = {"pattern": "a", "buffer_tokens": 4, "path": "rewards.py:score", **JUDGE}
        own = {family: {"kind": kind, **{name: required[name] for name in required if name in table.model_fields}}}
        needs = {
            "model": {"reward_model": SCORES["reward_model"]},
            "environment": CONTEXT["environment"],
            "reasoning_gym": {"data.train": "reasoning-gym:chain_sum"},
        }
        return {**own, **needs.get(kind, {})}
    if family == "algorithm":
        teacher = issubclass(table, Algorithm) and table.advantage_table.needs_teacher
        return {"algorithm.kind": kind, **({"ref.model": "teacher"} if teacher else {})}
    if not family.endswith(".engine"):
        return {}
    if kind == "fake":
        here = place.partition(".")[0]
        roles = ("actor", "rollout", here) if here in ("ref", "critic", "reward_model") else ("actor", "rollout")
        return {f"{role}.engine.kind": "fake" for role in roles}
    return {f"{family}.kind": kind, **({"rollout.devices": [0]} if kind == "sglang" else {})}


def in_effect(raw: dict[str, Any], place: str, table: type[Table]) -> Any:
    """The key's value in effect: as written, else its default."""
    node: Any = raw
    for part in place.split("."):
        node = (node[int(part)] if isinstance(node, list) else node.get(part)) if node is not None else None
    if node is not None:
        return node
    return _field(place, table).get_default()


def observed(spec: RlSpec, folder: Path) -> dict[str, Any]:
    """Everything that a spec decides before a run starts, and what the driver derives from it."""
    run_dir = folder / spec.run.dir / spec.run.name
    plan = make_plan(spec, folder)
    return {
        "plan": asdict(plan),
        "build": dict(build_bodies(spec, folder, run_dir)),
        "transport": (choose_transport(spec), plan_transport(spec, folder, run_dir, plan)),
        "placement": [shard_groups(spec.role(role)) for role in spec.roles],
        "update": {role: loss.model_dump() for role, loss in spec.losses.items()},
        "advantage": spec.algorithm.advantage.model_dump(),
        "columns": spec.columns_read,
        "gaps": (gap_limits(spec), probe_tolerance(spec)),
        "derived": [getattr(spec, name, None) for name in DERIVED],
    }


def is_section(key: str, table: type[Table]) -> bool:
    """Whether the key holds a table: its own keys are its proof."""
    return bool(tables_of(_field(key, table).annotation))


def described_once() -> dict[tuple[str, str], type[Table]]:
    """Return the keys that hold a value, by name and owner: of one that several sections share, the actor's."""
    found: dict[Any, tuple[str, type[Table]]] = {}
    for key, table in sorted(walk(RlSpec), key=lambda found: not found[0].startswith("actor.")):
        if key == "reward.terms" or not is_section(key, table):
            name = key.rpartition(".")[2]
            means = meaning_of(table, name) if name in table.model_fields else ""
            found.setdefault((name, means or table), (key, table))
    return {(key, table.__name__): table for key, table in found.values()}


KEYS = described_once()


BEFORE_A_RUN = [(key, owner) for key, owner in KEYS if key not in AT_RUN_TIME]


@pytest.mark.parametrize(("key", "owner"), BEFORE_A_RUN, ids=[f"{key}-{owner}" for key, owner in BEFORE_A_RUN])
def test_every_key_changes_something(key: str, owner: str, folder: Path) -> None:
    before, after = specs_that_differ(key, KEYS[key, owner])
    was = observed(spec_from(before), folder)
    now = observed_or_refused(after, folder)
    if isinstance(now, str):
        assert key in ONE_VALUE or key.endswith(".kind"), f"say in CONTEXT what {key} needs: {now}"
        return
    assert was != now, (
        f"nothing changes with {key}. If it acts only while a run goes on, name in AT_RUN_TIME the test that fails "
        f"without it; if it needs something else in the spec, say so in CONTEXT; else it is dead: remove it"
    )


def observed_or_refused(raw: dict[str, Any], folder: Path) -> dict[str, Any] | str:
    try:
        return observed(spec_from(raw), folder)
    except SpecError as error:
        return str(error)

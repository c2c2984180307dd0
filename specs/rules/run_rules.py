"""Rules of a run as a whole: its deadlines, its trackers, and sampling ahead of learning."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.recipes import RlSpec, sampling_of
from specs.schema.roles import ROLES, ROLLOUT
from specs.schema.spec import Spec
from specs.schema.table import no_effect


def run_problems(spec: Spec) -> Iterator[Problem]:
    yield from _deadlines(spec)
    if "colocate" in spec.run.model_fields_set and not spec.generates:
        yield no_effect("run.colocate", "nothing is sampled, so trainers have none to take turns with")
    if isinstance(spec, RlSpec):
        yield from _run_ahead(spec)
        yield from _in_flight(spec)
    kinds = [tracker.kind for tracker in spec.tracking]
    for number, kind in enumerate(kinds):
        if kind in kinds[:number]:
            message = f"tracking.{kinds.index(kind)} is of this kind already"
            yield Problem(f"tracking.{number}.kind", message, "remove one of the two")


def _deadlines(spec: Spec) -> Iterator[Problem]:
    """`run.stall_timeout_s` comes after the silence of a rank and the time of one grade or call, and before a verb's
    deadline. A default that is out of that order does no harm."""
    run, key, sampling = spec.run, "run.stall_timeout_s", sampling_of(spec)
    environments = sampling.environments_by_key if sampling is not None else {}
    calls = [(f"{name}.call_timeout_s", section.call_timeout_s) for name, section in environments.items()]
    if sampling is not None and any(term.graded_by == "processes" for term in sampling.reward_terms):
        calls.append(("reward.timeout_s", sampling.grading.timeout_s))
    slowest, seconds = max(calls, key=lambda call: call[1], default=("", 0.0))
    if "stall_timeout_s" in run.model_fields_set and run.stall_timeout_s >= run.verb_timeout_s:
        yield no_effect(key, f"run.verb_timeout_s = {run.verb_timeout_s:g} comes first")
    elif run.stall_timeout_s < run.heartbeat_timeout_s:
        message = f"less than run.heartbeat_timeout_s = {run.heartbeat_timeout_s:g}, after which a rank counts as gone"
        yield Problem(key, message, f"use more than {run.heartbeat_timeout_s:g}")
    elif run.stall_timeout_s <= seconds:
        message = f"one completion may take {slowest} = {seconds:g} s, and nothing moves"
        yield Problem(key, message, f"use more than {seconds:g}")


def _run_ahead(spec: RlSpec) -> Iterator[Problem]:
    """Roles that take turns, or share a GPU, cannot work at the same time."""
    key = "rollout.max_staleness"
    if spec.rollout.max_staleness and spec.run.colocate == "always":
        message = 'samples while the actor learns, and with run.colocate = "always" the two take turns'
        yield Problem(key, message, f"set {key} = 0, or leave run.colocate out")
    elif spec.rollout.max_staleness:
        for role in [role for role in ROLES if role in spec.roles and ROLES[role].is_trainer]:
            if shared := sorted({number for _, number in spec.gpus(role) & spec.gpus(ROLLOUT)}):
                gpus = ", ".join(map(str, shared))
                message = f"samples while the actor learns, and rollout shares GPU {gpus} with {role}"
                yield Problem(key, message, f"give rollout.devices GPUs of its own, or set {key} = 0")


def _in_flight(spec: RlSpec) -> Iterator[Problem]:
    """Weights that reach open completions need some that are open, and an engine that continues with them."""
    key, rollout = "rollout.in_flight", spec.rollout
    if not rollout.in_flight:
        if getattr(rollout.engine, "keep_cache", False):
            yield no_effect("rollout.engine.keep_cache", f"{key} = false: weights change when nothing is being drawn")
        return
    if not rollout.max_staleness:
        yield no_effect(key, "rollout.max_staleness = 0: nothing is sampled while weights change")
    elif not rollout.engine.suspends:
        message = f"the engine {rollout.engine.kind} does not continue with other weights"
        yield Problem(key, message, 'use rollout.engine.kind = "torch" or "vllm"', "true")
    if rollout.repeatable:
        message = "which weights draw which token follows from the clock"
        yield Problem("rollout.repeatable", message, f"leave it out, or set {key} = false", "true")

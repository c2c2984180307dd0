"""Rules of learning: how a step is split, the optimizer, adapters, activations, ranks that share samples."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.engines.engine_table import TrainTable, engine_of
from specs.schema.mesh import divisors
from specs.schema.rank_groups import sequence_parallel_of
from specs.schema.recipes import RlSpec, RowsSpec
from specs.schema.role_section import LearningRole, ModelRole, Optimizer, RoleSection
from specs.schema.roles import REWARD_MODEL, RoleName
from specs.schema.spec import RewardModelSection, Spec
from specs.schema.table import no_effect
from specs.text import listed

_OTHERWISE = "context_parallel"  # the key of an engine that shards rows itself


def learning_problems(spec: Spec) -> Iterator[Problem]:
    """Yield what cannot be split, and keys of learning that are wrong or do nothing."""
    if isinstance(spec, RlSpec):
        yield from _batch(spec)
    elif isinstance(spec, RowsSpec):
        rows = spec.data.rows_per_step
        yield from _idle(spec.lead, spec.lead_section, rows, f"data.rows_per_step = {rows} leaves")
    yield from _lora(spec)
    for role, section in spec.sections():
        engine = engine_of(section)
        if isinstance(optimizer := getattr(section, "optimizer", None), Optimizer):
            if optimizer.schedule == "constant" and "min_lr_ratio" in optimizer.model_fields_set:
                yield no_effect(f"{role}.optimizer.min_lr_ratio", 'schedule is "constant"')
            if not all(0 <= beta < 1 for beta in optimizer.betas):
                hint = "leave it out for the default, [0.9, 0.999]"
                yield Problem(f"{role}.optimizer.betas", "each must be at least 0 and below 1", hint)
        offloads = isinstance(section, LearningRole) and section.activation_offload and not section.devices
        if offloads and engine is not None and engine.model_of != "bigram":  # whose engine reports it
            yield no_effect(f"{role}.activation_offload", f"{role} runs on the CPU")
        if isinstance(section, ModelRole):
            yield from _degree(role, section)
            if role in spec.roles:
                yield from _longest(spec, role, section)


def learning_warnings(spec: Spec) -> Iterator[Problem]:
    """Yield the roles that never learn."""
    for role, section in spec.sections():
        optimizer = getattr(section, "optimizer", None)
        # One such step is a trial of everything else.
        if isinstance(optimizer, Optimizer) and optimizer.lr == 0 and spec.run.steps > 1:
            yield Problem(f"{role}.optimizer.lr", f"the {role} never learns", "set it above 0, such as 1e-6")
    if isinstance(spec, RlSpec) and spec.algorithm.actor_starts_after >= spec.run.steps:
        message = f"the actor never learns: the run has {spec.run.steps} steps"
        yield Problem("algorithm.critic_warmup_steps", message, f"use at most {spec.run.steps - 1}")


def _batch(spec: RlSpec) -> Iterator[Problem]:
    algorithm, data, advantage = spec.algorithm, spec.data, spec.algorithm.advantage
    if algorithm.group_size < advantage.min_group:
        yield Problem("algorithm.group_size", advantage.why_min_group, f"use {advantage.min_group} or more")
    total, parts = spec.samples_per_step, algorithm.mini_batches_per_step
    arithmetic = f"{data.prompts_per_step} prompts × {algorithm.group_size} completions = {total} samples"
    if total % parts:
        start = min(parts, total)
        near = next((n for far in range(min(start, 10_000)) for n in (start - far, start + far) if total % n == 0), 1)
        message = f"{arithmetic} cannot be split into {parts} equal mini-batches"
        yield Problem("algorithm.mini_batches_per_step", message, f"{near} would fit")
    else:
        for role, section in spec.sections():
            if spec.learns(role):
                yield from _idle(role, section, total // parts, f"{arithmetic} in {parts} mini-batches leave")
    if data.prompts_per_step < spec.rollout.processes:
        message = f"{data.prompts_per_step} prompts per step leave some replicas without work"
        yield Problem("rollout.processes", message, f"use at most {data.prompts_per_step}")


def _idle(role: RoleName, section: RoleSection, units: int, arithmetic: str) -> Iterator[Problem]:
    """Yield ranks that get nothing of an optimizer step."""
    degree = sequence_parallel_of(section)
    if units < section.processes // degree:
        ranks = f"{section.processes // degree} {'ranks' if degree == 1 else 'groups of ranks'}"
        hint = f"use at most {units * degree}"
        yield Problem(f"{role}.processes", f"{arithmetic} some of {ranks} without work", hint)


def _lora(spec: Spec) -> Iterator[Problem]:
    for role, lora in spec.adapters():
        key, engine = f"{role}.lora", getattr(spec.role(role), "engine", None)
        drawn = spec.model.from_scratch and spec.model_path(role) == spec.model.path
        if drawn and getattr(engine, "model_of", None) != "bigram":
            message = "adapters need a trained model below them, and checkpoints do not hold the random one"
            named = "name a model with weights in model.path and set model.from_scratch = false"
            yield Problem(key, message, f"{named}, or train the whole model")
        if len(lora.targets) > 1 and "all-linear" in lora.targets:
            yield Problem(f"{key}.targets", "all-linear already means every layer", "name it alone")
        elif len(set(lora.targets)) < len(lora.targets):
            yield Problem(f"{key}.targets", "layer listed twice", "name it once")


# ── ranks that share samples; what they need of the model is in `rlctl/models/shapes_fit.py` ───────────


def _degree(role: RoleName, section: ModelRole) -> Iterator[Problem]:
    degree, engine = section.sequence_parallel, engine_of(section)
    key = f"{role}.sequence_parallel"
    if degree == 1:
        return
    if isinstance(engine, TrainTable) and not engine.splits_sequences:
        hint = "remove the key: each rank has its own"
        if _OTHERWISE in type(engine).model_fields:
            hint = f"remove the key; {role}.engine.{_OTHERWISE} = {degree} shards every row across so many ranks"
        yield Problem(key, f"the ranks of the engine {engine.kind} cannot share samples", hint)
    elif section.processes % degree:
        message = f"{section.processes} processes of {role} cannot be shared out to groups of {degree}"
        fitting = f"{listed(divisors(section.processes))} would fit"
        more = -(-section.processes // degree) * degree
        yield Problem(key, message, f"{fitting}, or {role}.processes = {more}")


def _longest(spec: Spec, role: RoleName, section: ModelRole) -> Iterator[Problem]:
    """Yield a row, of all ranks that share it, without room for the longest sample: none is ever split."""
    longest = spec.longest_tokens(role)
    if section.row_tokens >= longest:
        return
    degree, scores = section.sequence_parallel, isinstance(section, RewardModelSection)
    keys = f"{REWARD_MODEL}.max_sequence_tokens" if scores else "data.max_tokens"
    if isinstance(spec, RlSpec) and not scores:
        single_turn = "data.max_prompt_tokens + data.max_response_tokens"
        keys = "environment.max_episode_tokens" if spec.environments else single_turn
    named = f"{keys} = {longest} tokens"
    times = f"times {role}.sequence_parallel = {degree} it is {section.row_tokens}, " if degree > 1 else ""
    hint = f"use at least {-(-longest // degree)}" + (", or lower max_sequence_tokens" if scores else "")
    yield Problem(f"{role}.micro_batch_tokens", f"{times}less than the longest sequence ({named})", hint)

"""Rules of learning: how a step is split, the optimizer, adapters, activations."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.engines.engine_table import engine_of
from specs.schema.rank_groups import sequence_parallel_of
from specs.schema.role_section import LearningRole, Optimizer
from specs.schema.roles import ROLES, RoleName
from specs.schema.spec import Spec
from specs.schema.table import no_effect
from specs.text import show


def learning_problems(spec: Spec) -> Iterator[Problem]:
    """Yield what cannot be split, and keys of learning that are wrong or do nothing."""
    yield from _batch(spec)
    yield from _lora(spec)
    yield from _optimizer(spec)
    yield from _activations(spec)


def learning_warnings(spec: Spec) -> Iterator[Problem]:
    """Yield the roles that never learn."""
    for role, optimizer in _optimizers(spec):
        if optimizer.lr == 0 and spec.run.steps > 1:  # one such step is a trial of everything else
            yield Problem(f"{role}.optimizer.lr", f"the {role} never learns", "set it above 0, such as 1e-6", "0.0")
    if (alone := spec.algorithm.actor_starts_after) >= spec.run.steps:
        message = f"the actor never learns: the run has {spec.run.steps} steps"
        yield Problem("algorithm.critic_warmup_steps", message, f"use at most {spec.run.steps - 1}", show(alone))


def _batch(spec: Spec) -> Iterator[Problem]:
    algorithm, data = spec.algorithm, spec.data
    advantage = algorithm.advantage
    if algorithm.group_size < advantage.min_group:
        hint, size = f"use {advantage.min_group} or more", str(algorithm.group_size)
        yield Problem("algorithm.group_size", advantage.why_min_group, hint, size)
    total, parts = spec.samples_per_step, algorithm.mini_batches_per_step
    arithmetic = f"{data.prompts_per_step} prompts × {algorithm.group_size} completions = {total} samples"
    if total % parts:
        start = min(parts, total)
        near = next((n for far in range(min(start, 10_000)) for n in (start - far, start + far) if total % n == 0), 1)
        message = f"{arithmetic} cannot be split into {parts} equal mini-batches"
        yield Problem("algorithm.mini_batches_per_step", message, f"{near} would fit", str(parts))
    else:
        for role, section in spec.sections():
            degree = sequence_parallel_of(section)
            if ROLES[role].learns and total // parts < section.processes // degree:
                ranks = f"{section.processes // degree} {'ranks' if degree == 1 else 'groups of ranks'}"
                message = f"{arithmetic} in {parts} mini-batches leave some of {ranks} without work"
                hint = f"use at most {total // parts * degree} processes"
                yield Problem(f"{role}.processes", message, hint, str(section.processes))
    if data.prompts_per_step < spec.rollout.processes:
        message = f"{data.prompts_per_step} prompts per step leave some replicas without work"
        yield Problem(
            "rollout.processes", message, f"use at most {data.prompts_per_step} processes", str(spec.rollout.processes)
        )


def _lora(spec: Spec) -> Iterator[Problem]:
    for role, lora in spec.adapters():
        key, engine = f"{role}.lora", getattr(spec.role(role), "engine", None)
        drawn = spec.model.from_scratch and spec.model_path(role) == spec.model.path
        if drawn and getattr(engine, "model_of", None) != "bigram":
            message = "adapters need a trained model below them, and checkpoints do not hold the random one"
            hint = (
                "name a model with weights in model.path and set model.from_scratch = false, or train the whole model"
            )
            yield Problem(key, message, hint)
        if len(lora.targets) > 1 and "all-linear" in lora.targets:
            message = "all-linear already means every layer"
            yield Problem(f"{key}.targets", message, "name it alone", show(lora.targets))
        elif len(set(lora.targets)) < len(lora.targets):
            yield Problem(f"{key}.targets", "layer listed twice", "name it once", show(lora.targets))


def _optimizer(spec: Spec) -> Iterator[Problem]:
    for role, optimizer in _optimizers(spec):
        if optimizer.schedule == "constant" and "min_lr_ratio" in optimizer.model_fields_set:
            yield no_effect(f"{role}.optimizer.min_lr_ratio", optimizer, 'schedule is "constant"')
        if not all(0 <= beta < 1 for beta in optimizer.betas):
            hint = "leave it out for the default, [0.9, 0.999]"
            yield Problem(f"{role}.optimizer.betas", "each must be at least 0 and below 1", hint, show(optimizer.betas))


def _optimizers(spec: Spec) -> Iterator[tuple[RoleName, Optimizer]]:
    """Yield the optimizers of the roles that have a section."""
    for role, section in spec.sections():
        optimizer = getattr(section, "optimizer", None)
        if isinstance(optimizer, Optimizer):
            yield role, optimizer


def _activations(spec: Spec) -> Iterator[Problem]:
    for role, section in spec.sections():
        engine = engine_of(section)
        if not isinstance(section, LearningRole) or engine is None or engine.model_of == "bigram":
            continue  # said by the engine
        if section.activation_offload and not section.devices:
            yield no_effect(f"{role}.activation_offload", section, f"{role} runs on the CPU")

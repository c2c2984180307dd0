"""Rules that span several keys: batch arithmetic, and keys that have no effect under what was chosen.

A key counts as *set* when the spec writes it, whatever the value. Rules about files are in
`rlctl/preflight/file_problems.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from specs.errors import Problem
from specs.rules.algorithm_rules import algorithm_problems, algorithm_warnings
from specs.rules.attention_rules import attention_problems, shadowed_attention
from specs.rules.data_rules import data_problems, reward_section_problems
from specs.rules.deadline_rules import deadline_problems
from specs.rules.engine_rules import crosses_hosts, engine_problems
from specs.rules.evaluation_rules import eval_problems, eval_warnings
from specs.rules.judge_rules import judge_problems, judge_warnings
from specs.rules.kernel_rules import kernel_problems
from specs.rules.learning_rules import learning_warnings, optimizers
from specs.rules.mesh_rules import straddling_warnings
from specs.rules.node_rules import node_problems, node_warnings
from specs.rules.reward_model_rules import reward_model_problems, reward_model_warnings
from specs.rules.sequence_rules import sharing_problems
from specs.rules.staleness_rules import run_ahead_problems, run_ahead_warnings
from specs.rules.transport_rules import transport_problems
from specs.schema.algorithms.algorithm_tables import ActorCritic
from specs.schema.engines.engine_table import engine_of
from specs.schema.rank_groups import devices_of_a_process, sequence_parallel_of
from specs.schema.rewards import Overlong
from specs.schema.role_section import Learner, RoleSection
from specs.schema.roles import ROLES, RoleName
from specs.schema.spec import Spec
from specs.schema.table import no_effect
from specs.text import show

RESERVED_ENV = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def cross_field_problems(spec: Spec) -> list[Problem]:
    """Everything that is wrong although each key alone is fine."""
    return [problem for rule in RULES for problem in rule(spec)]


def cross_field_warnings(spec: Spec) -> list[Problem]:
    """What works but is seldom meant."""
    return [
        *_ratio_bounds(spec),
        *learning_warnings(spec),
        *_critic_bounds(spec),
        *_never_warm(spec),
        *algorithm_warnings(spec),
        *run_ahead_warnings(spec),
        *_never_due(spec),
        *straddling_warnings(spec),
        *node_warnings(spec),
        *judge_warnings(spec),
        *eval_warnings(spec),
        *reward_model_warnings(spec),
    ]


def _ratio_bounds(spec: Spec) -> Iterator[Problem]:
    """Keys of the loss that bound a ratio which is always 1."""
    algorithm = spec.algorithm
    if spec.ratio_against != "current":
        return
    always = "with one mini-batch and one epoch per step the ratio is always 1"
    more_updates = "raise algorithm.mini_batches_per_step or algorithm.epochs_per_step, or "
    if spec.loss.needs_ratio:
        message = f"{always}, and the loss is the plain policy gradient"
        yield Problem("algorithm.kind", message, f"{more_updates}choose grpo", show(algorithm.kind))
    for key in spec.loss.ratio_keys:
        if key in algorithm.model_fields_set:
            value = show(getattr(algorithm, key))
            yield Problem(f"algorithm.{key}", f"does nothing: {always}", f"{more_updates}leave it out", value)


def _critic_bounds(spec: Spec) -> Iterator[Problem]:
    """Keys of a critic that do nothing here."""
    algorithm = spec.algorithm
    if isinstance(algorithm, ActorCritic) and algorithm.value_clip is not None and algorithm.on_policy:
        message = "does nothing: with one mini-batch and one epoch per step no value has moved yet"
        hint = "raise algorithm.mini_batches_per_step or algorithm.epochs_per_step, or leave it out"
        yield Problem("algorithm.value_clip", message, hint, show(algorithm.value_clip))
    if (alone := algorithm.actor_starts_after) >= spec.run.steps:
        message = f"the actor never learns: the run has {spec.run.steps} steps"
        yield Problem("algorithm.critic_warmup_steps", message, f"use at most {spec.run.steps - 1}", show(alone))


def _never_warm(spec: Spec) -> Iterator[Problem]:
    """No error: a short trial of a long run is made by run.steps alone."""
    for role, optimizer in optimizers(spec):
        asked, steps = optimizer.warmup_steps, spec.optimizer_steps_of(role)
        if asked > steps > 0:
            message = f"the run ends in its warm-up, after {steps} optimizer steps, at {steps / asked:.0%} of lr"
            yield Problem(f"{role}.optimizer.warmup_steps", message, f"use at most {steps}", str(asked))


def _never_due(spec: Spec) -> Iterator[Problem]:
    steps = spec.run.steps
    for name, section in (("eval", spec.eval), ("checkpoint", spec.checkpoint)):
        if section is not None and "every" in section.model_fields_set and section.every > steps:
            ends = "before the first step and after the last" if name == "eval" else "after the last step"
            message = f"the run has {steps} steps, so it happens {ends} only"
            yield Problem(f"{name}.every", message, f"use at most {steps}", str(section.every))


# ── batch arithmetic ──────────────────────────────────────────────────────────────────────────────


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


def _overlong_buffer(spec: Spec) -> Iterator[Problem]:
    data = spec.data
    for index, term in enumerate(spec.reward.terms):
        if isinstance(term, Overlong) and term.buffer_tokens > data.max_response_tokens:
            message = f"longer than the longest completion (data.max_response_tokens = {data.max_response_tokens})"
            hint = f"use at most {data.max_response_tokens}"
            yield Problem(f"reward.terms.{index}.buffer_tokens", message, hint, str(term.buffer_tokens))


# ── algorithm and optimizer ───────────────────────────────────────────────────────────────────────


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
    for role, optimizer in optimizers(spec):
        if optimizer.schedule == "constant" and "min_lr_ratio" in optimizer.model_fields_set:
            yield no_effect(f"{role}.optimizer.min_lr_ratio", optimizer, 'schedule is "constant"')
        if not all(0 <= beta < 1 for beta in optimizer.betas):
            hint = "leave it out for the default, [0.9, 0.999]"
            yield Problem(f"{role}.optimizer.betas", "each must be at least 0 and below 1", hint, show(optimizer.betas))


def _activations(spec: Spec) -> Iterator[Problem]:
    for role, section in spec.sections():
        engine = engine_of(section)
        if not isinstance(section, Learner) or engine is None or engine.model_of == "bigram":
            continue  # said by the engine
        if section.activation_offload and not section.devices:
            yield no_effect(f"{role}.activation_offload", section, f"{role} runs on the CPU")


# ── data, reward and what surrounds them ──────────────────────────────────────────────────────────


def _logprob_gap(spec: Spec) -> Iterator[Problem]:
    warn_at, limit = spec.logprob_gaps
    if warn_at is not None and limit is not None and warn_at > limit:
        hint = f"use at most {limit:g}, or raise rollout.max_logprob_gap"
        message = f"the run would stop (rollout.max_logprob_gap = {limit:g}) before it warns"
        if spec.rollout.warn_logprob_gap is not None:
            yield Problem("rollout.warn_logprob_gap", message, hint, show(spec.rollout.warn_logprob_gap))


def _tracking(spec: Spec) -> Iterator[Problem]:
    kinds = [tracker.kind for tracker in spec.tracking]
    for number, kind in enumerate(kinds):
        if kind in kinds[:number]:
            message = f"tracking.{kinds.index(kind)} is of this kind already"
            yield Problem(f"tracking.{number}.kind", message, "remove one of the two", f'"{kind}"')


# ── roles ─────────────────────────────────────────────────────────────────────────────────────────


def _roles(spec: Spec) -> Iterator[Problem]:
    for role, section in spec.sections():
        if ROLES[role].holds_model:
            yield from _devices(role, section)
        for name in section.env:
            if not re.fullmatch(r"[^=\s\0]+", name):
                yield Problem(f"{role}.env", f"{show(name)} is not a variable name", 'write NAME = "value"')
            elif name == "OMP_NUM_THREADS" and not re.fullmatch(r"[1-9]\d*", section.env[name]):
                hint = f"remove it, or use {role}.threads"
                yield Problem(f"{role}.env.{name}", "must be a positive whole number", hint, show(section.env[name]))
            elif name in RESERVED_ENV or name.startswith("RLCTL_"):
                yield Problem(
                    f"{role}.env.{name}", "rlctl sets this one itself", "remove the key", show(section.env[name])
                )
            elif name == "CUDA_VISIBLE_DEVICES":
                hint = f"use {role}.devices"
                yield Problem(f"{role}.env.{name}", "rlctl sets this one itself", hint, show(section.env[name]))
        if section.threads is not None and "OMP_NUM_THREADS" in section.env:
            yield no_effect(f"{role}.threads", section, f"{role}.env.OMP_NUM_THREADS wins")
    if spec.rollout.launcher != "python":
        message = "replicas are independent of one another, so no launcher joins them"
        yield Problem("rollout.launcher", message, 'write "python", or leave it out', show(spec.rollout.launcher))


def _devices(role: RoleName, section: RoleSection) -> Iterator[Problem]:
    devices, value = section.devices, show(section.devices)
    key = f"{role}.devices"
    if any(device < 0 for device in devices):
        yield Problem(key, "GPU numbers start at 0", "nvidia-smi -L lists them; [] is the CPU", value)
    if len(set(devices)) != len(devices):
        hint = f"name {section.processes} different ones" if section.processes > 1 else "name it once"
        yield Problem(key, "GPU listed twice; each process needs its own", hint, value)
    each = devices_of_a_process(section)
    if crosses_hosts(section):
        return
    if devices and len(set(devices)) == len(devices) and len(devices) * section.nodes != section.processes * each:
        on_each = f" on each of {section.nodes} nodes" if section.nodes > 1 else ""
        has = "one" if each == 1 else f"{each} (tensor_parallel)"
        message = f"{len(devices)} GPUs{on_each} for {section.processes} processes; each process has {has}"
        fitting = len(devices) * section.nodes
        if fitting % each:
            hint = f"name {section.processes * each} GPUs, or change {role}.engine.tensor_parallel"
        else:
            hint = f"set {role}.processes = {fitting // each}, or change the list"
        yield Problem(key, message, hint, value)


RULES: tuple[Callable[[Spec], Iterator[Problem]], ...] = (
    _batch,
    sharing_problems,
    _overlong_buffer,
    data_problems,
    reward_section_problems,
    judge_problems,
    reward_model_problems,
    algorithm_problems,
    _lora,
    _optimizer,
    _activations,
    _logprob_gap,
    _roles,
    deadline_problems,
    node_problems,
    engine_problems,
    run_ahead_problems,
    transport_problems,
    attention_problems,
    shadowed_attention,
    kernel_problems,
    eval_problems,
    _tracking,
)

"""Rules that span several keys: batch arithmetic, and keys that have no effect under what was chosen.

A key counts as *set* when the spec writes it, whatever the value. Rules about files are in `specs/files.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

from specs.attention_rules import attention_problems, shadowed_attention
from specs.data_files import is_hub_data
from specs.errors import Problem
from specs.explain import listed, show
from specs.files import file_problems
from specs.node_rules import node_problems
from specs.road_rules import road_problems
from specs.rollout_rules import rollout_problems
from specs.run_ahead_rules import run_ahead_problems, run_ahead_warnings
from specs.schema import (
    ExactMatch,
    FakeRolloutEngine,
    FakeTrainEngine,
    Fsdp2Engine,
    MathVerify,
    ModelRole,
    Overlong,
    Regex,
    RoleName,
    RoleSection,
    RolloutSection,
    Spec,
    Table,
    TorchRolloutEngine,
)
from specs.seats import devices_of_a_process, mesh_of, straddling
from specs.sglang_rules import sglang_problems
from specs.templates import template_columns
from specs.vllm_rules import vllm_problems
from specs.zero_rules import zero_problems

__all__ = ["cross_field_problems", "cross_field_warnings", "file_problems"]

RESERVED_ENV = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def cross_field_problems(spec: Spec) -> list[Problem]:
    """Everything that is wrong although each key alone is fine."""
    return [problem for rule in RULES for problem in rule(spec)]


def cross_field_warnings(spec: Spec) -> list[Problem]:
    """What works but is seldom meant."""
    warnings = []
    algorithm, rollout = spec.algorithm, spec.rollout
    if spec.ratio_against == "current":
        for key in ("clip_low", "clip_high", "dual_clip"):
            if key in algorithm.model_fields_set:
                message = "does nothing: with one mini-batch and one epoch per step the ratio is always 1"
                hint = "raise algorithm.mini_batches_per_step or algorithm.epochs_per_step, or leave it out"
                warnings.append(Problem(f"algorithm.{key}", message, hint, show(getattr(algorithm, key))))
    for key, off in (("top_p", 1.0), ("top_k", 0)):
        if getattr(rollout, key) != off:
            message = "samples from another distribution than the one that is trained"
            warnings.append(
                Problem(f"rollout.{key}", message, f"{off:g} makes them equal", show(getattr(rollout, key)))
            )
    return [*warnings, *run_ahead_warnings(spec), *_never_due(spec), *_straddling(spec)]


def _never_due(spec: Spec) -> Iterator[Problem]:
    steps = spec.run.steps
    for name, section in (("eval", spec.eval), ("checkpoint", spec.checkpoint)):
        if section is not None and "every" in section.model_fields_set and section.every > steps:
            ends = "before the first step and after the last" if name == "eval" else "after the last step"
            message = f"the run has {steps} steps, so it happens {ends} only"
            yield Problem(f"{name}.every", message, f"use at most {steps}", str(section.every))


def _no_effect(key: str, table: Table, why: str) -> Problem:
    name = key.rpartition(".")[2]
    return Problem(key, f"has no effect: {why}", "remove the key", show(getattr(table, name)))


# ── batch arithmetic ──────────────────────────────────────────────────────────────────────────────


def _batch(spec: Spec) -> Iterator[Problem]:
    algorithm, data = spec.algorithm, spec.data
    if algorithm.group_size == 1:
        yield Problem(
            "algorithm.group_size",
            "an answer is compared with the others of its group; alone it teaches nothing",
            "use 2 or more",
            "1",
        )
    total, parts = spec.samples_per_step, algorithm.mini_batches_per_step
    arithmetic = f"{data.prompts_per_step} prompts × {algorithm.group_size} answers = {total} samples"
    if total % parts:
        start = min(parts, total)
        near = next((n for far in range(min(start, 10_000)) for n in (start - far, start + far) if total % n == 0), 1)
        message = f"{arithmetic} cannot be cut into {parts} equal mini-batches"
        yield Problem("algorithm.mini_batches_per_step", message, f"{near} would fit", str(parts))
    elif total // parts < spec.actor.processes:
        message = f"{arithmetic} in {parts} mini-batches leave some of {spec.actor.processes} ranks without work"
        yield Problem("actor.processes", message, f"use at most {total // parts} processes", str(spec.actor.processes))
    if data.prompts_per_step < spec.rollout.processes:
        message = f"{data.prompts_per_step} prompts per step leave some replicas without work"
        yield Problem(
            "rollout.processes", message, f"use at most {data.prompts_per_step} processes", str(spec.rollout.processes)
        )


def _lengths(spec: Spec) -> Iterator[Problem]:
    data = spec.data
    longest = f"data.max_prompt_tokens + data.max_response_tokens = {spec.max_sequence_tokens}"
    for role, section in _sections(spec):
        if isinstance(section, ModelRole) and section.micro_batch_tokens < spec.max_sequence_tokens:
            message = f"less than the longest sequence ({longest} tokens)"
            hint = f"use at least {spec.max_sequence_tokens}"
            yield Problem(f"{role}.micro_batch_tokens", message, hint, str(section.micro_batch_tokens))
    engine = spec.rollout.engine
    if isinstance(engine, TorchRolloutEngine) and engine.prefill_tokens < data.max_prompt_tokens:
        message = f"less than the longest prompt (data.max_prompt_tokens = {data.max_prompt_tokens})"
        hint = f"use at least {data.max_prompt_tokens}"
        yield Problem("rollout.engine.prefill_tokens", message, hint, str(engine.prefill_tokens))
    for index, term in enumerate(spec.reward.terms):
        if isinstance(term, Overlong) and term.buffer_tokens > data.max_response_tokens:
            message = f"longer than the longest answer (data.max_response_tokens = {data.max_response_tokens})"
            hint = f"use at most {data.max_response_tokens}"
            yield Problem(f"reward.terms.{index}.buffer_tokens", message, hint, str(term.buffer_tokens))


# ── algorithm and optimizer ───────────────────────────────────────────────────────────────────────


def _reference(spec: Spec) -> Iterator[Problem]:
    if spec.ref_is_actor and spec.ref is not None:
        message = "has no effect: with actor.lora the reference is the actor without its adapters"
        yield Problem("[ref]", message, "remove the section, or name another model in ref.model")
    if spec.needs_ref:
        return
    if spec.ref is not None:
        hint = "set algorithm.kl_coef above 0, or remove the section"
        yield Problem("[ref]", "has no effect: algorithm.kl_coef is 0, so no reference is loaded", hint)
    if "kl_estimator" in spec.algorithm.model_fields_set:
        yield _no_effect("algorithm.kl_estimator", spec.algorithm, "algorithm.kl_coef is 0")


def _lora(spec: Spec) -> Iterator[Problem]:
    lora = spec.actor.lora
    if lora is None:
        return
    if spec.actor.engine.kind == "fake":
        yield _no_effect("actor.lora", spec.actor, "the fake engine has no linear layers")
    elif spec.model.from_scratch:
        message = "adapters need a trained model below them, and checkpoints do not hold the random one"
        yield Problem("actor.lora", message, "set model.from_scratch = false, or train the whole model")
    if len(lora.targets) > 1 and "all-linear" in lora.targets:
        yield Problem("actor.lora.targets", "all-linear already means every layer", "name it alone", show(lora.targets))
    elif len(set(lora.targets)) < len(lora.targets):
        yield Problem("actor.lora.targets", "a layer stands twice", "name it once", show(lora.targets))


def _optimizer(spec: Spec) -> Iterator[Problem]:
    optimizer = spec.actor.optimizer
    if optimizer.warmup_steps > spec.optimizer_steps:
        message = f"the warm-up is longer than the run ({spec.optimizer_steps} optimizer steps)"
        hint = f"use at most {spec.optimizer_steps}"
        yield Problem("actor.optimizer.warmup_steps", message, hint, str(optimizer.warmup_steps))
    if optimizer.schedule == "constant" and "min_lr_ratio" in optimizer.model_fields_set:
        yield _no_effect("actor.optimizer.min_lr_ratio", optimizer, 'schedule is "constant"')
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        hint = "leave it out for the default, [0.9, 0.999]"
        yield Problem("actor.optimizer.betas", "each must be at least 0 and below 1", hint, show(optimizer.betas))


# ── data, reward and what surrounds them ──────────────────────────────────────────────────────────


def _logprob_gap(spec: Spec) -> Iterator[Problem]:
    warn_at, limit = spec.logprob_gaps
    if warn_at is not None and limit is not None and warn_at > limit:
        hint = f"use at most {limit:g}, or raise rollout.max_logprob_gap"
        message = f"the run would stop (rollout.max_logprob_gap = {limit:g}) before it warns"
        if spec.rollout.warn_logprob_gap is not None:
            yield Problem("rollout.warn_logprob_gap", message, hint, show(spec.rollout.warn_logprob_gap))


def _data(spec: Spec) -> Iterator[Problem]:
    data, given = spec.data, spec.data.model_fields_set
    if "split" in given and not is_hub_data(data.train):
        yield _no_effect("data.split", data, f"{show(data.train)} is not a hub data set")
    if data.system and data.chat == "never":
        yield _no_effect("data.system", data, 'data.chat is "never"')
    if "answer_column" in given and not any(isinstance(term, ExactMatch | MathVerify) for term in spec.reward.terms):
        yield _no_effect("data.answer_column", data, "no term of reward.terms compares with it")
    if data.template and "prompt_column" in given:
        yield _no_effect("data.prompt_column", data, "data.template makes the prompt")
    if data.template and not template_columns(data.template):
        jinja = re.findall(r"\{\{\s*(\w+)\s*\}\}", data.template)
        hint = f"write {{{jinja[0] if jinja else 'column'}}} where a row's value goes"
        yield Problem("data.template", "names no column, so every prompt would be the same", hint, show(data.template))


def _eval(spec: Spec) -> Iterator[Problem]:
    held, data = spec.eval, spec.data
    if held is None:
        return
    if "split" in held.model_fields_set and not is_hub_data(held.data):
        why = (
            f"{show(held.data)} is not a hub data set"
            if held.data
            else "eval.data is empty, so rows of data.train are held out"
        )
        yield _no_effect("eval.split", held, why)
    if _same_source(held.data, data.train) and (not is_hub_data(held.data) or held.split == data.split):
        hint = "leave eval.data out to hold rows of data.train out"
        yield Problem("eval.data", "these are the training prompts", hint, show(held.data))
    if not held.data and data.max_rows is not None and held.prompts >= data.max_rows:
        message = f"holding them out leaves none of data.max_rows = {data.max_rows} to train on"
        yield Problem("eval.prompts", message, f"use fewer than {data.max_rows}", str(held.prompts))


def _same_source(one: str, other: str) -> bool:
    return one == other or (not is_hub_data(one) and bool(one) and os.path.normpath(one) == os.path.normpath(other))


def _reward(spec: Spec) -> Iterator[Problem]:
    terms = spec.reward.terms
    if all(term.weight == 0 for term in terms):
        yield Problem("reward.terms", "every weight is 0, so every answer scores 0", "give a term a weight")
    for index, term in enumerate(terms):
        if isinstance(term, Regex):
            try:
                re.compile(term.pattern)
            except re.error as error:
                key = f"reward.terms.{index}.pattern"
                yield Problem(
                    key, f"not a regular expression: {error}", "TOML's '…' keeps backslashes", show(term.pattern)
                )
    section = spec.reward
    for key, default, why in (
        ("processes", 1, "the reward role is one process; reward.workers sets how many judge"),
        ("launcher", "python", "the reward role is one process"),
        ("devices", (), "judging runs on the CPU"),
    ):
        if getattr(section, key) != default:
            yield Problem(
                f"reward.{key}", why, f"remove the key, or write {show(default)}", show(getattr(section, key))
            )


def _tracking(spec: Spec) -> Iterator[Problem]:
    tracking = spec.tracking
    if tracking is None:
        return
    if tracking.kind == "tensorboard" and "project" in tracking.model_fields_set:
        yield _no_effect("tracking.project", tracking, 'only kind "wandb" has projects')
    if tracking.kind == "wandb" and not tracking.project:
        yield Problem("tracking.project", "wandb needs one", 'add project = "…" under [tracking]')


# ── roles ─────────────────────────────────────────────────────────────────────────────────────────


def _sections(spec: Spec) -> list[tuple[RoleName, RoleSection]]:
    """Sections as the person wrote them: a reference shaped like the actor is not one of them."""
    sections: list[tuple[RoleName, RoleSection]] = [("actor", spec.actor)]
    if spec.ref is not None:
        sections.append(("ref", spec.ref))
    return [*sections, ("rollout", spec.rollout), ("reward", spec.reward)]


def _roles(spec: Spec) -> Iterator[Problem]:
    for role, section in _sections(spec):
        if role != "reward":
            yield from _devices(role, section)
        for name in section.env:
            if not re.fullmatch(r"[^=\s\0]+", name):
                yield Problem(f"{role}.env", f"{show(name)} is no name of a variable", 'write NAME = "value"')
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
            yield _no_effect(f"{role}.threads", section, f"{role}.env.OMP_NUM_THREADS wins")
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
        yield Problem(key, "a GPU stands twice; each process has one of its own", hint, value)
    each = devices_of_a_process(section)
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


# ── meshes ────────────────────────────────────────────────────────────────────────────────────────


def _mesh(spec: Spec) -> Iterator[Problem]:
    for role, section in _sections(spec):
        engine = getattr(section, "engine", None)
        if not isinstance(engine, Fsdp2Engine):
            continue
        yield from _mesh_size(role, section, engine)
        if engine.offload == "cpu" and not section.devices:
            yield _no_effect(f"{role}.engine.offload", engine, f"{role} runs on the CPU")
        if role == "ref" and "sync_every_micro_batch" in engine.model_fields_set:
            yield _no_effect(f"{role}.engine.sync_every_micro_batch", engine, "the reference has no gradients")


def _mesh_size(role: RoleName, section: RoleSection, engine: Fsdp2Engine) -> Iterator[Problem]:
    processes, shard, replicate = section.processes, engine.shard, engine.replicate
    if shard is None:
        if processes % replicate:
            message = f"{processes} processes cannot be shared out to {replicate} groups"
            hint = f"{role}.engine.replicate = {listed(_divisors(processes))} would fit"
            yield Problem(f"{role}.engine.replicate", message, hint, str(replicate))
        return
    if shard * replicate == processes:
        return
    message = f"shard × replicate = {shard} × {replicate} = {shard * replicate}, but {role} has {processes} processes"
    fitting = f"{role}.processes = {shard * replicate} would fit"
    if processes % shard == 0:
        fitting += f", or {role}.engine.replicate = {processes // shard}"
    else:
        fitting += f"; {processes} processes take shard = {listed(_divisors(processes))}"
    yield Problem(f"{role}.engine.shard", message, fitting, str(shard))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _straddling(spec: Spec) -> Iterator[Problem]:
    for role, section in _sections(spec):
        groups, mesh = straddling(section), mesh_of(section)
        if not groups or mesh is None:
            continue
        per_node = section.processes // section.nodes
        message = (
            f"{len(groups)} of {mesh.replicate} groups of {mesh.shard} ranks sit on more than one node "
            f"({per_node} processes each), so what is gathered for every layer crosses the network"
        )
        if not isinstance(getattr(section, "engine", None), Fsdp2Engine):
            hint = "fine where the model needs the memory of all; fsdp2 can keep its groups inside a node"
            yield Problem(f"{role}.nodes", message, hint, str(section.nodes))
            continue
        inside = max(n for n in _divisors(per_node) if n <= mesh.shard)
        hint = f"shard = {inside} and replicate = {section.processes // inside} stay inside, if the model fits"
        yield Problem(f"{role}.engine.shard", message, hint, str(mesh.shard))


# ── the fake engines ──────────────────────────────────────────────────────────────────────────────


def _is_fake(section: RoleSection) -> bool:
    return isinstance(getattr(section, "engine", None), FakeTrainEngine | FakeRolloutEngine)


def _fake(spec: Spec) -> Iterator[Problem]:
    held = [(role, section) for role, section in _sections(spec) if role != "reward"]
    fakes = [role for role, section in held if _is_fake(section)]
    if not fakes:
        return
    for role, section in held:
        if role not in fakes:
            message = f'cannot work with {fakes[0]}.engine.kind = "fake": their models differ'
            kind = getattr(getattr(section, "engine", None), "kind", "")
            yield Problem(f"{role}.engine.kind", message, "use the fake engine for all roles or for none", show(kind))
        else:
            yield from _without_effect_on_fakes(role, section)
    if not spec.model.from_scratch:
        hint = "set model.from_scratch = true"
        yield Problem(
            "model.from_scratch", "the fake engine reads no weights; it always starts from scratch", hint, "false"
        )
    for key in ("attn_implementation", "trust_remote_code"):
        if getattr(spec.model, key) not in ("auto", False):
            yield _no_effect(f"model.{key}", spec.model, "the fake engine has no such model")


def _without_effect_on_fakes(role: RoleName, section: RoleSection) -> Iterator[Problem]:
    why = "the fake engine is a numpy model in fp32 on the CPU"
    if section.devices:
        yield _no_effect(f"{role}.devices", section, why)
    assert isinstance(section, ModelRole | RolloutSection)
    if section.dtype == "bf16":
        yield _no_effect(f"{role}.dtype", section, why)
    if section.attn_implementation is not None:
        yield _no_effect(f"{role}.attn_implementation", section, why)
    if getattr(section, "gradient_checkpointing", False):
        yield _no_effect(f"{role}.gradient_checkpointing", section, why)


RULES: tuple[Callable[[Spec], Iterator[Problem]], ...] = (
    _batch,
    _lengths,
    _data,
    _reward,
    _reference,
    _lora,
    _optimizer,
    _logprob_gap,
    _roles,
    node_problems,
    rollout_problems,
    run_ahead_problems,
    sglang_problems,
    vllm_problems,
    road_problems,
    _mesh,
    zero_problems,
    attention_problems,
    shadowed_attention,
    _fake,
    _eval,
    _tracking,
)

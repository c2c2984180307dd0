"""Rules of every role: its devices, environment and launcher, and its engine."""

from __future__ import annotations

import re
from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.engines.engine_table import EngineContext, RolloutTable, engine_of
from specs.schema.engines.transformers_tables import TrainedHere
from specs.schema.rank_groups import devices_of_a_process, nodes_of_a_process
from specs.schema.recipes import sampling_of
from specs.schema.role_section import RoleSection
from specs.schema.roles import ROLES, RoleName
from specs.schema.spec import RolloutSection, Spec
from specs.schema.table import no_effect
from specs.text import show

_RESERVED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def role_problems(spec: Spec) -> Iterator[Problem]:
    for role, section in spec.sections():
        yield from _environment(role, section)
        if ROLES[role].holds_model:
            yield from _devices(role, section)
            yield from _engine(spec, role, section)
    if (sampling := sampling_of(spec)) is not None:
        yield from _rollout(sampling.rollout)


def _rollout(rollout: RolloutSection) -> Iterator[Problem]:
    if rollout.launcher != "python":
        message = "replicas are independent of one another, so no launcher joins them"
        yield Problem("rollout.launcher", message, 'write "python", or leave it out')
    warn_at, limit = rollout.warn_logprob_gap, rollout.max_logprob_gap
    if warn_at is not None and limit is not None and warn_at > limit:
        message = f"the run would stop (rollout.max_logprob_gap = {limit:g}) before it warns"
        yield Problem("rollout.warn_logprob_gap", message, f"use at most {limit:g}")


def _environment(role: RoleName, section: RoleSection) -> Iterator[Problem]:
    for name, value in section.env.items():
        key = f"{role}.env.{name}"
        if not re.fullmatch(r"[^=\s\0]+", name):
            yield Problem(f"{role}.env", f"{show(name)} is not a variable name", 'write NAME = "value"')
        elif "\0" in value:
            yield Problem(key, "holds the character NUL, which no variable does", "write it without \\u0000")
        elif name == "OMP_NUM_THREADS" and not re.fullmatch(r"[1-9]\d*", value):
            yield Problem(key, "must be a positive whole number", f"remove it, or use {role}.threads")
        elif name in _RESERVED or name.startswith("RLCTL_"):
            yield Problem(key, "rlctl sets this one itself", "remove the key")
        elif name == "CUDA_VISIBLE_DEVICES":
            yield Problem(key, "rlctl sets this one itself", f"use {role}.devices")
    if section.threads is not None and "OMP_NUM_THREADS" in section.env:
        yield no_effect(f"{role}.threads", f"{role}.env.OMP_NUM_THREADS wins")


def _devices(role: RoleName, section: RoleSection) -> Iterator[Problem]:
    devices, processes, each = section.devices, section.processes, devices_of_a_process(section)
    key, apart = f"{role}.devices", len(set(section.devices)) == len(section.devices)
    if any(device < 0 for device in devices):
        yield Problem(key, "GPU numbers start at 0", "nvidia-smi -L lists them; [] is the CPU")
    if not apart:
        hint = f"name {processes} different ones" if processes > 1 else "name it once"
        yield Problem(key, "GPU listed twice; each process needs its own", hint)
    there = len(devices) * section.nodes
    if not devices or not apart or there == processes * each:
        return
    on_each = f" on each of {section.nodes} nodes" if section.nodes > 1 else ""
    has = "one" if each == 1 else f"{each} (tensor_parallel)"
    hint = f"set {role}.processes = {there // each}, or change the list"
    if there % each:
        hint = f"name {processes * each} GPUs, or change {role}.engine.tensor_parallel"
    yield Problem(key, f"{len(devices)} GPUs{on_each} for {processes} processes; each process has {has}", hint)


# ── engines ───────────────────────────────────────────────────────────────────────────────────────


def _engine(spec: Spec, role: RoleName, section: RoleSection) -> Iterator[Problem]:
    engine = engine_of(section)
    assert engine is not None
    if engine.attention == "engine" and getattr(section, "attn_implementation", None) is not None:
        message = f"has no effect: {engine.kind} chooses its attention itself, by device, dtype and head size"
        hint = "remove the key; as_built.json says what it took"
        yield Problem(f"{role}.attn_implementation", message, hint)
    if isinstance(engine, RolloutTable):
        yield from _sharded_replicas(role, section, engine)
    if ROLES[role].head != "lm" and isinstance(engine, TrainedHere) and engine.logits_chunk_tokens is not None:
        yield no_effect(f"{role}.engine.logits_chunk_tokens", "its head gives one number, and no logits")
    yield from engine.problems(engine_context(spec, role, section))


def engine_context(spec: Spec, role: RoleName, section: RoleSection) -> EngineContext:
    """Return what the engine of a role may look at."""
    engines = {name: engine_of(other) for name, other in spec.sections() if ROLES[name].holds_model}
    return EngineContext(
        role=role,
        section=section,
        dtype=spec.dtype_of(section),
        model=spec.model,
        engines={name: engine for name, engine in engines.items() if engine is not None},
        max_prompt_tokens=spec.max_prompt_tokens,
        evaluations=spec.evaluations,
        actor_lora=spec.lead_section.lora,
    )


def _sharded_replicas(role: RoleName, section: RoleSection, engine: RolloutTable) -> Iterator[Problem]:
    key, each = f"{role}.engine.tensor_parallel", devices_of_a_process(section)
    span, allowed = nodes_of_a_process(section), getattr(section, "allow_pickle_between_nodes", False)
    if span == 1:
        if allowed:
            yield no_effect(f"{role}.allow_pickle_between_nodes", "each replica is on one node")
    elif not engine.spans_nodes:
        message = f"{section.processes} on {section.nodes} nodes: {engine.kind} keeps each replica on one"
        yield Problem(f"{role}.processes", message, f"use a multiple of {section.nodes}")
    elif not allowed:
        message = (
            f"each replica would span {span} nodes: {engine.kind} then sends pickled objects between them over "
            "connections that anybody can open"
        )
        hint = f"write true if their network is private, or use a multiple of {section.nodes} as {role}.processes"
        yield Problem(f"{role}.allow_pickle_between_nodes", message, hint, "false")
    elif each % span:
        message = f"the {span} nodes of a replica cannot share tensor_parallel = {each} evenly"
        yield Problem(key, message, f"use a multiple of {span}")
    if each > 1 and not section.devices and engine.parallel_on_cpu is False:
        hint = f"remove the key, or name {each * section.processes} GPUs in {role}.devices"
        yield Problem(key, f"shards the model across GPUs, and {role} runs on the CPU", hint)

"""Rules of every role: its devices, environment and launcher."""

from __future__ import annotations

import re
from collections.abc import Iterator

from specs.errors import Problem
from specs.rules.engine_rules import crosses_hosts
from specs.schema.rank_groups import devices_of_a_process
from specs.schema.role_section import RoleSection
from specs.schema.roles import ROLES, RoleName
from specs.schema.spec import Spec
from specs.schema.table import no_effect
from specs.text import show

_RESERVED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def role_problems(spec: Spec) -> Iterator[Problem]:
    for role, section in spec.sections():
        if ROLES[role].holds_model:
            yield from _devices(role, section)
        for name in section.env:
            if not re.fullmatch(r"[^=\s\0]+", name):
                yield Problem(f"{role}.env", f"{show(name)} is not a variable name", 'write NAME = "value"')
            elif name == "OMP_NUM_THREADS" and not re.fullmatch(r"[1-9]\d*", section.env[name]):
                hint = f"remove it, or use {role}.threads"
                yield Problem(f"{role}.env.{name}", "must be a positive whole number", hint, show(section.env[name]))
            elif name in _RESERVED or name.startswith("RLCTL_"):
                yield Problem(
                    f"{role}.env.{name}", "rlctl sets this one itself", "remove the key", show(section.env[name])
                )
            elif name == "CUDA_VISIBLE_DEVICES":
                hint = f"use {role}.devices"
                yield Problem(f"{role}.env.{name}", "rlctl sets this one itself", hint, show(section.env[name]))
        if section.threads is not None and "OMP_NUM_THREADS" in section.env:
            yield no_effect(f"{role}.threads", section, f"{role}.env.OMP_NUM_THREADS wins")
    rollout = spec.rollout
    if rollout.launcher != "python":
        message = "replicas are independent of one another, so no launcher joins them"
        yield Problem("rollout.launcher", message, 'write "python", or leave it out', show(rollout.launcher))
    warn_at, limit = rollout.warn_logprob_gap, rollout.max_logprob_gap
    if warn_at is not None and limit is not None and warn_at > limit:
        message = f"the run would stop (rollout.max_logprob_gap = {limit:g}) before it warns"
        yield Problem("rollout.warn_logprob_gap", message, f"use at most {limit:g}", show(warn_at))


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

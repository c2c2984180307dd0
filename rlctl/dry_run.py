"""`rlctl train --dry-run`: what would be started, role by role. Creates and changes nothing."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rlctl.plan import RolePlan, make_plan
from specs.errors import SpecError
from specs.load import load_spec
from specs.rules import file_problems


def dry_run(spec_path: Path, overrides: Sequence[str]) -> None:
    """Print command, environment and devices of every role. Raises SpecError as `train` would."""
    spec = load_spec(spec_path, overrides)
    spec_dir = spec_path.absolute().parent
    errors, warnings = file_problems(spec, spec_dir)
    if errors:
        raise SpecError(errors)
    plan = make_plan(spec, spec_dir)
    for role in plan.roles:
        print("\n".join(describe(role)) + "\n")
    turns = "take turns on their devices" if plan.colocated else "keep their devices"
    print(f"trainers and rollout {turns}; addresses, ports and the run's secret are made at the start")
    for warning in warnings:
        print(f"\nwarning: {warning}")


def describe(role: RolePlan) -> list[str]:
    """One role as lines: `started` counts commands, of which torchrun makes all ranks and python one each."""
    started = 1 if role.launcher == "torchrun" else role.processes
    devices = ", ".join(f"GPU {device}" for device in role.devices) or "CPU"
    processes = "process" if role.processes == 1 else "processes"
    threads = "thread" if role.threads == 1 else "threads"
    head = f"[{role.role}] {role.processes} {processes} on {devices}, {role.threads} {threads} each"
    command = f"  command  {shlex.join(role.command)}" + (f"    (× {started})" if started > 1 else "")
    env = [f"  env      {name}={shlex.quote(value)}" for name, value in sorted(role.env.items())]
    return [head, command, *env]

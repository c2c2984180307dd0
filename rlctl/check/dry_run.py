"""`rlctl train --dry-run`: what would be started, role by role. Creates and changes nothing."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlctl.check.findings import notes_of
from rlctl.processes.placement import RolePlan, make_plan
from rlctl.run.run_exports import checked
from rlctl.show.problems import print_problems
from rlctl.show.screen import Screen
from rlctl.show.text_format import counted
from specs.errors import SpecError
from specs.load.load import load_spec
from specs.rules.transport_rules import choose_transport
from specs.schema.engines.engine_table import TrainTable, engine_of
from specs.schema.recipes import sampling_of
from specs.schema.spec import Spec

_INHERITED = """\
[every role] also gets this shell's environment, where its own says nothing
"""
_ELSEWHERE = f"""\
[every role] also gets the environment of the shell that starts the run there
  {sys.executable} and PYTHONPATH stand for what rlctl has there; threads follow the cores there
"""


def dry_run(spec_path: Path, overrides: Sequence[str], *, resume: bool = False, elsewhere: bool = False) -> None:
    """Print command, environment and devices of every role. `resume`: `spec_path` may be a run directory. `elsewhere`:
    the run is for other machines. Raises SpecError as `train` would, but where only engines, interpreters or GPUs are
    missing here: that is a warning."""
    notes: list[str] = []
    spec_dir = spec_path.absolute().parent
    if resume:
        from rlctl.run.lineage import spec_source  # brings what reads checkpoints

        source = spec_source(spec_path, resume=True)
        spec_path, spec_dir = source.path, source.folder
    spec = load_spec(spec_path, overrides, notes.append)
    spec, errors, warnings = checked(spec, spec_dir, elsewhere=True)
    if errors:
        raise SpecError(errors)
    if elsewhere:
        warnings, notes = notes_of(warnings, notes)
    plan = make_plan(spec, spec_dir)
    for role in plan.roles:
        print("\n".join([*describe(role), *_library_configs(spec, role)]) + "\n")
    print(_ELSEWHERE if elsewhere else _INHERITED)
    turns = "take turns on their devices" if plan.colocated else "keep their devices"
    print(f"trainers and rollout {turns}; addresses, ports and the run's secret are made at the start")
    if (sampling := sampling_of(spec)) is not None:
        transport, why = choose_transport(sampling)
        print(f"weights travel from actor to rollout by {transport} ({why})")
        if most := sampling.rollout.max_staleness:
            print(f"sampling runs ahead of learning by up to {counted(most, 'step')}")
    for note in notes:
        print(f"\nnote: {note}")
    print()
    print_problems(Screen(), "warning", warnings)


def describe(role: RolePlan) -> list[str]:
    """Describe one role in lines, host by host: what is run there, on which devices, with which environment."""
    devices = ", ".join(f"GPU {device}" for device in role.devices) or "CPU"
    each = " of each host" if role.nodes > 1 and role.devices else ""
    processes = f"{role.processes} process{'es' if role.processes > 1 else ''}"
    nodes = f", {role.nodes} nodes" if role.nodes > 1 else ""
    times = f"    (× {role.on_each})" if role.launcher == "python" and role.on_each > 1 else ""
    lines = [f"[{role.role}] {processes} on {devices}{each}, {counted(role.threads, 'thread')} each{nodes}"]
    if role.here:
        if role.launcher == "srun" and role.nodes > 1:
            lines += [f"  nodes    0 to {role.nodes - 1}: this host and the next ones of the SLURM job"]
        elif role.nodes > 1:
            lines += [f"  node 0   this host, {_ranks(role, 0)}"]
        lines += [f"  command  {shlex.join(role.command)}{times}", *_env(role.env)]
    known: Mapping[str, str] = role.env if role.here else {}
    for node in role.remote:
        here = {name: value for name, value in node.env.items() if known.get(name) != value}
        lines += [
            f"  node {node.node_rank}   {node.host}, {_ranks(role, node.node_rank)}",
            f"  command  {shlex.join(node.command)}{times}",
            *(_env(here) or ["  env      as on node 0"]),
        ]
        known = known or node.env
    return lines


def _library_configs(spec: Spec, role: RolePlan) -> list[str]:
    """Return the configurations that a train engine hands to libraries, derived keys and the spec's own."""
    section = spec.role(role.role)
    engine = engine_of(section)
    if not isinstance(engine, TrainTable):
        return []
    device = "cuda" if section.devices else "cpu"
    lines = []
    configs = engine.library_config(spec.dtype(role.role), getattr(section, "optimizer", None), device)
    for name, config in configs.items():
        lines += [f"  {name}", *textwrap.indent(json.dumps(config, indent=2), "    ").splitlines()]
    return lines


def _ranks(role: RolePlan, node: int) -> str:
    ranks = role.ranks_of(node)
    if node % role.nodes_of_rank:
        return f"a part of rank {ranks[0]}"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _env(env: Mapping[str, str]) -> list[str]:
    return [f"  env      {name}={shlex.quote(value)}" for name, value in sorted(env.items())]

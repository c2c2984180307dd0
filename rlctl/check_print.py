"""What `rlctl check-config` prints: what the spec means in tables, then what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlctl.attention_table import attention_table
from rlctl.check_meaning import batch, reference, roles
from rlctl.plan import Plan
from rlctl.text_format import counted
from specs.errors import Problem
from specs.road_rules import choose_road
from specs.schema import RoleSection, Spec
from specs.seats import SeatGroup, mesh_of, seat_groups

if TYPE_CHECKING:
    from rlctl.check import Findings
    from rlctl.probe import Probe

SEAT_ROWS = 8  # groups of a role that the table of seats shows; JSON has them all


def print_findings(findings: Findings, spec_path: Path) -> None:
    """Tables and warnings to stdout, problems to stderr."""
    out = Console(highlight=False)
    if findings.spec and findings.plan:
        out.print(_roles_table(findings.spec, findings.plan, spec_path.absolute().parent))
        out.print()
        out.print(attention_table(findings.spec, spec_path.absolute().parent))
        out.print()
        if any(findings.spec.role(name).python for name in findings.spec.roles):
            out.print(_interpreters_table(findings.spec, findings.plan, spec_path.absolute().parent))
            out.print()
        if any(mesh_of(findings.spec.role(name)) for name in findings.spec.roles):
            out.print(_seats_table(findings.spec))
            out.print()
        out.print(_arithmetic(findings.spec), highlight=True)
        out.print()
        if findings.probe:
            _print_probe(out, findings.spec, spec_path.absolute().parent, findings.probe)
    for warning in findings.warnings:
        _print_problem(out, "warning", "yellow", warning)
    problems = Console(stderr=True, highlight=False)
    for problem in findings.problems:
        _print_problem(problems, "error", "red", problem)
    if findings.ok:
        out.print(f"[green]ok[/green]: {spec_path}", soft_wrap=True)
    else:
        count = len(findings.problems)
        problems.print(f"{count} problem{'s' if count > 1 else ''} in {spec_path}", markup=False, soft_wrap=True)


def _print_probe(out: Console, spec: Spec, spec_dir: Path, found: Probe) -> None:
    from rlctl.probe_report import RUN_NOTE, probe_table, run_table

    out.print(probe_table(spec, spec_dir, found))
    out.print()
    if found.level == "run":
        out.print(run_table(found))
        out.print(f"\n{RUN_NOTE}\n")


def _print_problem(console: Console, word: str, colour: str, problem: Problem) -> None:
    head, _, hint = str(problem).partition("\n  hint: ")
    console.print(Text.assemble((f"{word}:", f"bold {colour}"), f" {head}"), soft_wrap=True)
    if hint:
        console.print(Text.assemble("\n", ("hint:", "bold cyan"), f" {hint}"), soft_wrap=True)
    console.print()


def _roles_table(spec: Spec, plan: Plan, spec_dir: Path) -> Table:
    table = Table("role", "engine", "model", "dtype", "processes", "devices", "threads", box=None, pad_edge=False)
    for name, role in roles(spec, plan, spec_dir).items():
        path = spec.model_path(name)  # type: ignore[arg-type]
        devices = _span(role["devices"]) if role["devices"] else "CPU"
        cells = (role["engine"], path if role["engine"] else "", role["dtype"])
        nodes = f" on {role['nodes']} nodes" if role["nodes"] > 1 else ""
        places = (f"{role['processes']} × {role['launcher']}{nodes}", devices, role["threads"])
        table.add_row(name, *(str(cell or "–") for cell in cells), *map(str, places))
    return table


def _interpreters_table(spec: Spec, plan: Plan, spec_dir: Path) -> Table:
    """Roles that run in another interpreter than ours, and what it has installed."""
    table = Table(box=None, pad_edge=False)
    for column in ("role", "interpreter", "has"):
        table.add_column(column, overflow="fold")
    for name, role in roles(spec, plan, spec_dir).items():
        if spec.role(name).python:  # type: ignore[arg-type]
            packages = ", ".join(f"{package} {version}" for package, version in role["versions"].items())
            table.add_row(name, role["python"], packages or "–")
    return table


def _seats_table(spec: Spec) -> Table:
    table = Table("role", "mesh", "replica", "ranks", "node", "devices", box=None, pad_edge=False)
    for name in spec.roles:
        section, mesh = spec.role(name), mesh_of(spec.role(name))
        if mesh is None:
            continue
        groups = seat_groups(section)
        shown = groups if len(groups) <= SEAT_ROWS else [*groups[: SEAT_ROWS - 2], groups[-1]]
        for group in shown:
            if group is shown[-1] and len(shown) < len(groups):
                table.add_row("", "", f"… {len(groups) - len(shown)} more")
            first = group.replica == 0
            whose = (name, f"replicate {mesh.replicate} × shard {mesh.shard}") if first else ("", "")
            table.add_row(*whose, *_seats_row(section, group))
    return table


def _seats_row(section: RoleSection, group: SeatGroup) -> tuple[str, str, str, str]:
    places = []
    for node in group.nodes:
        devices = [seat.device for seat in group.seats if seat.node == node and seat.device is not None]
        places.append(f"GPU {_span(devices)}" if devices else "CPU")
    nodes = _span(list(group.nodes))
    return str(group.replica), _span([seat.rank for seat in group.seats]), nodes, "; ".join(dict.fromkeys(places))


def _span(numbers: Sequence[int]) -> str:
    """`3`, `0–7`, or, where they have gaps, `0, 2, 5`."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and list(numbers) == list(range(first, last + 1)):
        return f"{first}–{last}"
    return ", ".join(map(str, numbers))


def _reference(spec: Spec) -> str:
    found = reference(spec)
    if not found["loaded"]:
        return str(found["why"])
    where = f"GPU {_span(found['devices'])}" if found["devices"] else "CPU"
    return f"{found['model']} ({found['why']}), held by {found['engine']} on {where}"


def _arithmetic(spec: Spec) -> str:
    numbers = batch(spec)
    cut = f" → {numbers['mini_batches_per_step']} mini-batches of {numbers['samples_per_mini_batch']}"
    epochs = f" × {numbers['epochs_per_step']} epochs" if numbers["epochs_per_step"] > 1 else ""
    road, why = choose_road(spec)
    buckets = "" if road == "shm" else f", in buckets of {spec.sync.bucket_MiB:g} MiB"
    most = spec.rollout.max_staleness
    ahead = f"\nahead  {_ahead(most)}" if most else ""
    return (
        f"step   {numbers['prompts_per_step']} prompts × {numbers['group_size']} answers = "
        f"{numbers['samples_per_step']} samples{cut if numbers['mini_batches_per_step'] > 1 else ''}{epochs}\n"
        f"run    {counted(numbers['steps'], 'step')} = {counted(numbers['optimizer_steps'], 'optimizer step')}\n"
        f"tokens at most {spec.data.max_prompt_tokens} + {spec.data.max_response_tokens} = "
        f"{numbers['max_sequence_tokens']} in a sequence, {numbers['micro_batch_tokens']} in a forward pass\n"
        f"ref    {_reference(spec)}\n"
        f"sync   weights travel by {road} ({why}){buckets}"
        f"{ahead}"
    )


def _ahead(most: int) -> str:
    if most == 1:
        return "the next step's samples are drawn while the actor learns: 1 step old; weights travel every step"
    return (
        f"the samples of the next {most} steps are drawn while the actor learns: 1 to {most} steps old; weights travel "
        f"every {most} steps"
    )

"""`rlctl check-config`: what a spec means, and what is wrong with it. Creates and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.attention_table import attention_entry, attention_table
from rlctl.plan import Plan, make_plan
from specs.errors import Problem, SpecError
from specs.interpreters import SHOWN, look_at
from specs.load import parse, read_toml
from specs.model_files import resolve_model
from specs.reference import reference_of
from specs.road_rules import choose_road
from specs.rules import cross_field_warnings, file_problems
from specs.schema import Function, RefSection, RoleSection, Spec
from specs.seats import SeatGroup, mesh_of, seat_groups

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rlctl.probe import Probe
    from specs.probed import Level


SEAT_ROWS = 8  # groups of a role that the table of seats shows; JSON has them all


@dataclass(frozen=True)
class Findings:
    """What checking found. `spec` and `plan` are None where the problems left none to look at, `probe` also where none
    was asked for."""

    problems: list[Problem]
    warnings: list[Problem]
    spec: Spec | None = None
    plan: Plan | None = None
    probe: Probe | None = None

    @property
    def ok(self) -> bool:
        return not self.problems


def examine(spec_path: Path, overrides: Sequence[str]) -> Findings:
    """Load a spec, look at the files it names, and plan it."""
    try:
        parsed = parse(read_toml(spec_path), overrides)
    except SpecError as error:
        return Findings(error.problems, [])
    spec, spec_dir = parsed.spec, spec_path.absolute().parent
    if spec is None:
        return Findings(parsed.problems, [])
    problems, warnings = _looked_up(spec, spec_dir)
    if parsed.problems:  # the rest is looked at all the same, so that everything comes at once
        return Findings([*parsed.problems, *parsed.more(problems)], [])
    warnings = [*cross_field_warnings(spec), *warnings, *_run_dir(spec)]
    try:
        plan = make_plan(spec, spec_dir)
    except SpecError as error:
        more = [problem for problem in error.problems if problem not in problems]
        return Findings([*problems, *more], warnings, spec)
    return Findings(problems, warnings, spec, plan)


def _looked_up(spec: Spec, spec_dir: Path) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings about what the spec names; reward functions are imported, in processes of their own."""
    problems, warnings = file_problems(spec, spec_dir)
    if not any(isinstance(term, Function) for term in spec.reward.terms):
        return problems, warnings
    from rlctl.reward_check import import_problems

    of_imports = import_problems(spec, spec_dir, [problem.key for problem in problems])
    return [*problems, *of_imports[0]], [*warnings, *of_imports[1]]


def _run_dir(spec: Spec) -> list[Problem]:
    if not (Path(spec.run.dir) / spec.run.name).exists():
        return []
    from rlctl.run_state import run_dir_warnings  # brings what reads checkpoints

    return run_dir_warnings(spec)


def check(
    spec_path: Path, overrides: Sequence[str], *, as_json: bool, strict: bool = False, level: Level | None = None
) -> int:
    """Print the findings; returns 0, or 2 when there are problems. `strict`: warnings are problems too. `level`: how
    far a spec without problems is probed."""
    findings = examine(spec_path, overrides)
    if level is not None:
        findings = _probed(findings, spec_path.absolute().parent, level)
    if strict:
        findings = replace(findings, problems=[*findings.problems, *findings.warnings], warnings=[])
    if as_json:
        print(json.dumps(as_dict(findings, spec_path), indent=2, ensure_ascii=False))
    else:
        _print(findings, spec_path)
    return 0 if findings.ok else SpecError.exit_code


def _probed(findings: Findings, spec_dir: Path, level: Level) -> Findings:
    """The findings with those of a probe; as they were where problems leave nothing to build."""
    from rich.console import Console

    from rlctl.probe import probe
    from rlctl.probe_report import probe_problems

    spec, plan = findings.spec, findings.plan
    if not findings.ok or spec is None or plan is None:
        return findings
    what = "building every role's model without memory" if level == "meta" else "one micro-step of every role"
    with Console(stderr=True).status(f"probe: {what} …"):
        found = probe(spec, spec_dir, plan, level)
    problems, warnings = probe_problems(spec, spec_dir, found)
    return replace(findings, problems=problems, warnings=[*findings.warnings, *warnings], probe=found)


# ── what the spec means ───────────────────────────────────────────────────────────────────────────


def as_dict(findings: Findings, spec_path: Path) -> dict[str, Any]:
    """The findings as JSON. `roles`, `seats` and `batch` are empty where the spec could not be read."""
    spec, plan, spec_dir = findings.spec, findings.plan, spec_path.absolute().parent
    listed = roles(spec, plan, spec_dir) if spec and plan else {}
    if spec and findings.probe:
        from rlctl.probe_report import probe_json

        for role, found in probe_json(spec, spec_dir, findings.probe).items():
            listed[role].update(found)
    return {
        "ok": findings.ok,
        "problems": [_problem(problem) for problem in findings.problems],
        "warnings": [_problem(problem) for problem in findings.warnings],
        "roles": listed,
        "probe": findings.probe.level if findings.probe else None,
        "seats": seats(spec) if spec and plan else {},
        "batch": batch(spec) if spec else {},
        "reference": reference(spec) if spec else {},
        "sync": dict(zip(("road", "why"), choose_road(spec), strict=True)) if spec else {},
    }


def _problem(problem: Problem) -> dict[str, str]:
    return {"key": problem.key, "value": problem.value, "message": problem.message, "hint": problem.hint}


def roles(spec: Spec, plan: Plan, spec_dir: Path) -> dict[str, dict[str, Any]]:
    """Role → where it runs and what it holds. The reward role holds the tokenizer, so it has a model but no engine."""
    return {role.role: _role(spec, plan, role.role, spec_dir) for role in plan.roles}


def _role(spec: Spec, plan: Plan, name: Any, spec_dir: Path) -> dict[str, Any]:
    placed = plan.role(name)
    holds_model = name != "reward"
    section: Any = spec.role(name)
    return {
        "model": str(resolve_model(spec.model_path(name), spec_dir)),
        "engine": section.engine.kind if holds_model else None,
        "dtype": (section.dtype or spec.actor.dtype) if holds_model else None,
        **attention_entry(spec, name, spec_dir),
        "launcher": placed.launcher,
        "processes": placed.processes,
        "nodes": placed.nodes,
        "devices": list(placed.devices),
        "threads": placed.threads,
        "python": placed.python,
        "versions": _versions(section, placed.python),
    }


def _versions(section: RoleSection, python: str) -> dict[str, str]:
    """What the role's own interpreter has installed, Python first; empty where the role runs in ours, or it did not
    answer."""
    if not section.python or (found := look_at(python)).failure:
        return {}
    return {"python": found.python, **{name: found.versions[name] for name in SHOWN if name in found.versions}}


def reference(spec: Spec) -> dict[str, Any]:
    """Whether the run needs a reference model, whether one is loaded, which, and why."""
    found = reference_of(spec)
    placed = spec.role("ref") if found.loaded else None
    return {
        "needed": found.needed,
        "loaded": found.loaded,
        "model": found.model,
        "why": found.why,
        "engine": placed.engine.kind if isinstance(placed, RefSection) else "",
        "devices": list(placed.devices) if placed else [],
    }


def seats(spec: Spec) -> dict[str, dict[str, Any]]:
    """Role → its mesh and the seat of every rank, for roles whose model is cut across ranks."""
    found: dict[str, dict[str, Any]] = {}
    for name in spec.roles:
        section = spec.role(name)
        mesh = mesh_of(section)
        if mesh is not None:
            listed = [asdict(seat) for group in seat_groups(section) for seat in group.seats]
            found[name] = {"replicate": mesh.replicate, "shard": mesh.shard, "seats": listed}
    return found


def batch(spec: Spec) -> dict[str, int]:
    """The arithmetic of a step and of the run."""
    algorithm, data = spec.algorithm, spec.data
    return {
        "prompts_per_step": data.prompts_per_step,
        "group_size": algorithm.group_size,
        "samples_per_step": spec.samples_per_step,
        "mini_batches_per_step": algorithm.mini_batches_per_step,
        "samples_per_mini_batch": spec.samples_per_step // algorithm.mini_batches_per_step,
        "epochs_per_step": algorithm.epochs_per_step,
        "steps": spec.run.steps,
        "optimizer_steps": spec.optimizer_steps,
        "max_sequence_tokens": spec.max_sequence_tokens,
        "max_tokens_per_step": spec.samples_per_step * spec.max_sequence_tokens,
        "micro_batch_tokens": spec.actor.micro_batch_tokens,
    }


# ── for the person ────────────────────────────────────────────────────────────────────────────────


def _print(findings: Findings, spec_path: Path) -> None:
    from rich.console import Console

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
    from rich.text import Text

    head, _, hint = str(problem).partition("\n  hint: ")
    console.print(Text.assemble((f"{word}:", f"bold {colour}"), f" {head}"), soft_wrap=True)
    if hint:
        console.print(Text.assemble("\n", ("hint:", "bold cyan"), f" {hint}"), soft_wrap=True)
    console.print()


def _roles_table(spec: Spec, plan: Plan, spec_dir: Path) -> Table:
    from rich.table import Table

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
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("role", "interpreter", "has"):
        table.add_column(column, overflow="fold")
    for name, role in roles(spec, plan, spec_dir).items():
        if spec.role(name).python:  # type: ignore[arg-type]
            packages = ", ".join(f"{package} {version}" for package, version in role["versions"].items())
            table.add_row(name, role["python"], packages or "–")
    return table


def _seats_table(spec: Spec) -> Table:
    from rich.table import Table

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
        f"run    {numbers['steps']} steps = {numbers['optimizer_steps']} optimizer steps\n"
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

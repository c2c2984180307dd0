"""`rlctl check-config`: what is wrong with a spec, and, of one that can be read, what it means. Creates and changes
nothing. The printing is in `rlctl/check_print.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.check_meaning import batch, reference, roles, seats
from rlctl.plan import Plan, make_plan
from specs.errors import Problem, SpecError
from specs.load import parse, read_toml
from specs.reward_terms import Function
from specs.road_rules import choose_road
from specs.rules import cross_field_warnings, file_problems
from specs.schema import Spec

if TYPE_CHECKING:
    from rlctl.probe import Probe
    from specs.probed import Level


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
        from rlctl.check_print import print_findings

        print_findings(findings, spec_path)
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

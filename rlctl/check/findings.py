"""Examine a spec: problems, warnings, and, of a spec that can be read, the spec and its placement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.check.environments import TriedEnvironment, try_environments
from rlctl.check.own_functions import RewardCall, call_functions
from rlctl.memory.fit import fit_problems
from rlctl.preflight.data_files import first_row
from rlctl.processes.placement import Plan, make_plan
from rlctl.run.run_exports import checked
from rlctl.show.text_format import counted
from specs.errors import NotHere, Problem, SpecError
from specs.load.load import parse
from specs.load.toml_file import read_toml
from specs.rules.all_rules import cross_field_warnings
from specs.schema.recipes import RowsSpec
from specs.schema.spec import Spec
from workers.data.first_rows import FirstRows

if TYPE_CHECKING:
    from rlctl.check.meta_build import ProbeFindings


@dataclass(frozen=True)
class Findings:
    """Hold what checking found. `spec` and `plan` are None where the problems left none to look at, `probe` also where
    none was asked for; `notes` say what of the file, or of this machine, the run does not depend on."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    spec: Spec | None = None
    plan: Plan | None = None
    probe: ProbeFindings | None = None
    calls: Sequence[RewardCall] = ()  # of reward functions
    environments: Sequence[TriedEnvironment] = ()
    rows: FirstRows = field(default_factory=FirstRows)  # that are learned from
    elsewhere: bool = False  # the run is for another machine than this

    @property
    def ok(self) -> bool:
        return not self.problems

    def __repr__(self) -> str:
        """Return what a notebook shows."""
        shown = [f"error: {one}" for one in self.problems] + [f"warning: {one}" for one in self.warnings]
        return "\n".join([*shown, "ok" if self.ok else counted(len(self.problems), "problem")])


def examine(spec_path: Path, overrides: Sequence[str], *, elsewhere: bool = False) -> Findings:
    """Load a spec, look at the files it names, and plan it. `elsewhere`: the run is for another machine than this."""
    try:
        parsed = parse(read_toml(spec_path), overrides)
    except SpecError as error:
        return Findings(error.problems, elsewhere=elsewhere)
    spec, spec_dir = parsed.spec, spec_path.absolute().parent
    notes = list(parsed.dropped)
    if spec is None:
        return Findings(parsed.problems, notes=notes, elsewhere=elsewhere)
    spec, problems, warnings = checked(spec, spec_dir, elsewhere=elsewhere)
    lacking = [one for one in warnings if isinstance(one, NotHere)]
    known = {problem.key for problem in [*problems, *lacking]}
    broken, failed, calls = call_functions(spec, spec_dir, known)
    unusable, doubtful, environments = try_environments(spec, spec_dir, known)
    problems = [*problems, *broken, *unusable]
    if elsewhere:
        warnings, notes = notes_of(warnings, notes)
    if parsed.problems:  # the rest is looked at all the same, so that everything comes at once
        return Findings([*parsed.problems, *parsed.more(problems)], [], notes, elsewhere=elsewhere)
    too_large, tight = fit_problems(spec, spec_dir, here=not elsewhere)
    warnings = [*cross_field_warnings(spec), *warnings, *failed, *doubtful, *tight]
    rows = first_row(spec, spec_dir) if isinstance(spec, RowsSpec) and not problems else FirstRows()
    if spec.run.place.exists():
        from rlctl.run.run_dir import run_dir_warnings  # brings what reads checkpoints

        warnings += run_dir_warnings(spec)
    plan = None
    try:
        plan = make_plan(spec, spec_dir)
    except SpecError as error:
        problems += [problem for problem in error.problems if problem not in problems]
    found = Findings([*problems, *too_large], warnings, notes, spec, plan, elsewhere=elsewhere)
    return replace(found, calls=calls, environments=environments, rows=rows)


def notes_of(problems: Iterable[Problem], notes: list[str]) -> tuple[list[Problem], list[str]]:
    """Make notes of what this machine lacks for a run on another one: there is nothing to do about it here. Return the
    other problems, and the notes."""
    found = list(problems)
    lacking = [f"not on this machine: {replace(one, hint='')}" for one in found if isinstance(one, NotHere)]
    return [one for one in found if not isinstance(one, NotHere)], [*notes, *lacking]

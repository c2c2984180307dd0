"""What checking a spec finds: problems, warnings, and, of a spec that can be read, the spec and its placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.memory.fit import fit_problems
from rlctl.preflight.file_problems import file_problems
from rlctl.processes.placement import Plan, make_plan
from rlctl.show.text_format import counted
from specs.errors import Problem, SpecError
from specs.load.load import parse
from specs.load.toml_file import read_toml
from specs.rules.all_rules import cross_field_warnings
from specs.schema.rewards import Function
from specs.schema.spec import Spec

if TYPE_CHECKING:
    from rlctl.check.meta_build import Probe
    from rlctl.check.reward_calls import RewardCall


@dataclass(frozen=True)
class Findings:
    """What checking found. `spec` and `plan` are None where the problems left none to look at, `probe` also where none
    was asked for."""

    problems: list[Problem]
    warnings: list[Problem]
    spec: Spec | None = None
    plan: Plan | None = None
    probe: Probe | None = None
    calls: Sequence[RewardCall] = ()  # of reward functions
    notes: Sequence[str] = ()  # what of the file does not hold with these overrides
    elsewhere: bool = False  # the run is for another machine than this

    @property
    def ok(self) -> bool:
        return not self.problems

    def __repr__(self) -> str:
        """What a notebook shows."""
        told = [f"{word}: {one}" for word, of in (("error", self.problems), ("warning", self.warnings)) for one in of]
        return "\n".join([*told, "ok" if self.ok else counted(len(self.problems), "problem")])


def examine(spec_path: Path, overrides: Sequence[str], *, elsewhere: bool = False) -> Findings:
    """Load a spec, look at the files it names, and plan it. `elsewhere`: the run is for another machine than this."""
    try:
        parsed = parse(read_toml(spec_path), overrides)
    except SpecError as error:
        return Findings(error.problems, [], elsewhere=elsewhere)
    spec, spec_dir = parsed.spec, spec_path.absolute().parent
    notes = [str(dropped) for dropped in parsed.dropped]
    if spec is None:
        return Findings(parsed.problems, [], notes=notes, elsewhere=elsewhere)
    of_here: list[Problem] = []  # what this machine lacks, and the run may have
    problems, warnings, calls = _look_up(spec, spec_dir, elsewhere, of_here)
    notes += [not_here(problem) for problem in of_here]
    if parsed.problems:  # the rest is looked at all the same, so that everything comes at once
        return Findings([*parsed.problems, *parsed.more(problems)], [], notes=notes, elsewhere=elsewhere)
    too_large, tight = fit_problems(spec, spec_dir, here=not elsewhere)
    problems += too_large
    warnings = [*cross_field_warnings(spec), *warnings, *tight, *_run_dir(spec)]
    try:
        plan = make_plan(spec, spec_dir, elsewhere=elsewhere)
    except SpecError as error:
        more = [problem for problem in error.problems if problem not in problems]
        return Findings([*problems, *more], warnings, spec, notes=notes, calls=calls, elsewhere=elsewhere)
    return Findings(problems, warnings, spec, plan, notes=notes, calls=calls, elsewhere=elsewhere)


def not_here(problem: Problem) -> str:
    """A note of what this machine lacks for a run on another one: there is nothing to do about it here."""
    return f"not on this machine: {replace(problem, hint='')}"


def _look_up(
    spec: Spec, spec_dir: Path, elsewhere: bool, of_here: list[Problem]
) -> tuple[list[Problem], list[Problem], list[RewardCall]]:
    """Return errors and warnings about what the spec names; functions of the user's are called, in processes of their
    own."""
    problems, warnings = file_problems(spec, spec_dir, elsewhere=elsewhere, notes=of_here if elsewhere else None)
    known = {problem.key for problem in [*problems, *of_here]}
    if spec.algorithm.own_functions:
        from rlctl.check.own_functions import own_function_failures

        problems += own_function_failures(spec, spec_dir, known)
    if not any(isinstance(term, Function) for term in spec.reward.terms):
        return problems, warnings, []
    from rlctl.check.reward_calls import call_rewards

    errors, of_calls, calls = call_rewards(spec, spec_dir, known)
    return [*problems, *errors], [*warnings, *of_calls], calls


def _run_dir(spec: Spec) -> list[Problem]:
    if not spec.run.place.exists():
        return []
    from rlctl.run.run_dir import run_dir_warnings  # brings what reads checkpoints

    return run_dir_warnings(spec)

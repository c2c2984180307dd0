"""Say what is wrong with a spec, and, of one that can be read, what it means (`rlctl check-config`). Creates and
changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlctl.check.findings import Findings, examine, notes_of
from rlctl.check.meaning import as_dict
from rlctl.processes.placement import Plan
from specs.errors import SpecError
from specs.schema.spec import Spec
from specs.terminal import json_text


def check(
    spec_path: Path,
    overrides: Sequence[str],
    *,
    as_json: bool,
    strict: bool = False,
    elsewhere: bool = False,
    probed: bool = False,
) -> int:
    """Print the findings; return 0, or 2 when there are problems. `strict`: warnings are problems too. `elsewhere`:
    the run is for another machine. `probed`: a spec without problems is probed too."""
    findings = examine(spec_path, overrides, elsewhere=elsewhere)
    if probed and findings.ok and findings.spec is not None and findings.plan is not None:
        findings = _probed(findings, findings.spec, findings.plan, spec_path.absolute().parent)
    if strict:
        findings = replace(findings, problems=[*findings.problems, *findings.warnings], warnings=[])
    meaning = as_dict(findings, spec_path)
    if as_json:
        print(json_text(meaning, indent=2))
    else:
        from rlctl.check.tables import print_findings

        print_findings(findings, meaning, spec_path)
    return 0 if findings.ok else SpecError.exit_code


def _probed(findings: Findings, spec: Spec, plan: Plan, spec_dir: Path) -> Findings:
    """Return the findings with those of a probe."""
    from rlctl.check.meta_build import probe
    from rlctl.check.meta_report import probe_problems
    from rlctl.preflight.judge_address import address_problems
    from rlctl.show.screen import Screen

    if problems := address_problems(spec):
        return replace(findings, problems=problems)
    with Screen(stderr=True).status("probe: building every role's model without memory …"):
        found = probe(spec, spec_dir, plan)
    problems, warnings = probe_problems(spec, found)
    notes = findings.notes
    if findings.elsewhere:
        problems, notes = notes_of(problems, notes)
        warnings, notes = notes_of(warnings, notes)
    known = {(problem.key, problem.message) for problem in findings.warnings}
    new = [problem for problem in warnings if (problem.key, problem.message) not in known]
    return replace(findings, problems=problems, warnings=[*findings.warnings, *new], notes=notes, probe=found)

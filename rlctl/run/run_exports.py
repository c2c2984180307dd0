"""Begin with the weights of another run: `model.path = "runs/warm"`, or `"runs/warm@120"`; so any model of a spec.

A run stands for its newest checkpoint with a proof. In the spec its path becomes that of the checkpoint's export, which
the start of a run makes where it is missing. `resolved.json` keeps that path: a resume begins with the same weights,
whatever the other run has saved since.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

from rlctl.models.run_export import FOLDER, RunExport
from rlctl.preflight.file_problems import file_problems
from rlctl.run.checkpoints import manifests, run_and_step
from rlctl.run.run_lock import LOCK
from rlctl.show.journal import read_journal
from rlctl.show.screen import Screen
from specs.errors import Problem, UsageError
from specs.json_file import read_or_empty
from specs.load.dotted_keys import value_at
from specs.schema.engines.engine_registry import own_kinds
from specs.schema.roles import ACTOR, CRITIC, REF, REWARD_MODEL, ROLES
from specs.schema.spec import Spec
from specs.text import show

S = TypeVar("S", bound=Spec)

# Whose weights a role takes of a run, the first that learned there. One that learns makes a head where there is none.
_ACTORS, _SCORERS = (ACTOR,), (REWARD_MODEL, CRITIC)
_WANTED = {REF: _ACTORS, CRITIC: (CRITIC, REWARD_MODEL, ACTOR), REWARD_MODEL: _SCORERS}


def with_run_exports(spec: S, spec_dir: Path, first: Path | None = None) -> tuple[S, list[Problem]]:
    """Return the spec with exports in place of the runs that it names as models, and which runs cannot be one.
    `first`: the directory of the run that is resumed or forked, which goes on with what its first attempt took."""
    taken = read_or_empty(first / "resolved.json") if first else {}
    journal = read_journal(first) if first else []
    folders = [spec_dir, *(Path(line["spec_dir"]) for line in journal if "spec_dir" in line)]  # where paths in it start
    problems = []
    for section, key in (("model", "path"), *((role, "model") for role, _ in spec.sections())):
        table = getattr(spec, section)
        if not (named := getattr(table, key, "")):
            continue
        run, step = run_and_step(named, spec_dir)
        path, before = named.removesuffix(f"@{step}"), RunExport.of(str(value_at(taken, (section, key))))
        was = [run_and_step(str(before.run), folder)[0] for folder in folders] if before else []
        if before and run in was and step in (None, before.step):
            chosen: RunExport | Problem = before
        elif not (run / "resolved.json").is_file():
            continue
        else:
            chosen = _choose(spec, section, f"{section}.{key}", run, step, named)
        if isinstance(chosen, Problem):
            problems.append(chosen)
            continue
        if section == "model" and spec.model.from_scratch:
            message = f"draws random weights, and {path} has trained ones"
            problems.append(Problem("model.from_scratch", message, "set it to false, or name the first model", "true"))
        update = {key: os.path.join(path, FOLDER, chosen.folder.name)}
        spec = spec.model_copy(update={section: table.model_copy(update=update)})
    return spec, problems


def checked(
    spec: S, spec_dir: Path, first: Path | None = None, **options: Any
) -> tuple[S, list[Problem], list[Problem]]:
    """Return the spec `with_run_exports`, and errors and warnings about all that it names (`file_problems`)."""
    spec, wrong = with_run_exports(spec, spec_dir, first)
    errors, warnings = file_problems(spec, spec_dir, **options)
    keys = {problem.key for problem in wrong}
    return spec, [*wrong, *(error for error in errors if error.key not in keys)], warnings


def _choose(spec: Spec, section: str, key: str, run: Path, step: int | None, named: str) -> RunExport | Problem:
    wanted = _WANTED.get(section, _ACTORS)
    if spec.lead == REWARD_MODEL:  # it learns
        wanted = (*_ACTORS, *_SCORERS) if section == "model" else (*_SCORERS, *_ACTORS)
    exported = [RunExport(run, role, step) for role in wanted] if step is not None else []
    if there := [export for export in exported if export.folder.is_dir()]:
        return there[0]
    saved = manifests(run / "checkpoints")
    proven = [number for number, manifest in saved.items() if manifest.get("proven") and step in (None, number)]
    listed = ", ".join(map(str, saved))
    if not saved:
        return Problem(key, "this run has no checkpoint", "train it until its first checkpoint.every", show(named))
    if step is not None and step not in saved:
        return Problem(key, f"the run has no checkpoint of step {step}", f"it has: {listed}", show(named))
    if not proven:
        message = "its checkpoints were saved without the proof that an export must repeat"
        return Problem(key, message, "resume that run, and use what it saves next", show(named))
    manifest = saved[proven[-1]]
    if getattr(own_kinds("train").get(str(manifest.get("engine"))), "model_of", "") == "bigram":
        return Problem(key, "its engine is fake: there is no model", "name a run that trained a model", show(named))
    learners = [role for role in ROLES if value_at(manifest, ("roles", role)) is not None]
    role = next((role for role in wanted if role in learners), None)
    if role is None:
        has = ", ".join(ROLES[role].title for role in learners) or "nothing"
        hint = f"name a run that trained {ROLES[wanted[0]].title}"
        return Problem(key, f"this run trained {has}, not {ROLES[wanted[0]].title}", hint, show(named))
    return RunExport(run, role, proven[-1])


def export_missing(spec: Spec, spec_dir: Path, screen: Screen | None = None) -> None:
    """Export the checkpoints that the run's roles begin with, where that is not done, and show it on `screen`. Raises
    CheckpointError, ExportError or UsageError."""
    for path in dict.fromkeys(map(spec.model_path, spec.roles)):
        found = RunExport.of(os.path.abspath(spec_dir / Path(path).expanduser()))
        if found is None or found.folder.is_dir():
            continue
        from filelock import FileLock  # brings asyncio

        from rlctl.run.export import export

        try:
            found.folder.parent.mkdir(exist_ok=True)
            with FileLock(found.folder.parent / LOCK):  # another run may begin with the same
                if not found.folder.is_dir():
                    export(found.run, found.folder, found.step, found.role, screen=screen)
        except OSError as error:
            message = f"{found.folder.parent} cannot be written to: {error.strerror}"
            raise UsageError(message, hint=found.way_out) from None

"""Find where a run comes from: the spec that it was started with, and the run that it was forked from."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rlctl.models.as_built_check import read_starting_weights
from rlctl.run import checkpoints
from rlctl.run.resume import check_fits, held_out
from rlctl.show.journal import read_journal
from specs.errors import CheckpointError, Problem, RunDirError, UsageError
from specs.json_file import read_object, read_or_empty, write_object
from specs.load.dotted_keys import value_at
from specs.schema.recipes import RlSpec
from specs.schema.roles import RoleName
from specs.schema.sections import same_source
from specs.schema.spec import Spec
from workers.saved_files import mark

FORKED_FROM = "forked_from.json"
REF_LOGPROBS = "ref_logprobs.safetensors"  # of a reference that is computed once


def read_own(file: Path, **kinds: Any) -> dict[str, Any]:
    """Read what an attempt wrote, which has keys of these types. Raises RunDirError."""
    try:
        found = read_object(file)
        for key, kind in kinds.items():
            if key not in found:
                raise ValueError(f"has no {key}")
            try:
                TypeAdapter(kind).validate_python(found[key], strict=True)
            except ValidationError:
                raise ValueError(f"has another {key} than rlctl writes") from None
    except ValueError as error:
        raise RunDirError(f"{file} {error}", hint=f"put it back from a copy; {checkpoints.START_OVER}") from None
    return found


@dataclass(frozen=True)
class SpecSource:
    """Name the file that a run's spec is read from, and where relative paths in it start."""

    path: Path
    folder: Path
    run_dir: Path | None = None  # of the run whose spec it is

    def explained(self, errors: Sequence[Problem]) -> list[Problem]:
        """Return them, behind the one that may be the cause of all: the folder of a run's spec is gone."""
        if self.run_dir is None or self.folder.is_dir():
            return list(errors)
        message = f"relative paths in {self.path} start at {self.folder}, which is not there"
        return [Problem("", message, _name_the_spec(self.run_dir)), *errors]


def _name_the_spec(run: Path) -> str:
    quoted = shlex.quote(str(run))
    commands = f"rlctl train SPEC --run-dir {quoted} --resume, or rlctl eval {quoted} SPEC"
    return f"name the spec: {commands}, with the --set that the run was started with"


def spec_source(named: Path, *, resume: bool) -> SpecSource:
    """Find the spec in a file, or, at a resume, in a run directory: that of its newest attempt. Raises UsageError or
    RunDirError."""
    if named.is_fifo():  # such as a shell's <(…), which can be read once
        kept = Path(tempfile.mkdtemp(prefix="rlctl-spec-"), "spec.toml")
        atexit.register(shutil.rmtree, kept.parent, ignore_errors=True)
        kept.write_bytes(named.read_bytes())
        return SpecSource(kept, named.absolute().parent)
    if not (named / "resolved.json").is_file():
        return SpecSource(named, named.absolute().parent)
    run_dir = named.absolute()
    if not resume:
        begins = f"rlctl train SPEC --from {shlex.quote(str(named))}"
        hint = f"add --resume to continue it; `{begins}` begins another with its weights"
        raise UsageError(f"{named}: the directory of a run, not a spec", hint=hint)
    starts = [line for line in read_journal(run_dir) if line["event"] == "start"]
    folder, copy = (str(starts[-1].get(key, "")) for key in ("spec_dir", "copy")) if starts else ("", "")
    if not folder or not (run_dir / copy).is_file():
        raise RunDirError(f"{run_dir} does not say where its spec came from", hint=_name_the_spec(named))
    return SpecSource(run_dir / copy, Path(folder), run_dir)


@dataclass(frozen=True)
class Fork:
    """Name a checkpoint of another run that a run begins with."""

    run: Path
    step: int

    def write(self, run_dir: Path) -> None:
        """Note it in a run's directory, which has the log-probs of the other's reference too, if that kept any."""
        if (self.run / REF_LOGPROBS).is_file():
            shutil.copyfile(self.run / REF_LOGPROBS, run_dir / REF_LOGPROBS)
        write_object(run_dir / FORKED_FROM, {"run": str(self.run), "step": self.step})

    @staticmethod
    def of(run_dir: Path) -> Fork | None:
        """Return what a run was forked from, if it was."""
        if not (run_dir / FORKED_FROM).exists():
            return None
        found = read_own(run_dir / FORKED_FROM, run=str, step=int)
        return Fork(Path(found["run"]), found["step"])

    def checkpoint(self, spec: Spec, spec_dir: Path) -> checkpoints.Checkpoint:
        """Open it. Raises CheckpointError where it is gone, damaged or of another model."""
        found = checkpoints.read(checkpoints.step_path(self.run / "checkpoints", self.step), saved_roles(spec))
        check_fits(found.manifest, spec, spec_dir)
        return found


def fork_from(text: str, spec: Spec, warn: Callable[[str], None]) -> Fork:
    """Find what `--from RUN_DIR[@STEP]` names: that checkpoint, or the newest whole one. Raises UsageError or
    CheckpointError."""
    (run, step), option = checkpoints.run_and_step(text), f"--from {text}: "
    if not (run / "resolved.json").is_file():
        raise UsageError(f"{option}{run} holds no run", hint="name a run directory: --from RUN_DIR or RUN_DIR@STEP")
    recipe = value_at(read_own(run / "resolved.json"), "run.recipe", "rl")
    if spec.needs_ref and not spec.own_ref_model and recipe != spec.run.recipe:
        message = f"{option}that run's recipe is {recipe}, and the reference here would not be the model that it made"
        raise UsageError(message, hint=f'begin a new run with its weights: --set model.path="{run}"')
    if step is not None:
        checkpoints.check_has(run / "checkpoints", step, option)
    else:
        found = checkpoints.newest(run / "checkpoints", warn, saved_roles(spec))
        if found is None:
            raise CheckpointError(f"{option}{run} has no checkpoint", hint="its checkpoint.every says when it saves")
        found.pin.release()
        step = found.step
    if spec.run.steps <= step:
        hint = f"steps are counted on from there: raise run.steps above {step}, e.g. --set run.steps={2 * step}"
        raise UsageError(f"{option}that is step {step}, and run.steps = {spec.run.steps}", hint=hint)
    return Fork(run, step)


def check_same_base(spec: Spec, as_built: Path, checkpoint: checkpoints.Checkpoint) -> None:
    """Raise CheckpointError where a checkpoint's adapters learned beside other weights than its roles have here."""
    theirs = read_starting_weights(checkpoint.path.parents[1] / as_built.name)
    here = read_starting_weights(as_built)
    for role, _ in spec.adapters():
        same_dtype = checkpoint.manifest["roles"][role]["dtype"] == spec.dtype(role)
        if same_dtype and theirs.get(role, here[role]) != here[role]:
            message = f"{checkpoint.path}: the {role}'s adapters learned beside other weights than those at"
            raise CheckpointError(f"{message} {spec.model_path(role)}", hint="name the model that its run began with")


def saved_roles(spec: Spec) -> list[RoleName]:
    """Return the roles that have a state: each has a folder of its name in a checkpoint."""
    return [role for role in spec.roles if spec.learns(role)]


def check_held_out(run_dir: Path, spec: Spec, folder: Path) -> None:
    """Raise UsageError where rows that the run trained on would count as held out: the last of the first source, whose
    relative path starts at `folder`."""
    own, now = read_own(run_dir / "resolved.json"), held_out(spec.resolved())
    if not now or not any(same := _same_sources(run_dir, own, spec, folder)):
        return
    apart = held_out(own) if same[0] else 0  # the run held out the last rows of its first source
    if now > apart:
        but = f" but {apart}" if apart else ""
        message = f"the last {now} rows of data.train would be evaluated on, but the run trained on all{but}"
        key = "eval.prompts" if isinstance(spec, RlSpec) else "eval.rows"
        fewer = f"set {key} to {apart} or less, or " if apart else ""
        raise UsageError(message, hint=f"{fewer}name other rows in eval.data")
    most, before = spec.data.max_rows, value_at(own, "data.max_rows")
    if most is not None and (before is None or most - now < before - apart):
        message = f"data.max_rows = {most}: the last {now} of these rows are not those that the run held out"
        raise UsageError(message, hint="leave the key as the run had it, or name other rows in eval.data")


def _same_sources(run_dir: Path, own: Mapping[str, Any], spec: Spec, folder: Path) -> list[bool]:
    """Return for each source that a run trained on whether it is the first one of `spec`, by its name or by what its
    file holds."""
    first = next(iter(spec.data.named.values()))
    sets = value_at(own, "data.sets") or ()
    trained = {f"data.sets.{number}.path": one["path"] for number, one in enumerate(sets)}
    trained = trained or {"data.train": value_at(own, "data.train", first)}
    file, marks = folder / Path(first).expanduser(), read_or_empty(run_dir / "inputs.json").get("files", {})
    here = mark(file) if file.is_file() and os.access(file, os.R_OK) else None
    return [same_source(first, path) or here in marks.get(key, {}).values() for key, path in trained.items()]

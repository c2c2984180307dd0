"""Functions of the user's, called once as a run would: rewards on the first row, by the code that grades, an advantage
and a loss on a tiny batch, each in a process of the interpreter that calls it in a run.

The file is the user's: it may print, hang, exit or crash. What it prints is lost, no bytecode is left behind, and
everything that it started ends with it.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from rlctl.preflight.interpreters import own_path
from specs.errors import DataError, Problem, RewardError
from specs.packages import path_for
from specs.rules.all_rules import with_values
from specs.schema.recipes import RlSpec, SamplingSpec, sampling_of
from specs.schema.rewards import Function
from specs.schema.role_section import LearningRole
from specs.schema.row_values import gold_answer
from specs.schema.rows import RowsSection
from specs.schema.sections import DataSection, is_hub_data
from specs.schema.spec import Spec
from workers.data.prompts import prompt_of
from workers.data.row_source import DataRow, read_rows
from workers.grading.pool import GraderPool
from workers.grading.reward_failures import is_of_code, last_line
from workers.grading.terms import GradeRequest, Setting
from workers.watchdog import kill_marked

IMPORT_TIMEOUT_S = 120.0  # as in a run
TIMEOUT_S = 60.0  # torch is imported for a loss
_MARK = "RLCTL_CHECK"
_KILL_S = 5.0


@dataclass(frozen=True)
class RewardCall:
    """One call of a reward function. `row`: its file and line; `completion`: the row's own answer, empty where it has
    none; `traceback`: its end, where there is no score."""

    path: str
    row: str
    completion: str
    score: float | None
    traceback: str


def call_functions(
    spec: Spec, spec_dir: Path, known: Collection[str] = ()
) -> tuple[list[Problem], list[Problem], list[RewardCall]]:
    """Call each function; return errors, warnings, and the calls of rewards. What code alone can mend is an error. Keys
    in `known` have been found wrong already."""
    errors: list[Problem] = []
    warnings: list[Problem] = []
    calls: list[RewardCall] = []
    for key, path in spec.own_functions.items():
        which = key.rpartition(".")[2].partition("_")[0]
        if key not in known and (wrong := _wrong(spec.lead_section, spec_dir, which, path)):
            errors.append(Problem(key, *wrong))
    terms = {f"reward.terms.{n}.path": one for n, one in enumerate(spec.reward_terms) if isinstance(one, Function)}
    terms = {key: term for key, term in terms.items() if not {key, "reward.python"} & set(known)}
    sampling = sampling_of(spec) if terms else None
    if sampling is None:
        return with_values(spec, errors), warnings, calls
    row = next(readable_rows(sampling, spec_dir, 1), None)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlctl-check-")))
        importing = {key: stack.enter_context(_pool(sampling, spec_dir, term, folder)) for key, term in terms.items()}
        for key, pool in importing.items():
            try:
                pool.wait_ready()
            except RewardError as error:
                errors.append(Problem(key, error.message, error.hint))
                continue
            if row is None:
                continue
            call, cause = _call(sampling, terms[key].path, pool, row)
            calls.append(call)
            if cause:
                name = call.path.rpartition(":")[2]
                why = f"{name}, called with the first row, gives no score: {last_line(call.traceback)}"
                found = errors if is_of_code(cause, call.traceback) else warnings
                found.append(Problem(key, why, f"see {row.where}"))
    return with_values(spec, errors), with_values(spec, warnings), calls


def run_offline(
    command: Sequence[str], own: Mapping[str, str], timeout_s: float, given: bytes = b""
) -> tuple[bytes, str]:
    """Run a process that tries code of the user's, with the variables of this one and a role's own; all that it started
    ends with it. Return its output, and how it ended, which is said where it does not say all that it should."""
    mark = secrets.token_hex(8)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RLCTL_")} | {**own, _MARK: mark}
    with tempfile.TemporaryDirectory(prefix="rlctl-check-", ignore_cleanup_errors=True) as folder:
        env["PYTHONPATH"] = path_for(command[0], env.get("PYTHONPATH", ""), Path(folder))
        try:
            done = subprocess.run(command, env=env, input=given, capture_output=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as late:
            return late.stdout or b"", f"does not end within {timeout_s:g} s"
        except OSError as error:
            return b"", f"cannot be tried with {command[0]}: {error.strerror}"
        finally:
            kill_marked(f"{_MARK}={mark}", _KILL_S)
    last = "".join(done.stderr.decode(errors="replace").strip().splitlines()[-1:])
    return done.stdout, f"trying it ended the process (status {done.returncode}) {last}"


# ── an advantage, a loss ──────────────────────────────────────────────────────────────────────────


def _wrong(actor: LearningRole, spec_dir: Path, which: str, path: str) -> tuple[str, str] | None:
    """Return what is wrong with it, and a hint."""
    env = actor.env if which == "loss" else {}
    python = (own_path(actor, spec_dir) if which == "loss" else "") or sys.executable
    file = str(spec_dir / Path(path).expanduser())
    command = [python, "-B", "-P", "-m", "workers.offline.call_own_function", which, file]
    output, how = run_offline(command, env, TIMEOUT_S)
    with suppress(ValueError, IndexError):
        reply = json.loads(output.splitlines()[-1])
        return (reply["error"], reply["hint"]) if reply else None
    return how, f"call it with {python} to see why; a run calls it in every step"


# ── rewards ───────────────────────────────────────────────────────────────────────────────────────


def _call(spec: SamplingSpec, path: str, pool: GraderPool, row: DataRow) -> tuple[RewardCall, str]:
    """Call one function with the row's own answer; return what came of it, and why there is no score."""
    answer = row.values.get(spec.answer_column)
    completion = "" if answer is None else gold_answer(answer)
    prompt = _prompt(row, spec.data)
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    episode = {"messages": messages, "stop": "completed", "reward": 0.0, "why": ""} if spec.environments else None
    (grade,) = pool.grade([GradeRequest(0, prompt, row.values, completion, 1, episode=episode)])
    score = grade.values[0] if grade.values else None
    return RewardCall(path, row.where, completion, score, grade.text), grade.cause


def _pool(spec: SamplingSpec, spec_dir: Path, term: Function, folder: Path) -> GraderPool:
    """Start the process that imports one function; `folder` is a temporary one."""
    python, env = own_path(spec.grading, spec_dir) or sys.executable, spec.grading.env
    path = path_for(python, env.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")), folder)
    return GraderPool(
        [term.model_dump(mode="json")],
        Setting(spec.answer_column, spec.max_response_tokens, str(spec_dir)),
        workers=1,
        timeout_s=spec.grading.timeout_s,
        log_path=Path(os.devnull),
        start_timeout_s=IMPORT_TIMEOUT_S,
        labels=("",),
        python=python,
        env={**env, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": path},
    )


def readable_rows(spec: SamplingSpec, spec_dir: Path, most: int) -> Iterator[DataRow]:
    """Yield the first rows that completions are graded with, up to `most` of each source that can be read. Nothing is
    downloaded."""
    trained_on, evaluated = [*spec.data.named.values()], [one.data for one in spec.evaluations if one.data]
    for source in [*trained_on, *evaluated] if isinstance(spec, RlSpec) else [*evaluated, *trained_on]:
        if not is_hub_data(source):
            with suppress(DataError):
                yield from (row for row in read_rows(source, split="", base=spec_dir, max_rows=most) if not row.problem)


def _prompt(row: DataRow, section: DataSection | RowsSection) -> str:
    """Return the row's prompt before any chat template; of messages, their texts."""
    with suppress(LookupError, ValueError):
        if isinstance(section, DataSection):
            prompt = prompt_of(row.values, section)
        else:
            prompt = row.values[section.prompt_column]
        messages = prompt if isinstance(prompt, list) else []
        texts = "\n".join(str(one.get("content", "")) for one in messages if isinstance(one, dict))
        return prompt if isinstance(prompt, str) else texts
    return ""

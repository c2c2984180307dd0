"""Reward functions, imported and called as a run would do it: in a process of their own, by the very code that grades.
Each is called for the first row of the data, with the row's own answer and with an empty completion.

The file is the person's: it may print, hang, exit or crash. What it writes to its output is lost, no bytecode is left
behind, and everything that it started ends with it.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlctl.preflight.first_row import first_rows, row_columns
from rlctl.preflight.interpreters import own_path
from rlctl.processes.placement import package_root
from specs.errors import Problem
from specs.schema.rewards import Function
from specs.schema.row_values import gold_answer
from specs.schema.spec import Spec
from specs.templates import render_template
from specs.text import show
from workers.data.row_source import DataRow
from workers.grading.grader_process import encode
from workers.grading.reward_failures import is_of_code, last_line
from workers.grading.signatures import ALL_COLUMNS, OF_A_SAMPLE
from workers.grading.terms import Setting
from workers.watchdog import kill_marked

TIMEOUT_S = 20.0
CALL_S = 5.0  # for a call: it may be slow, and then a probe says so
MARK = "RLCTL_CHECK"  # in the environment of what a check starts, and of all that this starts in turn
_KILL_S = 5.0


@dataclass(frozen=True)
class Tried:
    """A reward function as it was called. `given`: parameter → what it gets. `own_answer`, `empty`: what it gave for
    the first row's own answer and for an empty completion, None where there was no row or no number in time."""

    key: str
    path: str
    given: Mapping[str, str]
    own_answer: float | None = None
    empty: float | None = None


def try_functions(
    spec: Spec, spec_dir: Path, known: Collection[str] = ()
) -> tuple[list[Problem], list[Problem], list[Tried]]:
    """(errors, warnings, calls) of importing the reward functions and calling them; keys in `known` have been found
    wrong already."""
    started: list[_Importing] = []
    errors, warnings, tried = [], [], []
    row = next(iter(first_rows(spec, spec_dir)), None)
    try:
        for index, term in enumerate(spec.reward.terms):
            key = f"reward.terms.{index}.path"
            if isinstance(term, Function) and not {key, "reward.python"} & set(known):
                started.append(_start(spec, spec_dir, key, term, row))
        for one in started:
            try:
                said = _said(one.process)
            except subprocess.TimeoutExpired:
                hint = "a run gives it longer; load what is large when score is first called"
                warnings.append(Problem(one.key, f"still being imported after {TIMEOUT_S:g} s", hint, show(one.path)))
                continue
            if isinstance(said, tuple):
                errors.append(Problem(one.key, *said, show(one.path)))
                continue
            call, problem = _called(one, said, row)
            tried.append(call)
            errors += [problem] if problem else []
            if said and not problem and not {OF_A_SAMPLE["completion"], ALL_COLUMNS} & set(said.values()):
                message = f"{one.path.rpartition(':')[2]} is not given the completion: its score does not depend on it"
                hint = "let it take completion, or leave the term out"
                warnings.append(Problem(one.key, message, hint, show(one.path)))
    finally:
        for one in started:
            _end(one)
    return errors, warnings, tried


def _called(one: _Importing, given: Mapping[str, str], row: DataRow | None) -> tuple[Tried, Problem | None]:
    """What its two calls gave; a problem where both fail of the code."""
    call = Tried(one.key, one.path, given)
    if row is None:
        return call, None
    lines = []
    with suppress(subprocess.TimeoutExpired, ValueError):
        for _ in range(2):
            lines.append(json.loads(_next_line(one.process, CALL_S)))
    failed = [line for line in lines if "t" not in line]
    if len(failed) == 2 and all(is_of_code(str(line["cause"]), str(line["text"])) for line in failed):
        name = one.path.rpartition(":")[2]
        last = last_line(str(failed[0]["text"]))
        hint = f"call it with the row of {row.where}"
        return call, Problem(
            one.key, f"{name}, called with the first row, gives no score: {last}", hint, show(one.path)
        )
    numbers = [line["t"][0] if "t" in line else None for line in lines] + [None] * (2 - len(lines))
    return replace(call, own_answer=numbers[0], empty=numbers[1]), None


@dataclass(frozen=True)
class _Importing:
    """A process that imports the reward function of a term."""

    key: str
    path: str
    process: subprocess.Popen[bytes]
    mark: str  # NAME=value in the environment of the process


def _start(spec: Spec, spec_dir: Path, key: str, term: Function, row: DataRow | None) -> _Importing:
    mark = secrets.token_hex(8)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RLCTL_")} | spec.reward.env
    env["PYTHONPATH"] = os.pathsep.join(part for part in (str(package_root()), env.get("PYTHONPATH", "")) if part)
    env[MARK] = mark
    python = own_path(spec.reward, spec_dir) or sys.executable
    command = [python, "-B", "-P", "-m", "workers.grading.child", str(os.getpid())]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, env=env, start_new_session=True)
    _send(process, spec, spec_dir, term, row)
    return _Importing(key, term.path, process, f"{MARK}={mark}")


def _send(process: subprocess.Popen[bytes], spec: Spec, spec_dir: Path, term: Function, row: DataRow | None) -> None:
    """The first lines of the grader's protocol, so that all of them import at the same time."""
    columns = row_columns(spec, spec_dir)
    setting = Setting(spec.data.answer_column, spec.data.max_response_tokens, str(spec_dir), columns)
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(encode({"terms": [term.model_dump(mode="json")], "setting": asdict(setting)}))
        if row is not None:
            answer = row.values.get(spec.data.answer_column)
            own = "" if answer is None else gold_answer(answer)
            job = {"rows": {"0": [_plain_prompt(row, spec), row.values]}, "items": [[0, "0", own, 1], [1, "0", "", 0]]}
            process.stdin.write(encode(job))
        process.stdin.flush()


def _plain_prompt(row: DataRow, spec: Spec) -> str:
    """The row's prompt before any chat template; of messages, their texts."""
    try:
        data = spec.data
        prompt = render_template(data.template, row.values) if data.template else row.values[data.prompt_column]
    except (LookupError, ValueError):
        return ""
    if isinstance(prompt, str):
        return prompt
    messages = prompt if isinstance(prompt, list) else []
    return "\n".join(str(one.get("content", "")) for one in messages if isinstance(one, dict))


def _said(process: subprocess.Popen[bytes]) -> Mapping[str, str] | tuple[str, str]:
    """What each parameter gets, or what is wrong and a hint, by the grader's first line. The process may go on: its
    threads and children need not end. Raises TimeoutExpired."""
    try:
        message = json.loads(_next_line(process, TIMEOUT_S))
        return message["given"][0] if "ready" in message else (str(message["error"]), str(message["hint"]))
    except (ValueError, KeyError, TypeError):
        code = process.wait(_KILL_S)
        how = f"kills the process ({signal.Signals(-code).name})" if code < 0 else f"ends the process (status {code})"
        return f"importing it {how}", "import it with python to see why"


def _next_line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """What the process writes up to a line break, or its end; what follows is left in the pipe."""
    assert process.stdout is not None
    line, deadline = b"", time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise subprocess.TimeoutExpired(process.args, timeout_s)
            byte = os.read(process.stdout.fileno(), 1)
            if not byte:
                break
            line += byte
    return line


def _end(one: _Importing) -> None:
    """The process, and what it has started, in sessions of their own too."""
    process = one.process
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kill_marked(one.mark, _KILL_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()

"""Reward functions, imported as a run would import them: in a process of their own, by the very code that grades.

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
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rlctl.preflight.interpreters import own_path
from rlctl.processes.placement import package_root
from specs.errors import Problem
from specs.schema.rewards import Function
from specs.schema.spec import Spec
from specs.text import show
from workers.grading.terms import Setting
from workers.watchdog import kill_marked

TIMEOUT_S = 20.0
MARK = "RLCTL_CHECK"  # in the environment of what a check starts, and of all that this starts in turn
_KILL_S = 5.0


def import_problems(spec: Spec, spec_dir: Path, known: Collection[str] = ()) -> tuple[list[Problem], list[Problem]]:
    """(errors, warnings) of importing the reward functions; keys in `known` have been found wrong already."""
    started: list[_Importing] = []
    errors, warnings = [], []
    try:
        for index, term in enumerate(spec.reward.terms):
            key = f"reward.terms.{index}.path"
            if isinstance(term, Function) and not {key, "reward.python"} & set(known):
                started.append(_start(spec, spec_dir, key, term))
        for one in started:
            try:
                if found := _said(one.process):
                    errors.append(Problem(one.key, *found, show(one.path)))
            except subprocess.TimeoutExpired:
                hint = "a run gives it longer; load what is large when score is first called"
                warnings.append(Problem(one.key, f"still being imported after {TIMEOUT_S:g} s", hint, show(one.path)))
    finally:
        for one in started:
            _end(one)
    return errors, warnings


@dataclass(frozen=True)
class _Importing:
    """A process that imports the reward function of a term."""

    key: str
    path: str
    process: subprocess.Popen[bytes]
    mark: str  # NAME=value in the environment of the process


def _start(spec: Spec, spec_dir: Path, key: str, term: Function) -> _Importing:
    mark = secrets.token_hex(8)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RLCTL_")} | spec.reward.env
    env["PYTHONPATH"] = os.pathsep.join(part for part in (str(package_root()), env.get("PYTHONPATH", "")) if part)
    env[MARK] = mark
    python = own_path(spec.reward, spec_dir) or sys.executable
    command = [python, "-B", "-P", "-m", "workers.grading.child", str(os.getpid())]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, env=env, start_new_session=True)
    _send(process, spec, spec_dir, term)
    return _Importing(key, term.path, process, f"{MARK}={mark}")


def _send(process: subprocess.Popen[bytes], spec: Spec, spec_dir: Path, term: Function) -> None:
    """The first line of the grader's protocol, so that all of them import at the same time."""
    setting = Setting(spec.data.answer_column, spec.data.max_response_tokens, str(spec_dir))
    hello = {"terms": [term.model_dump(mode="json")], "setting": asdict(setting)}
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(hello).encode() + b"\n")
        process.stdin.flush()


def _said(process: subprocess.Popen[bytes]) -> tuple[str, str] | None:
    """What is wrong and a hint, by the grader's first line. The process may go on: its threads and children need not
    end. Raises TimeoutExpired."""
    try:
        message = json.loads(_first_line(process))
        return None if "ready" in message else (str(message["error"]), str(message["hint"]))
    except (ValueError, KeyError, TypeError):
        code = process.wait(_KILL_S)
        how = f"kills the process ({signal.Signals(-code).name})" if code < 0 else f"ends the process (status {code})"
        return f"importing it {how}", "import it with python to see why"


def _first_line(process: subprocess.Popen[bytes]) -> bytes:
    """What the process writes up to a line break, or its end."""
    assert process.stdout is not None
    line, deadline = b"", time.monotonic() + TIMEOUT_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise subprocess.TimeoutExpired(process.args, TIMEOUT_S)
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                break
            line += chunk
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

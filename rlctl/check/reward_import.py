"""Reward functions, imported as a run would import them: in a process of their own, by the very code that grades.

The file is the person's: it may print, hang, exit or crash. What it writes to its output is lost, no bytecode is left
behind, and everything that it started ends with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from rlctl.preflight.interpreters import own_path
from rlctl.processes.placement import package_root
from specs.errors import Problem
from specs.schema.rewards import Function
from specs.schema.spec import Spec
from specs.text import show
from workers.grading.terms import Setting

TIMEOUT_S = 20.0


def import_problems(spec: Spec, spec_dir: Path, known: Collection[str] = ()) -> tuple[list[Problem], list[Problem]]:
    """(errors, warnings) of importing the reward functions; keys in `known` have been found wrong already."""
    started: list[tuple[str, str, subprocess.Popen[bytes]]] = []
    for index, term in enumerate(spec.reward.terms):
        key = f"reward.terms.{index}.path"
        if isinstance(term, Function) and not {key, "reward.python"} & set(known):
            started.append((key, term.path, _start(spec, spec_dir)))
            _send(started[-1][2], spec, spec_dir, term)
    errors, warnings = [], []
    for key, path, process in started:
        try:
            if found := _said(process):
                errors.append(Problem(key, *found, show(path)))
        except subprocess.TimeoutExpired:
            hint = "a run gives it longer; load what is large when score is first called"
            warnings.append(Problem(key, f"still being imported after {TIMEOUT_S:g} s", hint, show(path)))
        finally:
            _end(process)
    return errors, warnings


def _start(spec: Spec, spec_dir: Path) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RLCTL_")} | spec.reward.env
    env["PYTHONPATH"] = os.pathsep.join(part for part in (str(package_root()), env.get("PYTHONPATH", "")) if part)
    python = own_path(spec.reward, spec_dir) or sys.executable
    command = [python, "-B", "-P", "-m", "workers.grading.child", str(os.getpid())]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, env=env, start_new_session=True)


def _send(process: subprocess.Popen[bytes], spec: Spec, spec_dir: Path, term: Function) -> None:
    """The first line of the grader's protocol, so that all of them import at the same time."""
    setting = Setting(spec.data.answer_column, spec.data.max_response_tokens, str(spec_dir))
    hello = {"terms": [term.model_dump(mode="json")], "setting": asdict(setting)}
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(hello).encode() + b"\n")
        process.stdin.flush()


def _said(process: subprocess.Popen[bytes]) -> tuple[str, str] | None:
    """What is wrong and a hint, by the grader's answer. Raises TimeoutExpired."""
    answer, _ = process.communicate(timeout=TIMEOUT_S)
    first = answer.splitlines()[:1]
    try:
        message = json.loads(first[0])
        return None if "ready" in message else (str(message["error"]), str(message["hint"]))
    except (IndexError, ValueError, KeyError, TypeError):
        code = process.returncode
        how = f"kills the process ({signal.Signals(-code).name})" if code < 0 else f"ends the process (status {code})"
        return f"importing it {how}", "import it with python to see why"


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process, and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()

"""Reward functions, imported and called once as a run would: in a process of their own, by the code that grades there.

The file is the person's: it may print, hang, exit or crash. What it prints is lost, no bytecode is left behind, and
everything that it started ends with it.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlctl.preflight.first_row import first_row
from rlctl.preflight.interpreters import own_path
from specs.errors import Problem
from specs.schema.rewards import Function
from specs.schema.row_values import gold_answer
from specs.schema.spec import Spec
from specs.templates import render_template
from specs.text import show
from workers.data.row_source import DataRow
from workers.grading.grader_process import GraderProcess, encode
from workers.grading.reward_failures import is_of_code, last_line
from workers.grading.terms import Setting

IMPORT_TIMEOUT_S = 120.0  # as in a run


@dataclass(frozen=True)
class RewardCall:
    """One call of a reward function. `row`: its file and line; `completion`: the row's own answer, empty where it has
    none; `traceback`: its end, where there is no score."""

    path: str
    row: str
    completion: str
    score: float | None
    traceback: str


def call_rewards(
    spec: Spec, spec_dir: Path, known: Collection[str] = ()
) -> tuple[list[Problem], list[Problem], list[RewardCall]]:
    """Import every reward function, and call it for the first row of the data: errors, warnings, and the calls.

    Keys in `known` have been found wrong already. A call that fails for what code alone can mend is an error.
    """
    errors: list[Problem] = []
    warnings: list[Problem] = []
    calls: list[RewardCall] = []
    row = first_row(spec, spec_dir)
    functions = {f"reward.terms.{n}.path": one for n, one in enumerate(spec.reward.terms) if isinstance(one, Function)}
    with ExitStack() as stack:
        callers = {
            key: stack.enter_context(_Caller(spec, spec_dir, term, row))
            for key, term in functions.items()
            if not {key, "reward.python"} & set(known)
        }
        for key, caller in callers.items():
            if refused := caller.refused():
                errors.append(Problem(key, *refused, show(caller.path)))
            elif row is not None:
                call, cause = caller.call(row)
                calls.append(call)
                if cause:
                    name, why = caller.path.rpartition(":")[2], last_line(call.traceback)
                    message, hint = f"{name}, called with the first row, gives no score: {why}", f"see {row.where}"
                    found = errors if is_of_code(cause, call.traceback) else warnings
                    found.append(Problem(key, message, hint, show(caller.path)))
    return errors, warnings, calls


class _Caller:
    """A process that imports one reward function, and calls it for `row`. Use as a context manager."""

    def __init__(self, spec: Spec, spec_dir: Path, term: Function, row: DataRow | None) -> None:
        self.path, self.timeout_s = term.path, spec.reward.timeout_s
        answer = row.values.get(spec.data.answer_column) if row else None
        self.completion = "" if answer is None else gold_answer(answer)
        setting = Setting(spec.data.answer_column, spec.data.max_response_tokens, str(spec_dir))
        messages: list[dict[str, Any]] = [{"terms": [term.model_dump(mode="json")], "setting": asdict(setting)}]
        if row is not None:
            sample = {"rows": {"0": (_prompt(row, spec), row.values)}, "items": [(0, 0, self.completion, 1)]}
            messages.append(sample)
        python = own_path(spec.reward, spec_dir) or sys.executable
        env = {**spec.reward.env, "PYTHONDONTWRITEBYTECODE": "1"}
        hello = b"".join(map(encode, messages))
        self._process = GraderProcess(hello, Path(os.devnull), IMPORT_TIMEOUT_S, python=python, env=env)
        self._replies: list[dict[str, Any]] = []

    def __enter__(self) -> _Caller:
        self._process.write()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def refused(self) -> tuple[str, str] | None:
        """Return what is wrong with the file, and a hint."""
        reply = self._reply(IMPORT_TIMEOUT_S)
        if "ready" in reply:
            return None
        if "error" in reply:
            return str(reply["error"]), str(reply["hint"])
        return f"cannot be imported: {reply['text']}", "import it with python to see why"

    def call(self, row: DataRow) -> tuple[RewardCall, str]:
        """Return the call, and where it gave no score the cause."""
        reply = self._reply(self.timeout_s)
        call = RewardCall(self.path, row.where, self.completion, reply.get("t", (None,))[0], reply.get("text", ""))
        return call, reply.get("cause", "")

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        """Return the next reply, or how the process ended or was given up."""
        process, deadline = self._process, time.monotonic() + timeout_s
        while not self._replies:
            dead, late = process.dead, time.monotonic() > deadline
            self._replies += process.lines()
            if self._replies:
                break
            if dead:
                with suppress(subprocess.TimeoutExpired):
                    process.process.wait(1.0)
                return {"cause": "crashes", "text": process.end_words()}
            if late:
                return {"cause": "timeouts", "text": f"it took more than {timeout_s:g} s"}
            select.select([process.stdout], [process.stdin] if process.wants_to_write else [], [], 0.1)
            process.write()
        return self._replies.pop(0)


def _prompt(row: DataRow, spec: Spec) -> str:
    """Return the row's prompt before any chat template; of messages, their texts."""
    try:
        data = spec.data
        prompt = render_template(data.template, row.values) if data.template else row.values[data.prompt_column]
    except (LookupError, ValueError):
        return ""
    if isinstance(prompt, str):
        return prompt
    messages = prompt if isinstance(prompt, list) else []
    return "\n".join(str(one.get("content", "")) for one in messages if isinstance(one, dict))

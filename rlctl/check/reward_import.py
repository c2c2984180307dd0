"""Reward functions, imported and called as a run would do it: in a process of their own, by the very code that grades.
Each is called for the first row of the data, with the row's own answer and with an empty completion, and, if that was
quick, with completions such as a policy writes.

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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.check.growth import said_of, slowest_growth
from rlctl.check.reward_trial import OfColumns, Try, a_try, trial_findings
from rlctl.models.paths import model_folder
from rlctl.models.tokenizer_files import special_texts
from rlctl.preflight.first_row import row_columns, trial_rows
from rlctl.preflight.interpreters import own_path
from rlctl.processes.placement import package_root
from specs.errors import Problem
from specs.schema.rewards import Function
from specs.schema.row_values import gold_answer
from specs.schema.spec import Spec
from specs.templates import render_template, template_columns
from specs.text import show
from workers.data.row_source import DataRow
from workers.grading.grader_process import encode
from workers.grading.reward_failures import is_of_code, last_line
from workers.grading.signatures import ALL_COLUMNS, DEFAULT, OF_A_SAMPLE, REFERENCE
from workers.grading.terms import Setting
from workers.grading.trial_completions import OWN, Said, likely_completions
from workers.watchdog import kill_marked

TIMEOUT_S = 20.0
CALL_S = 5.0  # for a call: it may be slow, and then a probe says so
_QUICK_S, _MORE_S = 0.3, 1.0  # two calls that cost nothing, and all those that follow them
_GROWTH_S, _LONG_S = 0.25, 2.0  # longer and longer completions together, and one of them
MARK = "RLCTL_CHECK"  # in the environment of what a check starts, and of all that this starts in turn
_KILL_S = 5.0


@dataclass(frozen=True)
class Tried:
    """A reward function as it was called. `given`: parameter → what it gets. `own_answer`, `empty`: what it gave for
    the first row's own answer and for an empty completion, None where there was no row, or no number in time; the first
    also where the row has no `data.answer_column`, which `without_answer` names."""

    key: str
    path: str
    given: Mapping[str, str]
    own_answer: float | None = None
    empty: float | None = None
    without_answer: str = ""


def try_functions(
    spec: Spec, spec_dir: Path, known: Collection[str] = ()
) -> tuple[list[Problem], list[Problem], list[Tried]]:
    """(errors, warnings, calls) of importing the reward functions and calling them; keys in `known` have been found
    wrong already."""
    started: list[_Importing] = []
    errors, warnings, tried = [], [], []
    rows = trial_rows(spec, spec_dir)
    row = rows[0] if rows else None
    try:
        for index, term in enumerate(spec.reward.terms):
            key = f"reward.terms.{index}.path"
            if isinstance(term, Function) and not {key, "reward.python"} & set(known):
                started.append(_start(spec, spec_dir, index, term, rows))
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
            call, problem, tries = _called(one, said, row)
            answered = row is None or spec.data.answer_column in row.values
            tried.append(call if answered else replace(call, without_answer=spec.data.answer_column))
            (errors if problem and problem.of_code else warnings).extend([problem.said] if problem else [])
            if not said or {OF_A_SAMPLE["completion"], ALL_COLUMNS} & set(said.values()):
                warnings += _of_tries(spec, one, tries, said)
                warnings += _of_growth(spec, one) if _all_given(one, tries) else ()
                warnings += [*_kept_defaults(one, said, row), *_only_with_special(spec, spec_dir, one, tries)]
            elif not problem:
                message = f"{one.path.rpartition(':')[2]} is not given the completion: its score does not depend on it"
                hint = "let it take completion, or leave the term out"
                warnings.append(Problem(one.key, message, hint, show(one.path)))
    finally:
        for one in started:
            _end(one)
    return errors, warnings, tried


def _called(
    one: _Importing, given: Mapping[str, str], row: DataRow | None
) -> tuple[Tried, _Failed | None, Sequence[Try]]:
    """What its two calls gave; a problem where both fail; and where both gave a number, all calls."""
    call = Tried(one.key, one.path, given)
    if row is None:
        return call, None, ()
    lines: list[dict[str, Any]] = []
    began = time.monotonic()
    with suppress(subprocess.TimeoutExpired, ValueError):
        for _ in range(2):
            lines.append(json.loads(_next_line(one.process, CALL_S)))
    failed = [line for line in lines if "t" not in line]
    if len(failed) == 2:
        name = one.path.rpartition(":")[2]
        last = last_line(str(failed[0]["text"]))
        hint = f"call it with the row of {row.where}"
        message = f"{name}, called with the first row, gives no score: {last}"
        of_code = all(is_of_code(str(line["cause"]), str(line["text"])) for line in failed)
        return call, _Failed(Problem(one.key, message, hint, show(one.path)), of_code), ()
    numbers = [line["t"][0] if "t" in line else None for line in lines] + [None] * (2 - len(lines))
    call = replace(call, own_answer=numbers[0] if one.completions[0].right else None, empty=numbers[1])
    if len(lines) < 2 and time.monotonic() - began >= CALL_S:
        message = f"{one.path.rpartition(':')[2]}, called with the first row, gives no score within {CALL_S:g} s"
        hint = "a run grades every completion of a step: make it quicker, or raise reward.workers and reward.timeout_s"
        return call, _Failed(Problem(one.key, message, hint, show(one.path)), of_code=False), ()
    if failed and len(lines) == 2:
        what = "an empty completion" if "t" not in lines[1] else "the row's own answer"
        message = (
            f"{one.path.rpartition(':')[2]}, called with {what}, gives no score: {last_line(str(failed[0]['text']))}"
        )
        hint = "return a number whatever the model writes, 0.0 for what cannot be read"
        return call, _Failed(Problem(one.key, message, hint, show(one.path)), of_code=False), ()
    if None in numbers or time.monotonic() - began > _QUICK_S:
        return call, None, ()
    first = [a_try(said, line) for said, line in zip(one.completions, lines, strict=False)]
    return call, None, [*first, *_more(one)]


def _more(one: _Importing) -> Iterator[Try]:
    """Calls with likely completions, as many as begin within a second. The last one may end the process, or hang."""
    completions = one.completions[2:]
    assert one.process.stdin is not None
    until = time.monotonic() + _MORE_S
    try:
        one.process.stdin.write(encode(_job(one.sample, completions)))
        one.process.stdin.flush()
        for said in completions:
            if time.monotonic() > until:
                return
            if not (line := _next_line(one.process, CALL_S)):
                yield Try(said, None, "the process ended")
                return
            yield a_try(said, json.loads(line))
    except subprocess.TimeoutExpired:
        yield Try(said, None, f"it took more than {CALL_S:g} s")
    except (BrokenPipeError, ValueError):
        return


def _all_given(one: _Importing, tries: Sequence[Try]) -> bool:
    """Whether it gave a score for each completion."""
    return len(tries) == len(one.completions) and not any(each.failure for each in tries)


def _of_tries(spec: Spec, one: _Importing, tries: Sequence[Try], given: Mapping[str, str]) -> Iterator[Problem]:
    """Warnings about what a function gave."""
    if len(tries) < len(one.completions) and not (tries and tries[-1].failure):
        return
    term, data, row = spec.reward.terms[one.index], spec.data, one.sample[1] if one.sample else {}
    alone = sum(other.weight != 0 for other in spec.reward.terms) == 1
    asked = {*template_columns(data.template)} if data.template else {data.prompt_column}
    columns = OfColumns(
        data.answer_column,
        frozenset(row) - asked,
        frozenset(name for name in row if f'column "{name}"' in given.values()),
        ALL_COLUMNS in given.values(),
    )
    for message, hint in trial_findings(one.path.rpartition(":")[2], tries, columns, weight=term.weight, alone=alone):
        yield Problem(one.key, message, hint, show(one.path))


def _only_with_special(spec: Spec, spec_dir: Path, one: _Importing, tries: Sequence[Try]) -> Iterator[Problem]:
    """A function that likes right completions only where they hold special tokens, which it is never given."""
    folder = model_folder(spec.model.path, spec_dir)
    texts = special_texts(folder) if isinstance(folder, Path) else set()
    wrong = max((each.value or 0.0 for each in tries if not each.right), default=0.0)
    liked = [each.completion.text for each in tries if each.right and (each.value or 0.0) > wrong]
    held = [[text for text in texts if text in completion] for completion in liked]
    if liked and all(held) and spec.reward.terms[one.index].weight > 0:
        message = f"rewards {', '.join(sorted(held[0]))}, special tokens of this tokenizer"
        hint = "mark the parts with text that is no special token, or make the tokens plain ones"
        yield Problem(one.key, f"{message}, and completions are read without them", hint, show(one.path))


def _kept_defaults(one: _Importing, given: Mapping[str, str], row: DataRow | None) -> Iterator[Problem]:
    """A parameter that is called like the row's answer, and no column is."""
    for name, what in given.items():
        if what == DEFAULT and name in REFERENCE and row is not None:
            message = f"{name} keeps its default: the rows have no column of that name ({', '.join(row.values)})"
            yield Problem(one.key, message, "call it as the column is called, or read it from row", show(one.path))


def _of_growth(spec: Spec, one: _Importing) -> Iterator[Problem]:
    """A warning about a function that takes too long for long completions."""
    limit_s = spec.reward.timeout_s

    def seconds(text: str) -> float | None:
        with suppress(subprocess.TimeoutExpired, ValueError, BrokenPipeError):
            assert one.process.stdin is not None
            one.process.stdin.write(encode(_job(one.sample, [Said(text)])))
            one.process.stdin.flush()
            return float(json.loads(_next_line(one.process, _LONG_S))["seconds"])
        return None

    longest = spec.data.max_response_tokens
    if slow := slowest_growth(seconds, max_tokens=longest, limit_s=limit_s, until_s=_GROWTH_S):
        yield Problem(one.key, *said_of(one.path.rpartition(":")[2], slow, limit_s), show(one.path))


@dataclass(frozen=True)
class _Importing:
    """A process that imports the reward function of a term."""

    index: int  # of the term
    key: str
    path: str
    process: subprocess.Popen[bytes]
    mark: str  # NAME=value in the environment of the process
    sample: tuple[str, Mapping[str, Any]] | None  # prompt and row that it is called with
    completions: Sequence[Said]


@dataclass(frozen=True)
class _Failed:
    """Two calls that gave no score. `of_code`: because of the code itself."""

    said: Problem
    of_code: bool


def _start(spec: Spec, spec_dir: Path, index: int, term: Function, rows: Sequence[DataRow]) -> _Importing:
    mark = secrets.token_hex(8)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RLCTL_")} | spec.reward.env
    env["PYTHONPATH"] = os.pathsep.join(part for part in (str(package_root()), env.get("PYTHONPATH", "")) if part)
    env[MARK] = mark
    python = own_path(spec.reward, spec_dir) or sys.executable
    command = [python, "-B", "-P", "-m", "workers.grading.child", str(os.getpid())]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, env=env, start_new_session=True)
    row = rows[0] if rows else None
    sample = None if row is None else (_plain_prompt(row, spec), row.values)
    own, *others = [_gold(one, spec) for one in rows] or [None]
    other = next((text for text in others if own and text and text not in own and own not in text), None)
    source = _source_of(spec_dir / Path(term.path.rpartition(":")[0]).expanduser())
    asked = f"{spec.data.system}\n{sample[0] if sample else ''}"
    likely = likely_completions(own, other=other, source=source, prompt=asked)
    completions = [Said(own or "", own is not None, OWN), Said(""), *likely]
    one = _Importing(index, f"reward.terms.{index}.path", term.path, process, f"{MARK}={mark}", sample, completions)
    _send(one, spec, spec_dir, term)
    return one


def _gold(row: DataRow, spec: Spec) -> str | None:
    answer = row.values.get(spec.data.answer_column)
    return None if answer is None else gold_answer(answer)


def _source_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _send(one: _Importing, spec: Spec, spec_dir: Path, term: Function) -> None:
    """The first lines of the grader's protocol, so that all of them import at the same time."""
    columns = row_columns(spec, spec_dir)
    setting = Setting(spec.data.answer_column, spec.data.max_response_tokens, str(spec_dir), columns)
    hello = {"terms": [term.model_dump(mode="json")], "setting": asdict(setting), "trial": True}
    assert one.process.stdin is not None
    with suppress(BrokenPipeError):
        one.process.stdin.write(encode(hello))
        if one.sample is not None:
            one.process.stdin.write(encode(_job(one.sample, one.completions[:2])))
        one.process.stdin.flush()


def _job(sample: tuple[str, Mapping[str, Any]] | None, completions: Sequence[Said]) -> dict[str, Any]:
    items = [[number, "0", one.text, len(one.text)] for number, one in enumerate(completions)]
    return {"rows": {"0": sample}, "items": items}


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

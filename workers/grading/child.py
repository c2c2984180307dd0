"""The isolated process that grades samples: `python -m workers.grading.child`.

It speaks JSON lines. The first input line holds the terms and the sources of their files, the first output line is
`{"ready": true}` or `{"term": ..., "error": ..., "hint": ...}`. Each further input line is a job, `{"rows": {key:
[prompt, row]}, "items": [[index, key, completion, tokens, episode], ...]}`. Each item gives an output line, in order
and at once: `{"i": index, "t": [value of each term]}`, or `{"i": index, "term": ..., "cause": ..., "text": ...}`.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TextIO, cast

from specs.errors import RewardError
from specs.terminal import VisibleStream
from workers.grading.reward_sources import keep_sources
from workers.grading.terms import GradeRequest, Setting, Term, make_term
from workers.watchdog import die_with_parent

TRACEBACK_CHARACTERS = 2000
ERROR_CHARACTERS = 500  # of an exception in one line


def main() -> None:
    become_expendable()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    hide_streams()  # reward code prints
    me = os.getpid()

    def answer(message: dict[str, Any]) -> None:
        if os.getpid() != me:  # reward code forked and the copy returned here: only the original process may write
            os._exit(1)
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[os.write(answers, data) :]

    first = requests.readline()
    if not first:
        return
    hello = json.loads(first)
    keep_sources(hello.get("sources", {}))
    terms = _make_terms(hello, answer)
    if terms is None:
        return
    answer({"ready": True})
    for line in requests:
        job = json.loads(line)
        for index, key, completion, tokens, episode in job["items"]:
            prompt, row = job["rows"][str(key)]
            sample = GradeRequest(key, prompt, row, completion, tokens, episode=episode)
            answer({"i": index, **grade(terms, sample)})


def _make_terms(hello: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> list[Term] | None:
    """Make the terms of the first line; None if one cannot be made, after the error was sent to the parent."""
    terms: list[Term] = []
    try:
        setting = Setting(**hello["setting"])
        for table in hello["terms"]:
            terms.append(make_term(table, setting))
    except Exception as error:  # every error at startup is reported to the user
        traceback.print_exc()
        if not isinstance(error, RewardError):
            error = RewardError(f"{type(error).__name__}: {error}", hint="the traceback is in the reward's log")
        answer({"term": len(terms), "error": error.message, "hint": error.hint})
        return None
    return terms


def grade(terms: Sequence[Term], sample: GradeRequest) -> dict[str, Any]:
    """Return the values of all terms for one sample, or the reason why there is none."""
    values = []
    for number, term in enumerate(terms):
        try:
            value = term(sample)
        except BaseException as error:  # user code: sys.exit() and a recursion limit are failures of this sample only
            return {"cause": "exceptions", "term": number, "text": _traceback(error)}
        score = as_number(value)
        if score is None:
            return {"cause": "bad_values", "term": number, "text": f"the reward gave {describe(value)}"}
        values.append(score)
    return {"t": values}


def one_line(error: BaseException) -> str:
    """Return the type and the message of an exception, whose own __str__ may raise."""
    with suppress(BaseException):
        return " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARACTERS]
    return type(error).__name__


def _traceback(error: BaseException) -> str:
    """Return the end of a traceback, whose last line names the exception however long its message is."""
    text, last = "".join(traceback.format_exception(error)).rstrip(), one_line(error)
    if not text.endswith(last.removesuffix(":")):
        frames = text if len(text) < TRACEBACK_CHARACTERS else "".join(traceback.format_tb(error.__traceback__))
        text = f"{frames.rstrip()}\n{last}"
    return text[-TRACEBACK_CHARACTERS:]


def as_number(value: Any) -> float | None:
    """Return the value as a finite float; None for anything else. Text is not a number, even "1"."""
    if isinstance(value, str | bytes) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return None
    try:
        number = float(value)
    except Exception:  # user code: a value's own __float__
        return None
    return number if math.isfinite(number) else None


def describe(value: Any) -> str:
    """Return a bounded repr; a value's own __repr__ may raise as well."""
    try:
        return f"{repr(value)[:200]} ({type(value).__name__}), not a finite number"
    except Exception:  # user code
        return f"a {type(value).__name__}, not a finite number"


def hide_streams() -> None:
    """Make stdin empty and stdout the log, which is stderr."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    sys.stdout, sys.stderr = (cast(TextIO, VisibleStream(stream, log=True)) for stream in (sys.stdout, sys.stderr))


def become_expendable() -> None:
    """Have this process killed when its parent ends, whose number is its first argument, and before others when memory
    runs out."""
    parent = os.getppid()
    die_with_parent()
    if os.getppid() != parent or (len(sys.argv) > 1 and int(sys.argv[1]) != parent):
        os._exit(1)  # the parent died before the signal was asked for
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("900")  # when memory runs out, the kernel should kill this process, not the trainer


if __name__ == "__main__":
    main()

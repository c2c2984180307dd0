"""Make the reward terms: a function of one sample from a term's table. Runs in the grading processes.

Kept free of pydantic and numpy: a replacement for a killed process must start fast.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from specs.schema.row_values import gold_answer
from workers.grading.kept_sources import from_memory
from workers.grading.signatures import BoundFunction, Uncallable


@dataclass(frozen=True)
class GradedSample:
    """The input of a term. `completion` is what the policy wrote; of several turns, one after another in lines of
    their own, without what tools replied. `completion_tokens` counts the tokens of the longest of them, its end token
    too: the limit on them is one per turn."""

    prompt: str
    completion: str
    row: Mapping[str, Any]
    completion_tokens: int


@dataclass(frozen=True)
class Setting:
    """Settings of the run that terms need besides their own table."""

    answer_column: str
    max_response_tokens: int
    base: str  # folder that `file.py:name` is relative to


Term = Callable[[GradedSample], Any]


class TermError(Exception):
    """A term cannot be made; `str()` says which and why, `hint` how to fix it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def make_term(table: Mapping[str, Any], setting: Setting) -> Term:
    """Return the term of one `[[reward.terms]]` table. Raises TermError."""
    return _MAKERS[table["kind"]](table, setting)


def _exact_match(table: Mapping[str, Any], setting: Setting) -> Term:
    def term(sample: GradedSample) -> float:
        given, gold = sample.completion.strip(), gold_answer(sample.row[setting.answer_column])
        if table["ignore_case"]:
            given, gold = given.casefold(), gold.casefold()
        if not table["partial"]:
            return float(given == gold)
        right = sum(a == b for a, b in zip(given, gold, strict=False))
        return right / max(len(given), len(gold), 1)  # extra characters count as wrong positions

    return term


def _math_verify(table: Mapping[str, Any], setting: Setting) -> Term:
    import logging

    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off; the pool has its own

    @lru_cache(maxsize=4096)
    def parse_gold(text: str) -> Any:
        parsed = math_verify.parse(text, parsing_timeout=0)
        if not parsed:
            raise ValueError(f"math_verify finds no value in the row's answer {text!r}")
        return parsed

    def term(sample: GradedSample) -> float:
        gold = parse_gold(gold_answer(sample.row[setting.answer_column]))
        given = math_verify.parse(sample.completion, parsing_timeout=0)
        return float(math_verify.verify(gold, given, timeout_seconds=0))

    term(
        GradedSample("", "$1$", {setting.answer_column: "1"}, 1)
    )  # the first call imports and compiles; that must not count towards a sample's timeout
    return term


def _regex(table: Mapping[str, Any], setting: Setting) -> Term:
    try:
        pattern = re.compile(table["pattern"], re.DOTALL)
    except re.error as error:
        raise TermError(f"regex {table['pattern']!r}: {error}", "write a Python regular expression") from None
    return lambda sample: float(pattern.search(sample.completion) is not None)


def _overlong(table: Mapping[str, Any], setting: Setting) -> Term:
    buffer = int(table["buffer_tokens"])
    safe = setting.max_response_tokens - buffer

    def term(sample: GradedSample) -> float:
        return -min(max((sample.completion_tokens - safe) / buffer, 0.0), 1.0)

    return term


def _function(table: Mapping[str, Any], setting: Setting) -> Term:
    file, _, name = table["path"].rpartition(":")
    path = Path(setting.base, Path(file).expanduser()).resolve()
    module = _load_module(path)
    function = getattr(module, name, None)
    if function is None:
        raise TermError(f"{path} defines no {name}", f"define `def {name}(prompt, completion, row)` in it")
    if not callable(function):
        raise TermError(f"{name} in {path} is {type(function).__name__}, not a function", "name a function")
    if wrong := _not_a_score(function, name):
        raise TermError(*wrong)
    try:
        bound = BoundFunction(function, name)
    except Uncallable as error:
        raise TermError(str(error), error.hint) from None
    return lambda sample: bound(sample.prompt, sample.completion, _own_copy(sample.row))


def _own_copy(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a row that a function may change: the other completions of the row are graded with it, too."""
    return {name: deepcopy(value) if isinstance(value, list | dict) else value for name, value in row.items()}


def _not_a_score(function: Callable[..., Any], name: str) -> tuple[str, str] | None:
    """Return why a callable cannot score, whatever it is given; None if it can, or if that is unknown."""
    if inspect.isclass(function):
        return f"{name} is a class, and calling it makes an object, not a score", f"name an object: scorer = {name}()"
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        return f"{name} gives a generator or a coroutine, not a number", "write a plain function that returns one"
    return None


def _load_module(path: Path) -> Any:
    """Run a reward file as a module. Its folder is searched last for imports, so that it shadows no module."""
    if not path.is_file():
        raise TermError(f"reward file {path} does not exist", "paths are relative to the folder of the spec file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = f"reward_file_{path.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    found = from_memory(found)
    assert found.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except BaseException as error:  # user code may raise anything, including SystemExit
        raise TermError(*_import_words(path, error)) from error
    return module


def _import_words(path: Path, error: BaseException) -> tuple[str, str]:
    """Return the error message of a failed import of a reward file, with the line in it."""
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(path) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    where = f"{path}:{line}" if line else str(path)
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    hint = f"run `python {path.name}` in its folder to see the same error"
    if isinstance(error, ModuleNotFoundError):
        hint = f"install {error.name!r} for the reward role's interpreter, or put it beside {path.name}"
    return f"{where}: {type(error).__name__}: {said}", hint


_MAKERS: Mapping[str, Callable[[Mapping[str, Any], Setting], Term]] = {
    "exact_match": _exact_match,
    "math_verify": _math_verify,
    "regex": _regex,
    "overlong": _overlong,
    "function": _function,
}

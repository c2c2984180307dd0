"""Make the reward terms: a function of one sample from a term's table. Runs in the grading processes.

Kept free of pydantic and numpy: a replacement for a killed process must start fast.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from specs.builtin_tasks import gym_entry
from specs.errors import RewardError, line_in
from specs.schema.row_values import gold_answer
from workers.grading.reward_sources import from_memory
from workers.grading.signatures import BoundFunction


@dataclass(frozen=True)
class GradeRequest:
    """A sample to grade. Requests of one row share `row_key`, `prompt`, `row` and `messages`, which the prompt was made
    from. `completion` is what the policy wrote; of several turns, one after another in lines of their own, without what
    tools replied. `completion_tokens` counts the tokens of the longest of them, its end token too: the limit on them is
    one per turn. `sample` is its id, and `where` the file and line of its row: for messages."""

    row_key: int
    prompt: str
    row: Mapping[str, Any]
    completion: str
    completion_tokens: int
    sample: int = 0
    where: str = ""
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Any] | None = None  # that the chat template was given with them
    episode: Mapping[str, Any] | None = None  # of several turns: `messages`, `stop`, `reward`


@dataclass(frozen=True)
class Setting:
    """Settings of the run that terms need besides their own table."""

    answer_column: str
    max_response_tokens: int
    base: str  # folder that `file.py:name` is relative to


Term = Callable[[GradeRequest], Any]

_NUMBER = re.compile(r"[\d\s.%€£¥/-]*")
# Delimiters of LaTeX, or words. An answer without either, as MATH's are, is LaTeX as a whole: of 3\sqrt{2} math_verify
# would see 3.
_MARKED = re.compile(r"(?<!\\)\$|\\boxed|\\[(\[]|(?<![^\s(])[A-Za-z]{2,}(?![^\s.,:;!?/^)])")


def make_term(table: Mapping[str, Any], setting: Setting) -> Term:
    """Return the term of one `[[reward.terms]]` table. Raises RewardError."""
    return _MAKERS[table["kind"]](table, setting)


def _exact_match(table: Mapping[str, Any], setting: Setting) -> Term:
    def term(sample: GradeRequest) -> float:
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
        bare = not (_NUMBER.fullmatch(text) or _MARKED.search(text))
        parsed = math_verify.parse(f"${text}$" if bare else text, parsing_timeout=0)
        if not parsed:
            raise ValueError(f"math_verify finds no value in the row's answer {text!r}")
        return parsed

    def term(sample: GradeRequest) -> float:
        gold = parse_gold(gold_answer(sample.row[setting.answer_column]))
        given = math_verify.parse(sample.completion, parsing_timeout=0)
        return float(math_verify.verify(gold, given, timeout_seconds=0))

    # The first call imports and compiles; that must not count towards a sample's timeout.
    term(GradeRequest(0, "", {setting.answer_column: "1"}, "$1$", 1))
    return term


def _reasoning_gym(table: Mapping[str, Any], setting: Setting) -> Term:
    try:
        from reasoning_gym.factory import create_dataset
        from reasoning_gym.utils import extract_answer
    except ImportError as error:
        raise RewardError(str(error), hint=f"{sys.executable} -m pip install reasoning-gym") from None

    @lru_cache(maxsize=256)
    def data_set(name: str, options: str) -> Any:
        return create_dataset(name, seed=0, **json.loads(options))

    def term(sample: GradeRequest) -> Any:
        row = sample.row["reasoning_gym"]
        score, entry = data_set(row["name"], json.dumps(row["options"])).score_answer, gym_entry(row["entry"])
        try:
            return score(extract_answer(sample.completion) or sample.completion.strip(), entry)
        except Exception:  # some data sets raise where others give 0 to what they cannot read
            score(entry["answer"], entry)  # raises where it is not the completion that is at fault
            return 0.0

    return term


def _regex(table: Mapping[str, Any], setting: Setting) -> Term:
    pattern = re.compile(table["pattern"], re.DOTALL)  # which `specs/rules` has tried
    return lambda sample: float(pattern.search(sample.completion) is not None)


def _overlong(table: Mapping[str, Any], setting: Setting) -> Term:
    buffer = int(table["buffer_tokens"])
    safe = setting.max_response_tokens - buffer

    def term(sample: GradeRequest) -> float:
        return -min(max((sample.completion_tokens - safe) / buffer, 0.0), 1.0)

    return term


def _function(table: Mapping[str, Any], setting: Setting) -> Term:
    file, _, name = table["path"].rpartition(":")
    path = Path(setting.base, Path(file).expanduser()).resolve()
    function: Any = getattr(load_module(path), name, None)
    if wrong := _not_a_score(function, name, path):
        raise RewardError(wrong[0], hint=wrong[1])
    bound = BoundFunction(function, name)
    # Others have the row too, and other terms the episode.
    return lambda sample: bound(sample.prompt, sample.completion, *deepcopy((dict(sample.row), sample.episode)))


def _not_a_score(function: Any, name: str, path: Path) -> tuple[str, str] | None:
    """Return why this cannot score, whatever it is given, and what to do; None if it can, or if that is unknown."""
    if function is None:
        return f"{path} defines no {name}", f"define `def {name}(prompt, completion, row)` in it"
    if not callable(function):
        return f"{name} in {path} is {type(function).__name__}, not a function", "name a function"
    if inspect.isclass(function):
        return f"{name} is a class, and calling it makes an object, not a score", f"name an object: scorer = {name}()"
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        return f"{name} gives a generator or a coroutine, not a number", "write a plain function that returns one"
    return None


def load_module(path: Path, what: str = "reward") -> Any:
    """Run a file of users' code as a module. Its folder is searched last for imports, so that it shadows no module."""
    if not path.is_file():
        hint = "paths are relative to the folder of the spec file"
        raise RewardError(f"{what} file {path} does not exist", hint=hint)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = f"{what}_file_{path.stem}"
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
        raise _import_error(path, error) from error
    return module


def _import_error(path: Path, error: BaseException) -> RewardError:
    """Return the error of a failed import of a file, with the line in it."""
    line = line_in(str(path), error)
    where = f"{path}:{line}" if line else str(path)
    why = error.msg if isinstance(error, SyntaxError) else str(error)
    hint = f"run `python {path.name}` in its folder to see the same error"
    if isinstance(error, ModuleNotFoundError):
        hint = f"install {error.name!r} for the reward role's interpreter, or put it beside {path.name}"
    return RewardError(f"{where}: {type(error).__name__}: {why}", hint=hint)


_MAKERS: Mapping[str, Callable[[Mapping[str, Any], Setting], Term]] = {
    "exact_match": _exact_match,
    "math_verify": _math_verify,
    "reasoning_gym": _reasoning_gym,
    "regex": _regex,
    "overlong": _overlong,
    "function": _function,
}

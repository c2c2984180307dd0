"""A user's own advantage: a Python function named by its path. Loading any such function, and saying what is wrong."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specs.errors import RlctlError, line_in

ADVANTAGE = "advantage(score_R, group_R, tokens_R)"
LOSS = "loss(logprob, anchor_logprob, advantage)"


class OwnFunctionError(RlctlError):
    """A function of the user's cannot be loaded, raises, or returns what cannot be used."""


@cache
def _load(path: str) -> Callable[..., Any]:
    """The function `file.py:name`, from an absolute path. The file's folder is searched last for its imports. Raises
    OwnFunctionError."""
    place, _, name = path.rpartition(":")
    file = Path(place)
    if not file.is_file():
        raise OwnFunctionError(f"{path}: no such file", hint="a relative path starts at the spec file's folder")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    found = importlib.util.spec_from_file_location(f"own_function_{file.stem}", file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except BaseException as error:  # user code may raise anything, including SystemExit
        raise _raised(path, error, "importing it") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise OwnFunctionError(f"{path}: {file.name} defines no function {name}", hint=f"write def {name}(…) in it")
    return function  # type: ignore[no-any-return]


def call(path: str, *arguments: Any) -> Any:
    """Call the user's function. Raises OwnFunctionError, also of what it raises."""
    function = _load(path)
    try:
        return function(*arguments)
    except Exception as error:
        raise _raised(path, error, "calling it") from error


def _raised(path: str, error: BaseException, doing: str) -> OwnFunctionError:
    """Describe what the user's code raised, with its line."""
    line = line_in(path.rpartition(":")[0], error)
    where = f" in line {line}" if line else ""
    return OwnFunctionError(
        f"{path}: {doing} raised {type(error).__name__}{where}: {error}", hint="repair the function"
    )


def own_advantage(
    path: str, score_R: NDArray[np.float64], group_R: NDArray[np.int64], tokens_R: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Call the user's function with each rollout's score, group (counted from 0) and loss tokens. Raises
    OwnFunctionError where that is not one finite number for each."""
    found = call(path, score_R.copy(), group_R.copy(), tokens_R.copy())
    try:
        advantage_R = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError) as error:
        said = f"{path}: it returned {type(found).__name__}, which is not an array of numbers ({error})"
        raise OwnFunctionError(said, hint=f"return an array as long as score_R: {ADVANTAGE}") from None
    if advantage_R.shape != score_R.shape:
        said = f"{path}: it returned shape {advantage_R.shape} for {len(score_R)} rollouts"
        raise OwnFunctionError(said, hint=f"return one number for each rollout, shape {score_R.shape}: {ADVANTAGE}")
    if not np.isfinite(advantage_R).all():
        bad = int(np.flatnonzero(~np.isfinite(advantage_R))[0])
        said = f"{path}: it returned {advantage_R[bad]} for rollout {bad} (score {score_R[bad]:g})"
        raise OwnFunctionError(said, hint="return finite numbers; a group may have equal scores, or one rollout")
    return advantage_R

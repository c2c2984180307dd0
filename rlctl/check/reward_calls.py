"""Reward functions, imported and called once as a run would: in a process of their own, by the code that grades there.

The file is the person's: it may print, hang, exit or crash. What it prints is lost, no bytecode is left behind, and
everything that it started ends with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from rlctl.preflight.interpreters import own_path
from specs.errors import DataError, Problem, RewardError
from specs.schema.rewards import Function
from specs.schema.row_values import gold_answer
from specs.schema.sections import is_hub_data
from specs.schema.spec import Spec
from specs.templates import render_template
from specs.text import show
from workers.data.row_source import DataRow, read_rows
from workers.grading.pool import GradeRequest, GraderPool
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
    row = _first_row(spec, spec_dir)
    functions = {f"reward.terms.{n}.path": one for n, one in enumerate(spec.reward.terms) if isinstance(one, Function)}
    with ExitStack() as stack:
        importing = {
            key: stack.enter_context(_pool(spec, spec_dir, term))
            for key, term in functions.items()
            if not {key, "reward.python"} & set(known)
        }
        for key, pool in importing.items():
            path = functions[key].path
            try:
                pool.wait_ready()
            except RewardError as error:
                errors.append(Problem(key, error.message, error.hint, show(path)))
                continue
            if row is None:
                continue
            answer = row.values.get(spec.data.answer_column)
            completion = "" if answer is None else gold_answer(answer)
            (grade,) = pool.grade([GradeRequest(0, _prompt(row, spec), row.values, completion, 1)])
            score = grade.values[0] if grade.values else None
            calls.append(RewardCall(path, row.where, completion, score, grade.text))
            if grade.cause:
                why = f"{path.rpartition(':')[2]}, called with the first row, gives no score: {last_line(grade.text)}"
                found = errors if is_of_code(grade.cause, grade.text) else warnings
                found.append(Problem(key, why, f"see {row.where}", show(path)))
    return errors, warnings, calls


def _pool(spec: Spec, spec_dir: Path, term: Function) -> GraderPool:
    """Start the process that imports one function."""
    return GraderPool(
        [term.model_dump(mode="json")],
        Setting(spec.data.answer_column, spec.data.max_response_tokens, str(spec_dir)),
        workers=1,
        timeout_s=spec.reward.timeout_s,
        log_path=Path(os.devnull),
        start_timeout_s=IMPORT_TIMEOUT_S,
        labels=("",),
        python=own_path(spec.reward, spec_dir) or sys.executable,
        env={**spec.reward.env, "PYTHONDONTWRITEBYTECODE": "1"},
    )


def _first_row(spec: Spec, spec_dir: Path) -> DataRow | None:
    """Return the first row of `data.train`, or of the first evaluation set that can be read. Nothing is downloaded."""
    for source in [spec.data.train, *(one.data for one in spec.evaluations if one.data)]:
        with suppress(DataError):
            row = None if is_hub_data(source) else next(read_rows(source, split="", base=spec_dir, max_rows=1), None)
            if row is not None and not row.problem:
                return row
    return None


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

"""The terms of a reward: a table for each `kind` of `[reward] terms`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from specs.schema.table import NonEmpty, PathText, Table

MAX_SCORE = 1e18  # of a term and of the weighted sum: squares of it, and sums over a batch, are finite in float32


class RewardTerm(Table):
    """What all reward terms share."""

    weight: float = Field(1.0, ge=-MAX_SCORE, le=MAX_SCORE, description="Factor of this term in the weighted sum.")


class ExactMatch(RewardTerm):
    """1 when the completion, stripped, equals the row's answer; else 0."""

    kind: Literal["exact_match"]
    partial: bool = Field(False, description="Give the share of character positions that are right instead of 0 or 1.")
    ignore_case: bool = Field(False, description="Compare without regard to case.")


class MathVerify(RewardTerm):
    """1 when `math-verify` finds the completion mathematically equal to the row's answer."""

    kind: Literal["math_verify"]


class Regex(RewardTerm):
    """1 when the pattern is found in the completion; else 0."""

    kind: Literal["regex"]
    pattern: NonEmpty = Field(
        description="Python regular expression, searched in the completion (dot matches newlines)."
    )


class Overlong(RewardTerm):
    """0 up to `limit - buffer` tokens, then falls linearly to -1 at the limit (DAPO, Yu et al. 2025, eq. 13)."""

    kind: Literal["overlong"]
    buffer_tokens: int = Field(gt=0, description="Length of the slope before `max_response_tokens`.")


class Function(RewardTerm):
    """A Python function `score(prompt, completion, row) -> float`."""

    kind: Literal["function"]
    path: Annotated[PathText, StringConstraints(pattern=r"^.+\.py:[A-Za-z_]\w*$")] = Field(
        description="`file.py:name`, relative to the spec file."
    )


def compares_answer(terms: Sequence[RewardTerm]) -> bool:
    """Whether a term compares with the row's answer, so that every row needs one."""
    return any(isinstance(term, ExactMatch | MathVerify) for term in terms)


def reads_whole_rows(terms: Sequence[RewardTerm]) -> bool:
    """Whether a term may look at any column of a row."""
    return any(isinstance(term, Function) for term in terms)


RewardTermTable = Annotated[ExactMatch | MathVerify | Regex | Overlong | Function, Field(discriminator="kind")]

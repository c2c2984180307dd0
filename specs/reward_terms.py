"""The terms of a reward: a table for each `kind` of `[reward] terms`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from specs.table import NonEmpty, PathText, Table


class RewardTerm(Table):
    """What all reward terms share."""

    weight: float = Field(1.0, description="Factor of this term in the weighted sum.")


class ExactMatch(RewardTerm):
    """1 when the answer, stripped, equals the row's answer; else 0."""

    kind: Literal["exact_match"]
    partial: bool = Field(False, description="Give the share of character positions that are right instead of 0 or 1.")
    ignore_case: bool = Field(False, description="Compare without regard to case.")


class MathVerify(RewardTerm):
    """1 when `math-verify` finds the answer mathematically equal to the row's answer."""

    kind: Literal["math_verify"]


class Regex(RewardTerm):
    """1 when the pattern is found in the answer; else 0."""

    kind: Literal["regex"]
    pattern: NonEmpty = Field(description="Python regular expression, searched in the answer (dot matches newlines).")


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


RewardTermTable = Annotated[ExactMatch | MathVerify | Regex | Overlong | Function, Field(discriminator="kind")]

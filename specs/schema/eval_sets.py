"""`[eval]`: which sets of prompts a run is evaluated on, how they are completed, and which completions pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from specs.schema.rewards import MAX_SCORE, RewardTerm
from specs.schema.table import NonEmpty, PathText, Table

SetName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+$")]


class EvalSet(Table):
    """One of several sets of prompts. How it is completed, where it does not say so itself, `[eval]` says."""

    name: SetName
    """Name in the metrics: `eval/<name>/reward_mean`."""
    data: PathText = ""
    """Where the prompts come from; empty: the last `prompts` rows of `data.train` are held out, which one set may
    be."""
    split: NonEmpty = "test"
    """Split to read; only for a hub dataset id."""
    prompts: int | None = Field(None, gt=0)
    """Prompts to evaluate on; unset: `eval.prompts`."""
    samples_per_prompt: int | None = Field(None, gt=0)
    """Completions of each prompt; unset: `eval.samples_per_prompt`."""
    temperature: float | None = Field(None, ge=0)
    """0: greedy; unset: `eval.temperature`."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling as in `[rollout]`; unset: `eval.top_p`."""
    pass_term: int | None = Field(None, ge=0)
    """Unset: `eval.pass_term`."""
    pass_score: float | None = Field(None, ge=-MAX_SCORE, le=MAX_SCORE)
    """Unset: `eval.pass_score`."""


class PromptSet(Table):
    """A set of prompts, and how it is completed."""

    name: SetName = "heldout"
    """Name in the metrics: `eval/<name>/reward_mean`."""
    data: PathText = ""
    """Where the prompts come from; empty: the last `prompts` rows of `data.train` are held out."""
    split: NonEmpty = "test"
    """Split to read; only for a hub dataset id."""
    prompts: int = Field(64, gt=0)
    """Prompts to evaluate on."""
    samples_per_prompt: int = Field(1, gt=0)
    """Completions of each prompt. Their mean is `reward_mean`; pass@k is estimated from them."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0: greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set with this much probability."""
    pass_term: int | None = Field(None, ge=0)
    """Number in `reward.terms`, from 0: a completion passes by this term's value, before its weight; unset: the
    only term that is no penalty, where it is known what it gives a right completion (`exact_match`, `math_verify`,
    `regex`: 1), or with `pass_score` the weighted sum."""
    pass_score: float | None = Field(None, ge=-MAX_SCORE, le=MAX_SCORE)
    """Least score with which a completion passes; unset: what the term gives a right completion. Without either
    key, and with no such term, there is no pass@k."""


class PromptSets(PromptSet):
    """Prompts that a run is evaluated on: one set, or several. `key` is where a spec has them."""

    key: ClassVar[str] = "eval"

    sets: tuple[EvalSet, ...] = ()
    """Several sets in place of one."""

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """Each set with all that holds for it."""
        if not self.sets:
            return (self._evaluation(self.key, self),)
        return tuple(self._evaluation(f"{self.key}.sets.{number}", one) for number, one in enumerate(self.sets))

    def _evaluation(self, key: str, table: EvalSet | PromptSets) -> Evaluation:
        own = {name: getattr(table, name) for name in EvalSet.model_fields}
        values = {name: getattr(self, name) if value is None else value for name, value in own.items()}
        return Evaluation(key=key, given=frozenset(table.model_fields_set), **values)


class EvalSection(PromptSets):
    """Evaluation on prompts that are not trained on: one set, or with `[[eval.sets]]` several."""

    every: int = Field(gt=0)
    """Steps between evaluations; one runs before the first step and after the last."""


class GenerateSection(PromptSets):
    """Completions of prompts, graded by `[reward]`: what the model does with what it learned. A prompt is written as
    the rows' are, by the keys of `[data]`. The section `[rollout]` says who samples."""

    key: ClassVar[str] = "eval.generate"

    data: PathText = ""
    """Where the prompts come from; empty: the rows that `[eval]` evaluates on, up to what the model is to write."""
    max_response_tokens: int = Field(gt=0)
    """Longest completion, in tokens."""
    max_prompt_tokens: int | None = Field(None, gt=0)
    """Longest prompt, in tokens; unset: `data.max_tokens`. A longer one is a bad row."""
    answer_column: NonEmpty = "answer"
    """Column that the built-in rewards compare with."""


@dataclass(frozen=True)
class PassThreshold:
    """The bar that a solved completion passes: a term's own value, or the weighted sum (None), of at least `score`."""

    term: int | None
    score: float

    @property
    def words(self) -> str:
        what = "its score" if self.term is None else f"reward.terms.{self.term}"
        return f"a completion passes when {what} is at least {self.score:g}"


class Evaluation(PromptSet):
    """One set of prompts with all that holds for it. `key`: where the spec says so; `given`: which keys it writes.
    Without `data` the rows are held out of `data.train`, or those of `[eval]`."""

    key: str
    given: frozenset[str] = frozenset()

    @property
    def samples(self) -> int:
        return self.prompts * self.samples_per_prompt

    def passes(self, terms: Sequence[RewardTerm]) -> PassThreshold | None:
        """Return the bar with these terms of a reward; None: it is not known."""
        term, score = self.pass_term, self.pass_score
        if term is None and score is None:
            grading = [number for number, one in enumerate(terms) if not one.is_penalty]
            term = grading[0] if len(grading) == 1 else None
        if score is None and term is not None and term < len(terms):
            score = terms[term].right_score
        return None if score is None else PassThreshold(term, score)

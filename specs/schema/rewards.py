"""The terms of a reward: a table for each `kind` of `[reward] terms`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import Url

from specs.schema.table import FunctionPath, NonEmpty, PathText, Table, unusable
from specs.templates import template_columns

MAX_SCORE = 1e18  # of a term and of the weighted sum: squares of it, and sums over a batch, are finite in float32
JUDGED_PARTS = 32  # of a batch that a rank of the reward role grades at once, where judges are asked


GradedBy = Literal["processes", "judge", "model", "environment"]


class RewardTerm(Table):
    """Keys that all reward terms share."""

    # What gives its scores: the isolated processes, requests to a judge, the reward model, or the environment.
    graded_by: ClassVar[GradedBy] = "processes"
    # Whether 0 is the best score, which most completions have.
    is_penalty: ClassVar[bool] = False
    # What it gives a right completion; None: not known.
    right_score: ClassVar[float | None] = None

    kind: str
    weight: float = Field(1.0, ge=-MAX_SCORE, le=MAX_SCORE)
    """Factor of this term in the weighted sum."""


class ExactMatch(RewardTerm):
    """1 when the completion, stripped, equals the row's answer; else 0."""

    right_score: ClassVar[float | None] = 1.0

    kind: Literal["exact_match"]
    partial: bool = False
    """Give the share of character positions that are right instead of 0 or 1."""
    ignore_case: bool = False
    """Compare without regard to case."""


class MathVerify(RewardTerm):
    """1 when `math-verify` finds the completion mathematically equal to the row's answer."""

    right_score: ClassVar[float | None] = 1.0

    kind: Literal["math_verify"]


class ReasoningGym(RewardTerm):
    """The score that the reasoning-gym data set of the row gives the completion, stripped, or what stands in its last
    `<answer>…</answer>`: 0 to 1."""

    right_score: ClassVar[float | None] = 1.0
    columns: ClassVar[tuple[str, ...]] = ("reasoning_gym",)

    kind: Literal["reasoning_gym"]


class Regex(RewardTerm):
    """1 when the pattern is found in the completion; else 0."""

    right_score: ClassVar[float | None] = 1.0

    kind: Literal["regex"]
    pattern: NonEmpty
    """Python regular expression, searched in the completion (dot matches newlines)."""


class Overlong(RewardTerm):
    """0 up to `limit - buffer` tokens, then falls linearly to -1 at the limit (DAPO, Yu et al. 2025, eq. 13)."""

    is_penalty: ClassVar[bool] = True

    kind: Literal["overlong"]
    buffer_tokens: int = Field(gt=0)
    """Length of the slope before `max_response_tokens`."""


class Function(RewardTerm):
    """A Python function `score(prompt, completion, row) -> float`."""

    kind: Literal["function"]
    path: FunctionPath
    """`file.py:name`, relative to the spec file."""


def _base_url(url: str) -> str:
    """`url`, if requests can go below it. Raises PydanticCustomError."""
    try:
        parts = Url(url)
    except ValueError:
        raise unusable("not a URL", "write it as https://host/v1") from None
    if parts.scheme not in ("http", "https") or not parts.host or url != url.strip():
        raise unusable("not an http or https URL with a host", "write it as https://host/v1")
    if parts.port == 0:
        raise unusable("port 0 is none", "write the server's port")
    if parts.username is not None or parts.password is not None:
        raise unusable("holds a user or a password, which the run directory would keep", "name a variable in key_env")
    if parts.query or parts.fragment:
        raise unusable("has a query or a fragment", "end it with the path, such as /v1")
    return url


class Judge(RewardTerm):
    """The score that a model behind an OpenAI-compatible endpoint gives the completion."""

    graded_by: ClassVar[GradedBy] = "judge"
    kind: Literal["judge"]
    base_url: Annotated[str, AfterValidator(_base_url)]
    """Address below which `/chat/completions` answers, such as `https://host/v1`."""
    model: NonEmpty
    """The model that judges, as the endpoint calls it."""
    prompt: NonEmpty
    """Text of the request: `{prompt}` is the text that the policy saw, `{completion}` what it wrote, `{answer}` the
    row's answer, `{column}` any other column of the row."""
    system: str = ""
    """System message put before it."""
    min_score: float = Field(ge=-MAX_SCORE, le=MAX_SCORE)
    """Least score; a lower one in a reply is a failed grade."""
    max_score: float = Field(ge=-MAX_SCORE, le=MAX_SCORE)
    """Highest score; a higher one in a reply is a failed grade."""
    score_pattern: str = ""
    """Regular expression whose first group is the score, of its last match in the reply; empty: the reply is the
    number, or JSON with `score_key`."""
    score_key: str = ""
    """Key of the JSON object in the reply that holds the score."""
    body: dict[NonEmpty, Any] = Field({"temperature": 0.0, "max_tokens": 512})
    """Add to the request; a table replaces this whole."""
    key_env: str = ""
    """Environment variable that holds the API key; empty: none is sent. The key itself is never written
    anywhere."""
    concurrency: int = Field(16, ge=1, le=256)
    """Requests at a time, of each node of the reward role."""
    timeout_s: float = Field(60.0, gt=0, le=3600)
    """Seconds for one request, from connecting to its end."""
    retries: int = Field(4, ge=0, le=20)
    """How often a request is sent again after a timeout, a lost connection, or status 408, 425, 429 or 5xx, after
    waits that double, or as long as `Retry-After` asks."""
    cache: bool = True
    """Keep replies on disk, and ask for each request once."""
    cache_file: PathText = ""
    """Where they are kept, relative to the spec file, for several runs too; empty: `judge_cache.sqlite` in the run
    directory. Each further node of the reward role has a file of its own, with its number in the name."""
    prompt_price: float = Field(0.0, ge=0)
    """Price of a million prompt tokens, for `reward/judge_cost`."""
    completion_price: float = Field(0.0, ge=0)
    """Price of a million completion tokens."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the row that its prompt names, beside what every judge is given."""
        return tuple(name for name in template_columns(self.prompt) if name not in ("prompt", "completion", "answer"))


class ModelScore(RewardTerm):
    """The score of the run's reward model, which `[reward_model]` describes."""

    graded_by: ClassVar[GradedBy] = "model"
    kind: Literal["model"]


class EnvironmentReward(RewardTerm):
    """The sum of what the environment gave: its turns' rewards and `get_reward`."""

    graded_by: ClassVar[GradedBy] = "environment"
    kind: Literal["environment"]


def compares_answer(terms: Sequence[RewardTerm]) -> bool:
    """Whether a term compares with the row's answer, so that every row needs one."""
    return any(
        isinstance(term, ExactMatch | MathVerify)
        or (isinstance(term, Judge) and "answer" in template_columns(term.prompt))
        for term in terms
    )


def reads_answer(terms: Sequence[RewardTerm]) -> bool:
    """Whether a row's answer is of use: a term compares with it, or a function is tried with it."""
    return compares_answer(terms) or any(isinstance(term, Function) for term in terms)


def judged_columns(terms: Sequence[RewardTerm]) -> tuple[str, ...]:
    """Columns of a row that judges are told, or that reasoning-gym scores by, so that every row needs them."""
    reading = (term for term in terms if isinstance(term, Judge | ReasoningGym))
    return tuple(dict.fromkeys(name for term in reading for name in term.columns))


def reads_whole_rows(terms: Sequence[RewardTerm]) -> bool:
    """Whether a term may look at any column of a row."""
    return any(isinstance(term, Function) for term in terms)


RewardTermTable = Annotated[
    ExactMatch | MathVerify | ReasoningGym | Regex | Overlong | Function | Judge | ModelScore | EnvironmentReward,
    Field(discriminator="kind"),
]

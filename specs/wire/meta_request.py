"""Requests that `check-config --probe` makes of a role's interpreter (`workers/offline/build_on_meta.py`), and
its replies."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from specs.schema.table import Table
from specs.wire.as_built import ModelBuilt
from specs.wire.finding import Finding

Level = Literal["meta", "run"]


class UpdateShape(Table):
    """How much a role computes in its trial update: sequences of full length."""

    sequences: int
    prompt_tokens: int
    response_tokens: int


class RoleRequest(Table):
    """One role: the body of its `build` verb, and how many ranks compute together."""

    body: dict[str, Any]
    ranks: int = 1
    shape: UpdateShape | None = None  # asks for a trial update
    loss: dict[str, Any] = Field({})  # of a learner's trial update
    sampling: dict[str, Any] = Field({})  # of a rollout's
    data: dict[str, Any] = Field({})  # of a role that scores: the data role's body, for rows to score


class ProbeRequest(Table):
    """The roles that one process examines."""

    roles: dict[str, RoleRequest]


class OneUpdate(Table):
    """Time and memory of a trial update. Memory is that of the device, or on the CPU of the whole process."""

    tokens: int  # that went through the model: a learner's batch, or what was generated
    build_s: float
    step_s: float
    before_GiB: float  # libraries alone
    peak_GiB: float


class Token(Table):
    """A token of the tokenizer."""

    id: int
    text: str


class Probed(Table):
    """Findings about one role. `model` is None for a role that holds none, and where an engine cannot say."""

    role: str
    model: ModelBuilt | None = None
    not_seen: tuple[str, ...] = ()  # fields of `model` that only a real start can show
    tokens: int | None = None  # of the tokenizer, for a role that holds one instead of a model
    highest: Token | None = None  # of that tokenizer
    ends: tuple[int, ...] | None = None  # tokens that end a completion, of a role that samples
    findings: tuple[Finding, ...] = ()
    one_update: OneUpdate | None = None
    seconds: float = 0.0
    error: str = ""
    hint: str = ""
    not_here: bool = False  # the error is of what this machine lacks

"""What `check-config --probe` asks of a role's interpreter (`workers/probe.py`), and what it is told."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from specs.as_built import ModelBuilt
from specs.table import Table

Level = Literal["meta", "run"]


class MicroStepShape(Table):
    """How much a role computes in its micro-step: sequences of full length."""

    sequences: int
    prompt_tokens: int
    response_tokens: int


class RoleRequest(Table):
    """One role: the body of its `build` verb, and how many ranks compute together."""

    body: dict[str, Any]
    ranks: int = 1
    shape: MicroStepShape | None = None  # asks for a micro-step
    algorithm: dict[str, Any] = Field({})  # of a learner's micro-step
    sampling: dict[str, Any] = Field({})  # of a rollout's


class ProbeRequest(Table):
    """What one process looks at, role by role."""

    roles: dict[str, RoleRequest]


class MicroStep(Table):
    """What a micro-step took. Memory is that of the device, or on the CPU of the whole process."""

    tokens: int  # that went through the model: a learner's batch, or what was generated
    build_s: float
    step_s: float
    before_GiB: float  # libraries alone
    peak_GiB: float


class Probed(Table):
    """What was found out about one role. `model` is None for the reward role, and where an engine cannot say."""

    role: str
    model: ModelBuilt | None = None
    not_seen: tuple[str, ...] = ()  # fields of `model` that only a real start can show
    tokens: int | None = None  # of the tokenizer, for the reward role
    micro_step: MicroStep | None = None
    seconds: float = 0.0
    error: str = ""
    hint: str = ""

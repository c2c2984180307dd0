"""Requests that `check-config --probe` makes of a role's interpreter (`workers/offline/build_on_meta.py`), and
its replies."""

from __future__ import annotations

from typing import Any

from specs.schema.table import Table
from specs.wire.as_built import ModelBuilt
from specs.wire.finding import Finding


class RoleRequest(Table):
    """One role: the body of its `build` verb, and how many ranks compute together."""

    body: dict[str, Any]
    ranks: int = 1


class ProbeRequest(Table):
    """The roles that one process examines."""

    roles: dict[str, RoleRequest]


class Probed(Table):
    """Findings about one role. `model` is None for a role that holds none, and where an engine cannot say."""

    role: str
    model: ModelBuilt | None = None
    not_seen: tuple[str, ...] = ()  # fields of `model` that only a real start can show
    tokens: int | None = None  # of the tokenizer, for a role that holds one instead of a model
    ends: tuple[int, ...] | None = None  # tokens that end a completion, of a role that samples
    answer_end: tuple[int, str] | None = None  # token with which the chat template ends an answer, of the data role
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    error: str = ""
    hint: str = ""
    not_here: bool = False  # the error is of what this machine lacks

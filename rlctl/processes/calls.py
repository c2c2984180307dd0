"""A call of a verb: what was sent to each rank of a role, and what has come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from specs.wire.batch import Batch, require_columns
from specs.wire.messages import COLUMNS, Kind, Message, Verb
from specs.wire.wire_tensors import Buffer

Body = BaseModel | Mapping[str, Any]  # one of specs/wire/bodies.py, or the JSON of one
Tensors = Mapping[str, NDArray[np.generic]] | Batch
# To the ranks of a role: the same to all of them, or one each.
Bodies = Body | Sequence[Body] | None
Blobs = Tensors | Sequence[Tensors] | None


@dataclass(eq=False)
class Call:
    """Handle of a posted verb. `result` waits; while it does, every rank of every role is watched."""

    verb: Verb
    number: int
    frames: list[list[Buffer]]  # as `ranks`; let go of once sent
    step: int | None
    timeout_s: float
    ranks: Sequence[int]
    tick: Callable[[], None]
    on_part: Callable[[Message], None] | None = None
    on_done: Callable[[Call], None] | None = None
    alone: bool = True  # its ranks serve nothing else meanwhile
    answers: dict[int, Message] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)  # ranks that will not answer (rlctl/processes/rank_states.py)
    released: bool = False  # its ranks know that they wait for one that has failed
    _deadline: float | None = None

    def __post_init__(self) -> None:
        self._missing = set(self.ranks)  # kept, not counted: with hundreds of ranks each answer would look at all

    @property
    def done(self) -> bool:
        """Return whether every rank has answered, or will not."""
        return not self._missing

    @property
    def sent(self) -> bool:
        return self._deadline is not None

    def sent_before(self, moment: float) -> bool:
        """Return whether it was sent before a time of the monotonic clock."""
        return self._deadline is not None and self._deadline - self.timeout_s < moment

    @property
    def missing(self) -> list[int]:
        """Return the ranks with a pending reply."""
        return sorted(self._missing)

    @property
    def overdue(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def result(self) -> list[Message]:
        """Return the answers by rank. Raise RoleFailure when a rank of any role fails meanwhile, and RanksFailed, when
        all others have answered, if one of its own failed that can be started again."""
        while self._missing:
            self.tick()
        if self.failed:
            raise RanksFailed(self)
        return [self.answers[rank] for rank in self.ranks]

    def start(self) -> list[list[Buffer]]:
        """Start the clock; return the frames to send, by rank."""
        self._deadline = time.monotonic() + self.timeout_s
        frames, self.frames = self.frames, []
        return frames

    def receive(self, rank: int, message: Message) -> None:
        """Hand on a PART, keep an ANSWER."""
        if message.kind is Kind.PART:
            assert self.on_part is not None, f"no handler for the parts of {self.verb}"
            self.on_part(message)
        else:
            self.answers[rank] = message
            self._missing.discard(rank)

    def fail(self, rank: int) -> None:
        """Wait for this rank no longer. What it has sent stays."""
        if rank in self.ranks and rank not in self.answers:
            self.failed.add(rank)
            self._missing.discard(rank)


class RanksFailed(Exception):
    """Some ranks that a call went to have failed, and can be started again; `call` has the answers of the others."""

    def __init__(self, call: Call) -> None:
        super().__init__(f"failed in verb {call.verb}: ranks {sorted(call.failed)}")
        self.call = call


def answers_of(call: Call) -> list[Message]:
    """Wait for a call; return the answers of the ranks that have not failed."""
    try:
        return call.result()
    except RanksFailed:
        return [call.answers[rank] for rank in call.ranks if rank in call.answers]


def frames_by_rank(verb: Verb, number: int, size: int, body: Bodies, tensors: Blobs) -> list[list[Buffer]]:
    """Return a request's frames for each rank. What is the same for all ranks is encoded once."""
    bodies, blobs = _per_rank("bodies", body, size), _per_rank("tensors", tensors, size)
    made: dict[tuple[int, int], list[Buffer]] = {}
    for each, columns in zip(bodies, blobs, strict=True):
        key = (id(each), id(columns))
        if key not in made:
            body_json = each.model_dump(mode="json") if isinstance(each, BaseModel) else each
            arrays = columns.columns if isinstance(columns, Batch) else columns
            require_columns(arrays, COLUMNS[verb].needs if verb in COLUMNS else (), verb)
            made[key] = Message(Kind.CALL, body_json, verb, number, arrays).frames()
    return [made[id(each), id(columns)] for each, columns in zip(bodies, blobs, strict=True)]


def _per_rank(what: str, value: Any, size: int) -> list[Any]:
    if value is None:
        value = {}
    if isinstance(value, Mapping | BaseModel | Batch):
        return [value] * size
    assert len(value) == size, f"{len(value)} {what} for {size} ranks"
    return list(value)

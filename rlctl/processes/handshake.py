"""Who may speak: a connection proves the run's secret before anything else it says is heard."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from specs.errors import ChannelError
from specs.wire.messages import Kind, Message, parse
from specs.wire.wire_tensors import Buffer
from workers.proof import Side, make_nonce, make_proof, same_proof

log = logging.getLogger("rlctl.processes.channel")

_MAX_PENDING = 256  # unproven connections remembered, or twice as many as ranks; the oldest is forgotten first
_MAX_UNPROVEN_BYTES = 4096
_MAX_TOLD = 20  # refusals that are logged


@dataclass(frozen=True)
class Member:
    """A rank that has proven itself, as it introduced itself."""

    role: str
    rank: int
    pid: int
    host: str


@dataclass(frozen=True)
class Outcome:
    """What an unproven connection's message leads to: a reply, and perhaps membership."""

    reply: Message | None = None
    member: Member | None = None


@dataclass(frozen=True)
class _Pending:
    who: Member
    rank_nonce: str
    driver_nonce: str


class Handshake:
    """The handshake of all connections. Holds no socket; see `workers/proof.py` for the exchange."""

    def __init__(self, secret: str, expected: Mapping[str, int], welcome: Mapping[str, float]) -> None:
        self._secret = secret
        self._expected = expected  # role → processes; the hub adds to it
        self._welcome = welcome
        self._pending: dict[bytes, _Pending] = {}
        self._members: set[tuple[str, int]] = set()
        self._refused: set[tuple[str, int]] = set()  # ranks that nobody may claim to be any more
        self.refused = 0

    def hear(self, identity: bytes, frames: list[Buffer]) -> Outcome:
        """Take one message of a connection that is not a member. Never raises: strangers cannot harm the run."""
        try:
            if len(frames) != 1 or len(frames[0]) > _MAX_UNPROVEN_BYTES:
                raise ChannelError("it sent something else than a handshake")
            message = parse(frames)
            if message.kind is Kind.HELLO:
                return Outcome(reply=self._challenge(identity, message))
            if message.kind is Kind.PROOF:
                return self._admit(identity, message)
            raise ChannelError(f"it sent {message.kind} before any proof")
        except ChannelError as error:
            self.refused += 1
            self._pending.pop(identity, None)
            if self.refused <= _MAX_TOLD:
                log.warning("refused a connection: %s", error.message)
            return Outcome(reply=Message(Kind.ERROR, {"message": error.message}))

    def forget(self, role: str, rank: int) -> None:
        """A rank is gone for good: a new process may take its place."""
        self._members.discard((role, rank))

    def refuse(self, role: str, rank: int) -> None:
        """A rank is gone for good, and no process may take its place."""
        self.forget(role, rank)
        self._refused.add((role, rank))

    def _challenge(self, identity: bytes, hello: Message) -> Message:
        try:
            said = hello.body
            who = Member(str(said["role"]), int(said["rank"]), int(said["pid"]), str(said["host"]))
            rank_nonce = str(said["nonce"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ChannelError("its greeting is incomplete") from None
        if not 0 <= who.rank < self._expected.get(who.role, 0) or (who.role, who.rank) in self._refused:
            raise ChannelError(f"this run expects no {who.role!r} rank {who.rank}")
        pending = _Pending(who, rank_nonce, make_nonce())
        self._pending[identity] = pending
        if len(self._pending) > max(_MAX_PENDING, 2 * sum(self._expected.values())):
            del self._pending[next(iter(self._pending))]
        return Message(Kind.CHALLENGE, {"nonce": pending.driver_nonce, "proof": self._proof("driver", pending)})

    def _admit(self, identity: bytes, message: Message) -> Outcome:
        pending = self._pending.pop(identity, None)
        if pending is None:
            raise ChannelError("it sent a proof that nobody asked for")
        if not same_proof(message.body.get("proof"), self._proof("rank", pending)):
            raise ChannelError(f"it claims to be {pending.who.role} rank {pending.who.rank} without this run's secret")
        place = (pending.who.role, pending.who.rank)
        if place in self._refused:
            raise ChannelError(f"the run goes on without {place[0]} rank {place[1]}")
        if place in self._members:
            raise ChannelError(f"{place[0]} rank {place[1]} is already here")
        self._members.add(place)
        return Outcome(reply=Message(Kind.WELCOME, dict(self._welcome)), member=pending.who)

    def _proof(self, side: Side, pending: _Pending) -> str:
        return make_proof(
            self._secret,
            side,
            role=pending.who.role,
            rank=pending.who.rank,
            rank_nonce=pending.rank_nonce,
            driver_nonce=pending.driver_nonce,
        )

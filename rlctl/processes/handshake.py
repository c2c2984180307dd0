"""Introduce a connection that holds the run's keys: which rank it is.

rank → driver   HELLO      role, rank, pid, host
driver → rank   WELCOME    heartbeat interval, and how much silence counts as death; or ERROR
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from specs.errors import ChannelError
from specs.wire.messages import Kind, Message, parse
from specs.wire.wire_tensors import Buffer

log = logging.getLogger("rlctl.processes.channel")


@dataclass(frozen=True)
class Member:
    """A rank that has joined, as it introduced itself."""

    role: str
    rank: int
    pid: int
    host: str


class Handshake:
    """Admits ranks that are expected, each once. Holds no socket."""

    def __init__(self, welcome: Mapping[str, float]) -> None:
        self._welcome = welcome
        self._expected: dict[str, int] = {}  # role → processes
        self._members: set[tuple[str, int]] = set()
        self._dropped: set[tuple[str, int]] = set()

    def expect(self, role: str, size: int) -> None:
        """Admit ranks 0 … size-1 of a role."""
        self._expected[role] = size

    def forget(self, role: str, rank: int) -> None:
        """Allow a new process to take the place of a rank that is gone."""
        self._members.discard((role, rank))

    def drop(self, role: str, rank: int) -> None:
        """Admit no process in the place of this rank any more."""
        self.forget(role, rank)
        self._dropped.add((role, rank))

    def hear(self, frames: list[Buffer]) -> tuple[Message, Member | None]:
        """Take a message of a connection that has not joined. Return the reply, and the rank where it joins."""
        try:
            member = self._admit(parse(frames))
        except ChannelError as error:
            log.warning("refused a connection: %s", error.message)
            return Message(Kind.ERROR, {"message": error.message}), None
        return Message(Kind.WELCOME, dict(self._welcome)), member

    def _admit(self, message: Message) -> Member:
        if message.kind is not Kind.HELLO:
            raise ChannelError(f"it sent {message.kind} before its greeting")
        try:
            body = message.body
            member = Member(str(body["role"]), int(body["rank"]), int(body["pid"]), str(body["host"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ChannelError("its greeting is incomplete") from None
        place = (member.role, member.rank)
        if not 0 <= member.rank < self._expected.get(member.role, 0):
            raise ChannelError(f"this run expects no {member.role!r} rank {member.rank}")
        if place in self._dropped:
            raise ChannelError(f"the run goes on without {member.role} rank {member.rank}")
        if place in self._members:
            raise ChannelError(f"{member.role} rank {member.rank} is already here")
        self._members.add(place)
        return member

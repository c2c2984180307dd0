"""The turns that an agent had written: which one a request continues, and which request was made before.

Agents send the whole conversation with each request. A turn's parent is found by what was said, never by tokens; then
the tokens that were sampled stand, and only what was added is rendered. A request that continues no turn is a root.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specs.schema.environment import StopReason
from workers.chat.chat_turns import AssistantTurn
from workers.gateway.chat_request import ChatReply, ChatRequest, digests, extended, retry_key, thoughts


@dataclass(eq=False)
class TreeTurn:
    """A turn of the model: what asked for it, where its tokens lie, and whether its reply has arrived."""

    id: str
    request: ChatRequest
    digests: Sequence[bytes]
    parent: TreeTurn | None
    reply: asyncio.Future[ChatReply]
    sample: int = -1  # number; -1: nothing was drawn
    start: int = 0  # of what was sampled, in the sample
    end: int = 0
    turn: AssistantTurn | None = None
    limit: StopReason | None = None  # of the episode, which truncated or refused it
    delivered: bool = False
    waiting: int = 0  # connections
    learned: bool = False
    asked: int = 1  # times

    @property
    def path(self) -> Sequence[TreeTurn]:
        """The turns of its conversation, from itself back to the root."""
        found = [self]
        while (parent := found[-1].parent) is not None:
            found.append(parent)
        return found

    @property
    def root(self) -> TreeTurn:
        return self.path[-1]

    @property
    def added(self) -> Sequence[Mapping[str, Any]]:
        """The messages behind the parent's turn."""
        return self.request.messages[0 if self.parent is None else len(self.parent.request.messages) + 1 :]


class TurnTree:
    """All turns of an episode."""

    def __init__(self, name: str) -> None:
        self._name, self._count = name, 0
        self.turns: list[TreeTurn] = []
        self._by_request: dict[tuple[bytes, int, str], list[TreeTurn]] = {}
        self._by_conversation: dict[bytes, list[TreeTurn]] = {}  # with the turn itself

    def find(self, request: ChatRequest, *, retried: bool = True) -> tuple[TreeTurn, bool]:
        """Return the turn that answers a request, and whether it is new. A request that equals one whose reply has not
        arrived is the same, unless the client never retries; one whose reply has arrived, or is waited for on another
        connection, asks for another turn."""
        found = digests(request)
        alike = self._by_request.setdefault(retry_key(request, found), [])
        for turn in alike if retried else ():
            if not turn.delivered and not turn.waiting and _may_be_equal(request, turn.request):
                turn.asked += 1
                return turn, False
        self._count += 1
        reply: asyncio.Future[ChatReply] = asyncio.get_running_loop().create_future()
        new = TreeTurn(f"{self._name}_{self._count}", request, found, self._parent(request, found), reply)
        self.turns.append(new)
        alike.append(new)
        return new, True

    def forget(self, turn: TreeTurn) -> None:
        """Drop a turn that could not be drawn: the same request is drawn again."""
        self.turns.remove(turn)
        self._by_request[retry_key(turn.request, turn.digests)].remove(turn)

    def drawn(self, turn: TreeTurn, reply: ChatReply) -> None:
        """Note what the model wrote; conversations can continue it now."""
        self._by_conversation.setdefault(extended(turn.digests[-1], reply), []).append(turn)

    def _parent(self, request: ChatRequest, found: Sequence[bytes]) -> TreeTurn | None:
        """Return the last turn of the conversation that was sampled here, where users and tools alone follow it."""
        for place in range(len(request.messages) - 1, 0, -1):
            if request.messages[place - 1]["role"] != "assistant":
                continue
            sent, alike = thoughts(request), reversed(self._by_conversation.get(found[place], ()))
            turns = {turn: _agreement(sent, turn) for turn in alike}
            best = max(turns, key=lambda turn: (turns[turn], turn.delivered), default=None)
            return best if best is not None and turns[best] >= 0 else None
        return None

    # ── what is learned from ──────────────────────────────────────────────────────────────────────

    def main_turns(self, task: str) -> list[TreeTurn]:
        """Return the turns of conversations about the task."""
        roots = self.main_roots(task)
        return [turn for turn in self.turns if turn.root in roots]

    def main_roots(self, task: str) -> list[TreeTurn]:
        """Return the roots that are about the task: a user's message holds its text, and no root has more tools. Where
        a client has rewritten the task, those with the most tools. Others that begin with the same tools and first
        message go on with it: of a history that a client has cut short, the task may be gone."""
        roots = [turn for turn in self.turns if turn.parent is None]
        found = [root for root in roots if task in _asked(root.request)] or roots
        most = max((len(root.request.tools) for root in found), default=0)
        begun = {root.digests[1] for root in found if len(root.request.tools) == most}
        return [root for root in roots if root.digests[1] in begun]


def _may_be_equal(request: ChatRequest, other: ChatRequest) -> bool:
    """Return whether requests that are equal but for thoughts have no two that differ."""
    return all(not mine or not its or mine == its for mine, its in zip(thoughts(request), thoughts(other), strict=True))


def _agreement(sent: Sequence[str], turn: TreeTurn) -> int:
    """Return how many thoughts, in this turn and before, are as a client sends them back; -1 where one is another."""
    known = {place: thought for place, thought in enumerate(thoughts(turn.root.request)) if thought}
    known |= {len(one.request.messages): one.reply.result().reasoning.strip() for one in turn.path}
    pairs = [(thought, known.get(place, thought)) for place, thought in enumerate(sent)]
    return -1 if any(thought and thought != own for thought, own in pairs) else sum(one == own for one, own in pairs)


def _asked(request: ChatRequest) -> str:
    said = (message["content"] for message in request.messages if message["role"] == "user")
    return "\0".join(said) if request.prompt is None else request.prompt

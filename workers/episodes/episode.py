"""One episode, top to bottom: the model's turns, and what its environment replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from specs.errors import ModelError
from specs.schema.environment import EnvironmentSection, StopReason
from workers.chat.chat_renderer import ChatTemplateError
from workers.chat.chat_turns import AssistantTurn, Chats, ChatTurns
from workers.environments.environment_pool import (
    Described,
    Environment,
    EnvironmentLost,
    EnvironmentPool,
    EnvironmentReply,
)
from workers.episodes.trajectory import Sample, SampledTurn, Task, Trajectory

T = TypeVar("T")
Draw = Callable[[Task, int, Sample, int], Awaitable[SampledTurn]]
"""Has a turn drawn: of a task, for the sample of this number, behind all of its tokens, of at most so many."""
Message = dict[str, Any]


class Ended(Exception):
    """The episode is over."""

    def __init__(self, stop: StopReason) -> None:
        super().__init__(stop)
        self.stop: StopReason = stop


@dataclass(eq=False)
class Episode:
    """An attempt at a task in an environment; one of an agent is another (`agent_episode.py`)."""

    task: Task
    section: EnvironmentSection
    described: Described
    chats: Chats
    draw: Draw
    turn_tokens: int  # of the longest turn

    def __post_init__(self) -> None:
        self.trajectory, self._of_row = Trajectory(self.task), len(self.task.messages)
        self._chat = self.chats(self.described.tools)
        self.longest = 0  # prompt that came up, in tokens

    async def run(self, pool: EnvironmentPool) -> Trajectory:
        """Play it to its end, whatever the environment does."""
        found = self.trajectory
        try:
            found.stop = await self._run(await pool.open())
        except (EnvironmentLost, ChatTemplateError, ModelError) as error:
            found.why = str(error)
        return found

    async def _run(self, environment: Environment) -> StopReason:
        reuse = False
        try:
            stop = await self._attempt(environment)
            reuse = True
            return stop
        except Ended as end:
            return end.stop
        finally:
            await environment.close(reuse=reuse)

    # ── turns ─────────────────────────────────────────────────────────────────────────────────────

    async def _attempt(self, environment: Environment) -> StopReason:
        try:
            stop = await self._play(environment)
        except Ended as end:
            if end.stop == "timeout":
                raise
            stop = end.stop
        if self.described.gives_reward:
            self.trajectory.add_reward(await self._call(environment.reward()))
        return stop

    async def _play(self, environment: Environment) -> StopReason:
        messages, answer = self.trajectory.messages, self._step if self.described.mode == "text" else self._use_tools
        task = self.task
        messages += await self._call(opening(environment, task.values, task.seed, task.messages))
        row = len(task.messages)
        self._of_row = row - (messages[:row] != [*task.messages])  # what `reset` adds to a message is not the data's
        number = self._branch(messages)
        while True:
            before = [*messages]
            turn, cut_off = await self._turn(self._chat, number)
            messages.append(turn.message)
            if cut_off:
                raise Ended(cut_off)
            replies, stop = await answer(environment, turn)
            messages += replies
            if stop is not None:
                return stop
            number = self._append(number, before, turn, replies)

    async def _turn(self, chat: ChatTurns, number: int, most: int = 0) -> tuple[AssistantTurn, StopReason | None]:
        """Have the model write a turn behind a sample, of at most `most` tokens where that is not 0. Return it, and the
        limit of the episode that truncated it."""
        found, sample = self.trajectory, self.trajectory.samples[number]
        limit = min(self.turn_tokens, self.section.max_episode_tokens - len(sample.tokens))
        asked = min(limit, most or limit)
        found.turns += 1
        drawn = await self.draw(self.task, number, sample, asked)
        turn = chat.read(drawn.tokens, finished=drawn.finished)
        cut_off = not drawn.finished and asked == limit
        malformed = bool(turn.error) and drawn.finished  # a limit may stand in the middle of a call
        found.parse_errors += malformed
        sample.add_turn(drawn, learn=not (malformed and self.section.on_parse_error == "mask"))
        if not cut_off:
            return turn, None
        return turn, "max_tokens" if limit == self.turn_tokens else "context_overflow"

    async def _step(self, environment: Environment, turn: AssistantTurn) -> tuple[list[Message], StopReason | None]:
        reply = await self._call(environment.step(turn.text))
        self._count(reply)
        stop: StopReason | None = "max_turns" if reply.truncated else "completed" if reply.done else None
        return reply.text if isinstance(reply.text, list) else [{"role": "user", "content": reply.text}], stop

    async def _use_tools(
        self, environment: Environment, turn: AssistantTurn
    ) -> tuple[list[Message], StopReason | None]:
        """Make the turn's calls, one after another."""
        if turn.error:
            ends = self.section.on_parse_error == "end"
            return ([], "parse_error") if ends else ([self._chat.error_reply(turn.error)], None)
        replies: list[Message] = []
        for call in turn.calls:
            if self.trajectory.tool_calls == self.section.max_tool_calls:
                return replies, "max_tool_calls"
            self.trajectory.tool_calls += 1
            reply = await self._call(environment.call(call.name, call.arguments))
            self._count(reply)
            replies.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": reply.text})
            if reply.done:
                return replies, "tool_stopped"
        return replies, None if turn.calls else "completed"

    def _count(self, reply: EnvironmentReply) -> None:
        self.trajectory.tool_errors += reply.error
        self.trajectory.add_reward(reply.reward)

    def _append(self, number: int, before: Sequence[Message], turn: AssistantTurn, replies: Sequence[Message]) -> int:
        """Let the replies follow what was sampled. Where the template rewrites earlier turns, begin another sample.
        Return the number of the sample that the next turn belongs to."""
        if self.section.history == "append":
            self._chat.check_history(replies)
        elif not self._chat.keeps(replies):
            return self._branch([*before, turn.message, *replies])
        sample, suffix = self.trajectory.samples[number], self._chat.suffix(before, turn, replies)
        self._check_limits(len(sample.tokens) + len(suffix))
        sample.append(suffix)
        return number

    def _branch(self, messages: Sequence[Message]) -> int:
        """Begin a sample with a conversation; return its number."""
        return self._begin(self._chat.prompt(messages, of_row=self._of_row))

    def _begin(self, tokens: list[int]) -> int:
        """Begin a sample; return its number."""
        self._check_limits(len(tokens))
        self.trajectory.samples.append(Sample(tokens))
        return len(self.trajectory.samples) - 1

    def _check_limits(self, tokens: int) -> None:
        """Raise Ended where the model gets no further turn, which would follow so many tokens."""
        if self.trajectory.turns >= self.section.max_turns:
            raise Ended("max_turns")
        self.longest = max(self.longest, tokens)
        if tokens >= self.section.max_episode_tokens:
            raise Ended("context_overflow")

    async def _call(self, call: Awaitable[T]) -> T:
        """Wait for the environment. Raises Ended where the episode's calls together take too long."""
        left_s = self.section.episode_timeout_s - self.trajectory.environment_s
        began = time.perf_counter()
        try:
            async with asyncio.timeout(max(left_s, 0.001)):
                return await call
        except TimeoutError:
            raise Ended("timeout") from None
        finally:
            self.trajectory.environment_s += time.perf_counter() - began


def usual_replies(mode: str, section: EnvironmentSection, chat: ChatTurns) -> list[Message]:
    """Return a reply of each kind that an environment's turns get; what an agent says is not known before."""
    if mode == "agent":
        return []
    if mode == "text":
        return [{"role": "user"}]
    return [{"role": "tool"}] + ([chat.error_reply("")] if section.on_parse_error != "end" else [])


async def opening(environment: Environment, row: Mapping[str, Any], seed: int, prompt: Sequence[Any]) -> list[Message]:
    """Reset an environment with a row of this prompt; return what the conversation begins with. Text that `reset` gave
    belongs to the user's last message."""
    observation = await environment.reset(row, seed, prompt)
    told = [] if environment.replaces_prompt else [dict(one) for one in prompt]
    if not observation:
        return told
    if isinstance(observation, list):
        return [*told, *observation]
    if told and told[-1]["role"] == "user" and isinstance(told[-1]["content"], str):
        told[-1]["content"] += observation
        return told
    return [*told, {"role": "user", "content": observation}]

"""One episode, top to bottom: the model's turns, and what its environment replies."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from specs.errors import ModelError
from specs.schema.environment import EnvironmentSection, StopReason
from workers.chat.chat_renderer import ChatTemplateError
from workers.chat.chat_turns import AssistantTurn, ChatTurns
from workers.environments.environment_pool import (
    Described,
    Environment,
    EnvironmentLost,
    EnvironmentPool,
    EnvironmentReply,
    Observation,
)
from workers.episodes.trajectory import Sample, SampledTurn, Task, Trajectory

T = TypeVar("T")
Draw = Callable[[Task, int, Sample, int], Awaitable[SampledTurn]]
"""Has a turn drawn: of a task, for the sample of this number, behind all of its tokens, of at most so many."""
Chats = Callable[[Sequence[Mapping[str, Any]]], ChatTurns]
"""Gives the chat template with some tools."""
Message = dict[str, Any]


class Ended(Exception):
    """The episode is over."""

    def __init__(self, stop: StopReason) -> None:
        super().__init__(stop)
        self.stop: StopReason = stop


class Episode:
    """An attempt at a task in an environment."""

    def __init__(
        self,
        task: Task,
        section: EnvironmentSection,
        described: Described,
        chats: Chats,
        draw: Draw,
        turn_tokens: int,
    ) -> None:
        """`turn_tokens`: of the longest turn."""
        self.task, self.section, self.described = task, section, described
        self._draw, self._turn_tokens = draw, turn_tokens
        self.trajectory, self._of_row = Trajectory(task), len(task.messages)
        self._chat = chats(described.tools)
        self._said: dict[int, tuple[list[Message], AssistantTurn]] = {}  # conversations of an agent, by sample

    async def run(self, pool: EnvironmentPool) -> Trajectory:
        """Play it to its end, whatever the environment does."""
        found = self.trajectory
        try:
            found.stop = await self._run(await pool.open())
        except EnvironmentLost as lost:
            found.why = f"{lost.cause}: {lost}"
        except (ChatTemplateError, ModelError) as refused:
            found.why = str(refused)
        return found

    async def _run(self, environment: Environment) -> StopReason:
        reuse = False
        try:
            stop = await (self._run_agent if self.described.mode == "agent" else self._run_turns)(environment)
            reuse = True
            return stop
        except Ended as end:
            return end.stop
        finally:
            await environment.close(reuse=reuse)

    # ── turns ─────────────────────────────────────────────────────────────────────────────────────

    async def _run_turns(self, environment: Environment) -> StopReason:
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
        messages += begun(self.task.messages, await self._call(environment.reset(self.task.values, self.task.seed)))
        row = self.task.messages
        self._of_row = len(row) - (messages[: len(row)] != [*row])  # what `reset` adds to a message is not the data's
        number = self._branch(messages)
        while True:
            before = [*messages]
            turn = await self._turn(number, messages)
            replies, stop = await answer(environment, turn)
            messages += replies
            if stop is not None:
                return stop
            number = self._append(number, before, turn, replies)

    async def _turn(self, number: int, messages: list[Message], most: int = 0) -> AssistantTurn:
        """Have the model write a turn, of at most `most` tokens where that is not 0, as the next message. Raises Ended
        where a limit of the episode cut it off."""
        found, sample = self.trajectory, self.trajectory.samples[number]
        limit = min(self._turn_tokens, self.section.max_episode_tokens - len(sample.tokens))
        asked = min(limit, most or limit)
        found.turns += 1
        drawn = await self._draw(self.task, number, sample, asked)
        turn = self._chat.read(drawn.tokens)
        messages.append(turn.message)
        cut_off = not drawn.finished and asked == limit
        malformed = bool(turn.error) and not cut_off
        found.parse_errors += malformed
        sample.add_turn(drawn, learn=not (malformed and self.section.on_parse_error == "mask"))
        if cut_off:
            raise Ended("max_tokens" if limit == self._turn_tokens else "context_overflow")
        return turn

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
            text = reply.text if isinstance(reply.text, str) else json.dumps(reply.text)
            replies.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text})
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
        tokens = self._chat.prompt(messages, of_row=self._of_row)
        self._check_limits(len(tokens))
        self.trajectory.samples.append(Sample(tokens))
        return len(self.trajectory.samples) - 1

    def _check_limits(self, tokens: int) -> None:
        """Raise Ended where the model gets no further turn, which would follow so many tokens."""
        if self.trajectory.turns >= self.section.max_turns:
            raise Ended("max_turns")
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

    # ── a loop of the user's own ──────────────────────────────────────────────────────────────────

    async def _run_agent(self, environment: Environment) -> StopReason:
        loop, limit_s = asyncio.get_running_loop(), self.section.episode_timeout_s
        began = since = loop.time()
        chats, drawing_s = 0, 0.0  # that wait for the sampler, since then; the sampler's time is not the agent's
        ended: StopReason | None = None  # why the agent's last request was refused

        async def chat(request: Mapping[str, Any]) -> Mapping[str, Any]:
            nonlocal chats, drawing_s, ended, since
            if not chats:
                since = loop.time()
                limit.reschedule(None)
            chats += 1
            try:
                message, ended = await self._reply(request), None
                return message
            except Ended as end:
                ended = end.stop
                raise
            finally:
                chats -= 1
                if not chats:
                    drawing_s += loop.time() - since
                    with suppress(RuntimeError):  # the agent did not wait for it
                        limit.reschedule(began + drawing_s + limit_s)

        try:
            async with asyncio.timeout_at(began + limit_s) as limit:
                found = await environment.run_agent({**self.task.values, "messages": [*self.task.messages]}, chat)
        except TimeoutError:
            raise Ended("timeout") from None
        finally:
            self.trajectory.environment_s = (since if chats else loop.time()) - began - drawing_s
        self.trajectory.metrics = {name: float(value) for name, value in found.get("metrics", {}).items()}
        self.trajectory.add_reward(found.get("reward"))
        return ended or "completed"

    async def _reply(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer `client.chat`. Messages that go on where a turn ended are appended to what was sampled; others begin
        another sample of the rollout."""
        messages, most = _requested(request)
        self.trajectory.messages = messages
        number = next((number for number, (said, _) in self._said.items() if _goes_on(said, messages)), None)
        if number is None:
            number = self._branch(messages)
        else:
            said, turn = self._said.pop(number)
            number = self._append(number, said[:-1], turn, messages[len(said) :])
        turn = await self._turn(number, messages, most)
        self._said[number] = messages, turn
        return turn.message


def _requested(request: Mapping[str, Any]) -> tuple[list[Message], int]:
    """Return the messages of `client.chat` and the most tokens that it asks for, 0 without. Raises EnvironmentLost for
    what are none."""
    messages, most = request["messages"], request["max_tokens"]
    each = messages if isinstance(messages, list) else []
    if not each or not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in each):
        raise EnvironmentLost("crash", "client.chat takes a list of messages, each a dict with role and content")
    if any("content" not in one and one["role"] != "assistant" for one in each):
        raise EnvironmentLost("crash", "client.chat was given a message without content")
    if most is not None and (type(most) is not int or most < 1):
        raise EnvironmentLost("crash", f"client.chat: max_tokens = {most} is no number of tokens")
    return [dict(one) for one in each], most or 0


def usual_replies(mode: str, section: EnvironmentSection, chat: ChatTurns) -> list[Message]:
    """Return a reply of each kind that an environment's turns get; what an agent says is not known before."""
    if mode == "agent":
        return []
    if mode == "text":
        return [{"role": "user"}]
    return [{"role": "tool"}] + ([chat.error_reply("")] if section.on_parse_error != "end" else [])


def _goes_on(said: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Return whether messages are a conversation and replies to its last turn."""
    more = messages[len(said) :]
    return bool(more) and messages[: len(said)] == said and all(one["role"] != "assistant" for one in more)


def begun(messages: Sequence[Mapping[str, Any]], observation: Observation) -> list[Message]:
    """Return the conversation with what `reset` gave: text belongs to the user's last message."""
    told, content = [dict(one) for one in messages], observation.content
    if not content:
        return told
    if isinstance(content, list):
        return [*told, *content]
    if told and told[-1]["role"] == "user" and isinstance(told[-1]["content"], str):
        told[-1]["content"] += content
        return told
    return [*told, {"role": "user", "content": content}]

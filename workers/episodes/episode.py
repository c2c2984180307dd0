"""One episode, top to bottom: the model's turns, and what its environment replies."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from specs.schema.environment import EnvironmentSection, StopReason
from workers.chat_renderer import ChatTemplateError
from workers.environments.pool import Described, Environment, EnvironmentLost, EnvironmentPool, Observation, Reply
from workers.episodes.chat_turns import AssistantTurn, ChatTurns
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
        self._chats, self._draw, self._turn_tokens = chats, draw, turn_tokens
        self.trajectory = Trajectory(task)
        self._chat = chats(described.tools)
        self._last: AssistantTurn | None = None

    async def run(self, pool: EnvironmentPool) -> Trajectory:
        """Play it to its end, whatever the environment does."""
        found = self.trajectory
        environment = await pool.open()
        reuse = False
        try:
            found.stop = await (self._run_agent if self.described.mode == "agent" else self._run_turns)(environment)
            reuse = True
        except Ended as end:
            found.stop = end.stop
        except EnvironmentLost as lost:
            found.stop, found.why = "environment_lost", f"{lost.cause}: {lost}"
        except ChatTemplateError as refused:
            found.stop, found.why = "environment_lost", str(refused)
        finally:
            await environment.close(reuse=reuse)
        return found

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
        messages += _begun(self.task.messages, await self._call(environment.reset(self.task.values, self.task.seed)))
        self._branch(messages)
        while True:
            turn = await self._turn()
            before = [*messages]
            messages.append(turn.message)
            replies, stop = await answer(environment, turn)
            messages += replies
            if stop is not None:
                return stop
            self._append(before, turn, replies)

    async def _turn(self) -> AssistantTurn:
        """Have the model write a turn. Raises Ended where there is no room for one, or it was cut off."""
        found, sample = self.trajectory, self.trajectory.samples[-1]
        room = self.section.max_episode_tokens - len(sample.tokens)
        if found.turns == self.section.max_turns:
            raise Ended("max_turns")
        if room < 1:
            raise Ended("context_overflow")
        drawn = await self._draw(self.task, len(found.samples) - 1, sample, min(self._turn_tokens, room))
        turn = self._chat.read(drawn.tokens)
        found.turns += 1
        found.parse_errors += bool(turn.error)
        sample.add_turn(drawn, learn=not (turn.error and self.section.on_parse_error == "mask"))
        if not drawn.finished:
            found.messages.append(turn.message)
            raise Ended("max_tokens" if len(drawn.tokens) == self._turn_tokens else "context_overflow")
        return turn

    async def _step(self, environment: Environment, turn: AssistantTurn) -> tuple[list[Message], StopReason | None]:
        reply = await self._call(environment.step(turn.text))
        self._count(reply)
        stop: StopReason | None = "completed" if reply.done else "max_turns" if reply.truncated else None
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

    def _count(self, reply: Reply) -> None:
        self.trajectory.tool_errors += reply.error
        self.trajectory.add_reward(reply.reward)

    def _append(self, before: Sequence[Message], turn: AssistantTurn, replies: Sequence[Message]) -> None:
        """Let the replies follow what was sampled. Where the template rewrites earlier turns, begin another sample."""
        if self.section.history == "branch" and not self._chat.keeps(replies):
            self._branch([*before, turn.message, *replies])
            return
        sample, suffix = self.trajectory.samples[-1], self._chat.suffix(before, turn, replies)
        if len(sample.tokens) + len(suffix) >= self.section.max_episode_tokens:
            raise Ended("context_overflow")
        sample.append(suffix)

    def _branch(self, messages: Sequence[Message]) -> None:
        """Begin a sample with a conversation."""
        tokens = self._chat.prompt(messages, of_row=len(self.task.messages))
        if len(tokens) >= self.section.max_episode_tokens:
            raise Ended("context_overflow")
        self.trajectory.samples.append(Sample(tokens))

    async def _call(self, call: Awaitable[T]) -> T:
        """Wait for the environment. Raises Ended where the episode's calls together take too long."""
        left_s = self.section.episode_timeout_s - self.trajectory.environment_s
        began = time.perf_counter()
        try:
            return await asyncio.wait_for(call, max(left_s, 0.001))
        except TimeoutError:
            raise Ended("timeout") from None
        finally:
            self.trajectory.environment_s += time.perf_counter() - began

    # ── a loop of the user's own ──────────────────────────────────────────────────────────────────

    async def _run_agent(self, environment: Environment) -> StopReason:
        loop = asyncio.get_running_loop()
        drawing_s = 0.0  # the sampler's time is not the agent's

        async def chat(request: Mapping[str, Any]) -> Mapping[str, Any]:
            nonlocal drawing_s
            began, until = loop.time(), limit.when()
            limit.reschedule(None)
            try:
                return await self._reply(request)
            finally:
                drawing_s += loop.time() - began
                limit.reschedule(None if until is None else until + loop.time() - began)

        began = loop.time()
        try:
            async with asyncio.timeout(self.section.episode_timeout_s) as limit:
                found = await environment.run_agent({**self.task.values, "messages": [*self.task.messages]}, chat)
        except TimeoutError:
            raise Ended("timeout") from None
        finally:
            self.trajectory.environment_s = loop.time() - began - drawing_s
        self.trajectory.metrics = {name: float(value) for name, value in found.get("metrics", {}).items()}
        self.trajectory.add_reward(found.get("reward"))
        return "completed"

    async def _reply(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer `client.chat`. Messages that go on where the last turn ended are appended to what was sampled; others
        begin another sample of the rollout."""
        messages, known = [dict(one) for one in request["messages"]], self.trajectory.messages
        self._chat = self._chats(tuple(request.get("tools") or ()))
        more = messages[len(known) :]
        goes_on = messages[: len(known)] == known and more and all(one["role"] != "assistant" for one in more)
        if self._last is not None and goes_on:
            self._append(known[:-1], self._last, more)
        else:
            self._branch(messages)
        self.trajectory.messages = messages
        self._last = await self._turn()
        messages.append(self._last.message)
        return self._last.message


def _begun(messages: Sequence[Mapping[str, Any]], observation: Observation) -> list[Message]:
    """Return the conversation with what `reset` gave: text belongs to the user's last message."""
    begun, content = [dict(one) for one in messages], observation.content
    if not content:
        return begun
    if isinstance(content, list):
        return [*begun, *content]
    if begun and begun[-1]["role"] == "user" and isinstance(begun[-1]["content"], str):
        begun[-1]["content"] += content
        return begun
    return [*begun, {"role": "user", "content": content}]

"""An episode of an agent: its own loop asks for turns, by `client.chat` or by the gateway's addresses, in any order.

What is learned from is settled at the end. Tokens that two samples share are learned from in the first of them.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specs.errors import ModelError
from specs.schema.environment import AgentCommand, StopReason
from workers.chat.chat_renderer import ChatTemplateError
from workers.chat.chat_turns import AssistantTurn, ChatTurns, split_thought
from workers.environments.environment_pool import Environment, EnvironmentLost
from workers.environments.harness import prompt_of
from workers.episodes.episode import Ended, Episode
from workers.gateway.chat_request import ChatReply, ChatRequest, FailedRequest, RefusedRequest
from workers.gateway.openai_chat import OpenAIChat
from workers.gateway.turn_tree import TreeTurn, TurnTree
from workers.grading.child import one_line

if TYPE_CHECKING:
    from workers.gateway.gateway_server import Gateway

_GRACE_S = 10.0  # for a program to end by itself, after it was told that the episode is over
_OVER: Mapping[str, str] = {
    "max_turns": "all of its turns are used",
    "max_tool_calls": "all of its tool calls are used",
    "context_overflow": "there is no room for another turn",
    "max_tokens": "the last turn was truncated",
    "timeout": "its time is used",
}


@dataclass(eq=False)
class AgentEpisode(Episode):
    """An attempt at a task by an agent of the user's."""

    gateway: Gateway
    needs_reward: bool = False  # of a function: the run's reward has it as a term

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tree = TurnTree(f"{self.task.group}_{self.task.rollout}")
        self._ended: StopReason | None = None  # the limit that the last request met
        self._refused = ""  # the last request that could not be answered, and why
        self._defect = ""  # of ours, which a request met
        self._tasks: set[asyncio.Task[None]] = set()
        self._limit: asyncio.Timeout | None = None  # of the agent's own time; the sampler's is not counted
        self._began = self._since = 0.0
        self._drawing, self._drawing_s = 0, 0.0
        self._told = asyncio.Event()  # that the episode is over

    # ── the agent ─────────────────────────────────────────────────────────────────────────────────

    async def _attempt(self, environment: Environment) -> StopReason:
        variables = self.gateway.open(self)
        watching = asyncio.create_task(self._stop_in_time(environment)) if self.section.command else None
        try:
            found = await self._run_agent(environment, variables)
        finally:
            self.gateway.shut(self)
            for task in (*self._tasks, *([watching] if watching else [])):
                task.cancel()
            self.settle()
        if self._defect:
            raise EnvironmentLost("crash", self._defect)
        if self.section.command:
            self._check_program(found)
            await self._grade(environment, self.section.command)
        else:
            self.trajectory.metrics = {name: float(value) for name, value in found.get("metrics", {}).items()}
            if self.needs_reward and found.get("reward") is None and self._ended is None:
                raise EnvironmentLost("crash", 'the agent gave no reward: have it return a number, or {"reward": …}')
            self._add_reward(found.get("reward"))
        return self._ended or "completed"

    async def _grade(self, environment: Environment, command: AgentCommand) -> None:
        """Have a program's reward given, and its working directory kept where the spec asks for it."""
        try:
            if self.described.gives_reward:
                self._add_reward(await self._call(environment.reward(self.trajectory.messages)))
        finally:
            if command.keep_cwd:
                self.trajectory.notes["cwd"] = str(await environment.keep(str(self.task.id)))

    def _check_program(self, found: Mapping[str, Any]) -> None:
        """Keep what a program left. Raises EnvironmentLost where it gave up."""
        code, last = found["exit_code"], found["output"].rstrip().rpartition("\n")[2]
        self.trajectory.notes |= {"exit_code": code, "output": found["output"]}
        said = f"the agent ended with exit code {code}"
        if not self.tree.turns and self._ended is None:
            why = f": its request was refused: {self._refused}" if self._refused else " before it asked the model"
            raise EnvironmentLost("crash", f"{said}{why}{f': {last}' if last and not self._refused else ''}")
        if code < 0 and self._ended is None:
            raise EnvironmentLost("crash", f"{said}: it was killed")
        main = self._main()
        if main and not main[-1].delivered and not self._told.is_set():
            raise EnvironmentLost("crash", f"{said}, and had not waited for the model's last reply")

    async def _stop_in_time(self, environment: Environment) -> None:
        await self._told.wait()
        await asyncio.sleep(_GRACE_S)
        environment.stop_agent()

    async def _run_agent(self, environment: Environment, variables: Mapping[str, str]) -> dict[str, Any]:
        """Have the agent run to its end. Raises Ended where that takes too long."""
        loop = asyncio.get_running_loop()
        self._began = self._since = loop.time()
        task = {**self.task.values, "messages": [*self.task.messages]}
        try:
            async with asyncio.timeout_at(self._began + self.section.episode_timeout_s) as self._limit:
                return await environment.run_agent(task, self._chat_client, variables)
        except TimeoutError:
            raise Ended("timeout") from None
        finally:
            until = self._since if self._drawing else loop.time()
            self.trajectory.environment_s = until - self._began - self._drawing_s

    async def _chat_client(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer `client.chat`, whose requests are those of OpenAI's chat. Raises Ended where a limit allows no more,
        or truncated the turn, and EnvironmentLost for what is no request."""
        try:
            turn = self.ask(replace(OpenAIChat().read(request), wire="client.chat"), retried=False)
            reply = await asyncio.shield(turn.reply)
        except RefusedRequest as refused:
            raise EnvironmentLost("crash", f"client.chat: {refused}") from None
        turn.delivered = True
        if turn.limit and (reply.ended or turn.limit == "max_tokens"):
            raise Ended(turn.limit)
        assert turn.turn is not None
        return turn.turn.message

    # ── its requests ──────────────────────────────────────────────────────────────────────────────

    def ask(self, request: ChatRequest, *, retried: bool = True) -> TreeTurn:
        """Return the turn that answers a request. Await its `reply` behind a shield: others may wait for it too.
        Whoever has handed it on to its end sets `delivered`. `retried`: an equal request may be this one again."""
        turn, new = self.tree.find(request, retried=retried)
        if new:
            task = asyncio.create_task(self._answer(turn))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return turn

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the length of the prompt that a request would be. Raises RefusedRequest."""
        try:
            return len(self._prompt(self.chats(request.tools), request))
        except (ModelError, ChatTemplateError) as error:
            raise RefusedRequest(str(error)) from None

    def note_refusal(self, why: str) -> None:
        """Note that a request could not be answered, for whoever asks why nothing came of the episode."""
        self._refused = why

    async def _answer(self, turn: TreeTurn) -> None:
        try:
            reply = await self._reply(turn)
        except Ended as end:
            self._ended = turn.limit = end.stop
            self._told.set()
            self.tree.forget(turn)
            text = f"The episode is over: {_OVER.get(end.stop, end.stop)}."
            turn.reply.set_result(ChatReply(turn.id, text, ended=end.stop))
        except Exception as error:
            self.tree.forget(turn)
            turn.reply.set_exception(self._refusal(error))
            turn.reply.exception()  # it counts as seen: the client may be gone
        except BaseException:
            self.tree.forget(turn)
            turn.reply.cancel()
            raise
        else:
            turn.reply.set_result(reply)
            self.tree.drawn(turn, reply)

    def _refusal(self, error: Exception) -> RefusedRequest:
        """Return what a client hears of a turn that could not be drawn. A defect of ours costs the episode, too."""
        if isinstance(error, RefusedRequest):
            return error
        if isinstance(error, ModelError | ChatTemplateError):
            return RefusedRequest(str(error))
        traceback.print_exception(error)
        self._defect = f"a request failed: {one_line(error)}"
        return FailedRequest(self._defect)

    async def _reply(self, turn: TreeTurn) -> ChatReply:
        request = turn.request
        if self.trajectory.tool_calls > self.section.max_tool_calls:
            raise Ended("max_tool_calls")
        chat = self.chats(request.tools)
        number = self._place(turn, chat)
        sample = self.trajectory.samples[number]
        turn.start = turn.end = len(sample.tokens)
        before = self._ended
        self._begin_drawing()
        try:
            read, turn.limit = await self._turn(chat, number, request.max_tokens)
        finally:
            self._end_drawing()
        if self._ended == before and turn in self._work():  # else a limit was met beside it
            self._ended = turn.limit
        turn.sample, turn.end = number, len(sample.tokens)
        if request.prompt is not None:
            read = replace(read, message={"role": "assistant", "content": read.text}, calls=(), error="")
        turn.turn = chat.numbered(read, self.trajectory.tool_calls)
        self.trajectory.tool_calls += len(read.calls)
        return self._as_reply(turn, turn.turn)

    def _main(self) -> Sequence[TreeTurn]:
        return self.tree.main_turns(prompt_of(self.task.messages))

    def _work(self) -> Sequence[TreeTurn]:
        """Return the turns that are the agent's work, as far as is known."""
        return self.tree.turns if self.section.learn_from == "all" else self._main()

    def _place(self, turn: TreeTurn, chat: ChatTurns) -> int:
        """Return the number of the sample that a turn belongs to, with all that stands before it."""
        parent = turn.parent
        if parent is not None and parent.turn is not None:
            before, replies = parent.request.messages, turn.added
            if self.section.history == "append":
                chat.check_history(replies)
            if chat.keeps(replies):
                sample, suffix = self.trajectory.samples[parent.sample], chat.suffix(before, parent.turn, replies)
                if len(sample.tokens) > parent.end:
                    return self._begin([*sample.tokens[: parent.end], *suffix])
                self._check_limits(parent.end + len(suffix))
                sample.append(suffix)
                return parent.sample
        return self._begin(self._prompt(chat, turn.request))

    def _prompt(self, chat: ChatTurns, request: ChatRequest) -> list[int]:
        if request.prompt is not None:
            return chat.plain_prompt(request.prompt)
        # What a client says of itself may hold control tokens; what it has read must not become any.
        return chat.prompt(request.messages, of_row=int(request.messages[0]["role"] == "system"))

    def _as_reply(self, turn: TreeTurn, read: AssistantTurn) -> ChatReply:
        thought, content = "", read.message["content"]
        parent, samples = turn.parent, self.trajectory.samples
        reused = parent.end if parent is not None else 0
        if parent is not None and parent.sample != turn.sample:
            before, now = (samples[one.sample].tokens[:reused] for one in (parent, turn))
            reused = reused if before == now else 0  # the template has rewritten what was said
        if turn.request.prompt is None and "reasoning_content" not in read.message:
            thought, content = split_thought(content)
        return ChatReply(
            id=turn.id,
            content=content,
            reasoning=read.message.get("reasoning_content", "") or thought,
            calls=read.calls,
            finish="stop" if read.finished else "length",
            prompt_tokens=turn.start,
            reused_tokens=reused,
            completion_tokens=turn.end - turn.start,
        )

    # ── the sampler's time ────────────────────────────────────────────────────────────────────────

    def _begin_drawing(self) -> None:
        if not self._drawing:
            self._since = asyncio.get_running_loop().time()
            if self._limit is not None:
                self._limit.reschedule(None)
        self._drawing += 1

    def _end_drawing(self) -> None:
        self._drawing -= 1
        if not self._drawing:
            self._drawing_s += asyncio.get_running_loop().time() - self._since
            if self._limit is not None:
                with suppress(RuntimeError):  # the agent did not wait for it
                    self._limit.reschedule(self._began + self._drawing_s + self.section.episode_timeout_s)

    # ── what is learned from ──────────────────────────────────────────────────────────────────────

    def settle(self) -> None:
        """Take off the mask what is not the agent's work at its task, and what nobody has read; keep the conversation
        that the task ended with."""
        main, work = self._main(), self._work()
        continued = {turn.parent for turn in self.tree.turns}  # read, whatever became of the connection afterwards
        for turn in self.tree.turns:
            turn.learned = (turn.delivered or turn in continued) and turn in work
            if turn.turn is not None and not turn.learned:
                self.trajectory.samples[turn.sample].mask[turn.start : turn.end] = [0] * (turn.end - turn.start)
        self.trajectory.notes["requests"] = [
            {
                "wire": turn.request.wire,
                "sample": turn.sample,
                "tokens": turn.end - turn.start,
                "tools": len(turn.request.tools),
                "root": turn.parent is None,
                "asked": turn.asked,
                "delivered": turn.delivered,
                "learned": turn.learned,
                "headers": dict(turn.request.headers),
            }
            for turn in self.tree.turns
        ]
        last = next((turn for turn in reversed(main) if turn.turn is not None), None)
        if last is not None and last.turn is not None:
            self.trajectory.messages = [*last.request.messages, last.turn.message]

    def _add_reward(self, reward: float | None) -> None:
        """Credit the agent's last turn at its task."""
        learned = [n for n, sample in enumerate(self.trajectory.samples) if any(sample.mask)]
        self.trajectory.add_reward(reward, learned[-1] if learned else -1)

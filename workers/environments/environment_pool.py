"""Hold users' environments in isolated processes, each serving one episode at a time; all of it in one event loop.

An episode whose process hangs, dies or is cancelled is lost; the others, and the pool, are not.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from specs.errors import RewardError
from specs.schema.environment import EnvironmentSection
from workers.environments.environment_process import EnvironmentLost as EnvironmentLost
from workers.environments.environment_process import EnvironmentProcess, ZygoteHandle
from workers.environments.harness import remove_folder
from workers.grading.grader_process import KILL_WAIT_S, encode
from workers.grading.reward_sources import read_sources
from workers.watchdog import kill_marked

_MARK = "RLCTL_ENVIRONMENTS"

Chat = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
Observation = str | list[dict[str, Any]] | None
"""Text, messages or nothing, as `reset` returned it."""


@dataclass(frozen=True)
class Described:
    """Describe the user's code. `tools` are as chat templates take them; `gives_reward`: it has `get_reward`."""

    mode: Literal["tools", "text", "agent"]
    tools: tuple[dict[str, Any], ...]
    gives_reward: bool


@dataclass(frozen=True)
class EnvironmentReply:
    """Hold what a call returned. `error`: the tool raised, or there is no such tool; the text is for the model."""

    text: str | list[dict[str, Any]]
    reward: float | None
    done: bool
    truncated: bool = False
    error: bool = False


class EnvironmentPool:
    """At most `section.processes` environments that are open at once."""

    def __init__(
        self,
        section: EnvironmentSection,
        base: str,
        *,
        log_path: Path,
        sources: Mapping[str, str] | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        """`base`: the folder that relative files start at. `sources`: the code of the section's files (`read_sources`);
        None: as it is now."""
        command = section.command.model_dump() if section.command else None
        setup = {"path": section.path, "tools": section.tools, "agent": section.loop, "base": base, "command": command}
        sources = read_sources(section.files, base) if sources is None else dict(sources)
        self.folders = Path(tempfile.mkdtemp(prefix="rlctl-agents-")) if command else None
        hello = {"setup": setup, "sources": sources, "memory_MiB": section.memory_MiB, "folder": self.folders or ""}
        self._hello = encode(hello)
        self.call_timeout_s, self.start_timeout_s, self.log_path = section.call_timeout_s, start_timeout_s, log_path
        self._servers = ", ".join(tool for tool in section.tools if tool not in section.files)
        self._env = {_MARK: secrets.token_hex(8)}
        self._slots = asyncio.Semaphore(section.processes)
        self._starting = asyncio.Semaphore(max(os.cpu_count() or 1, 2))
        self._zygote: ZygoteHandle | None = None
        self._zygote_lock = asyncio.Lock()
        self._idle: list[EnvironmentProcess] = []
        self._numbers = itertools.count()
        self._closed = False

    async def start(self) -> Described:
        """Return what the user's code is. Raises RewardError where it cannot be run."""
        try:
            process = await self._fork()
        except BaseException as error:
            await self.close()
            if isinstance(error, EnvironmentLost):
                hint = error.hint or f"see {self.log_path}"
                raise RewardError(f"the environment cannot start: {error}", hint=hint) from None
            raise
        self._idle.append(process)
        return Described(**{**process.description, "tools": tuple(process.description["tools"])})

    async def open(self) -> Environment:
        """Return an environment, as soon as fewer than its processes are open. Raises EnvironmentLost."""
        await self._slots.acquire()
        try:
            while self._idle:
                process = self._idle.pop()
                if not process.dead:
                    return Environment(self, process)
            return Environment(self, await self._fork())
        except BaseException:
            self._slots.release()
            raise

    async def close(self) -> None:
        """End all processes, also those of open environments, and whatever they started."""
        self._closed = True
        if self._zygote is not None:
            await self._zygote.end()
        await asyncio.to_thread(kill_marked, f"{_MARK}={self._env[_MARK]}", KILL_WAIT_S)
        if self.folders is not None:
            await asyncio.to_thread(remove_folder, self.folders)

    async def _fork(self) -> EnvironmentProcess:
        async with self._starting:
            try:
                async with asyncio.timeout(self.start_timeout_s):
                    zygote = await self._ready_zygote()
                    return await EnvironmentProcess.fork(zygote)
            except TimeoutError:
                text, hint = f"not ready after {self.start_timeout_s:g} s", ""
                if self._servers and self._zygote is not None and self._zygote.ready.done():  # the files are imported
                    text, hint = f"{text}: {self._servers}", "run the command by hand: it must answer on its stdout"
                raise EnvironmentLost("timeout", text, hint) from None

    async def _ready_zygote(self) -> ZygoteHandle:
        """Return the process that forks; one that ended is replaced."""
        async with self._zygote_lock:
            if self._closed:
                raise RewardError("the pool is closed")
            if self._zygote is None or self._zygote.gone:
                self._zygote = ZygoteHandle(self._hello, self.log_path, self._env)
            await asyncio.shield(self._zygote.ready)
            return self._zygote

    def new_folder(self) -> Path | None:
        """Return where an episode of an agent that is a program can put its files; it is removed with its environment.
        None for all others."""
        return None if self.folders is None else self.folders / str(next(self._numbers))

    def _take_back(self, process: EnvironmentProcess, clean: bool) -> None:
        if clean and not process.dead and not self._closed:
            self._idle.append(process)
        else:
            process.kill()
        self._slots.release()


class Environment:
    """One episode's environment. One call at a time; a call that is cancelled, or raises, ends its process."""

    def __init__(self, pool: EnvironmentPool, process: EnvironmentProcess) -> None:
        self._pool, self._process = pool, process
        self.folder = pool.new_folder()
        self.replaces_prompt = False  # what `reset` returned is all of the conversation
        self._closed = False

    async def reset(self, row: Mapping[str, Any], seed: int, messages: Sequence[Mapping[str, Any]] = ()) -> Observation:
        """Begin an episode with a row of the data, whose prompt is `messages`. Raises EnvironmentLost, as all that
        follow."""
        answer = await self._ask({"do": "reset", "row": dict(row), "seed": seed, "messages": list(messages)})
        self.replaces_prompt = answer.get("is_all", False)
        content: Observation = answer["content"]
        return content

    async def call(self, name: str, arguments: Mapping[str, Any]) -> EnvironmentReply:
        """Call a tool."""
        return EnvironmentReply(**await self._ask({"do": "call", "name": name, "arguments": arguments}))

    async def step(self, text: str) -> EnvironmentReply:
        """Give what the model wrote to an environment that replies to text."""
        return EnvironmentReply(**await self._ask({"do": "step", "text": text}))

    async def reward(self, messages: Sequence[Mapping[str, Any]] = ()) -> float | None:
        """Return what `get_reward`, or an agent's `reward`, gives; None where there is none. `messages`: what was said,
        for an agent's."""
        value: float | None = (await self._ask({"do": "reward", "messages": list(messages)}))["reward"]
        return value

    async def run_agent(
        self, task: Mapping[str, Any], chat: Chat, variables: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Run the agent, with some variables of its environment; return the `reward` (or None) and `metrics` of a
        function, `exit_code` and `output` of a program. `chat` answers requests of the former; where it raises, the
        agent gets a RuntimeError, and if that ends the agent, it is raised here. There is no limit of time."""
        failures: list[Exception] = []
        tasks: dict[int, asyncio.Task[None]] = {}

        async def answer(request: Mapping[str, Any]) -> None:
            try:
                reply: dict[str, Any] = {"message": await chat(request)}
            except Exception as error:
                failures.append(error)
                reply = {"error": f"{type(error).__name__}: {error}"}
            with suppress(EnvironmentLost):  # whoever receives sees it too
                self._process.send({"chat": request["chat"], **reply})

        with self._process.killed_on_error():
            folder = str(self.folder) if self.folder else ""
            self._process.request({"do": "run", "task": dict(task), "variables": dict(variables), "folder": folder})
            try:
                while "chat" in (message := await self._process.receive()):
                    if message.get("given_up"):
                        tasks[message["chat"]].cancel()
                    else:
                        tasks[message["chat"]] = asyncio.create_task(answer(message))
            finally:
                for each in tasks.values():
                    each.cancel()
            if "failed" in message:
                raise failures[-1] if message["refused"] else EnvironmentLost("crash", message["failed"])
            return message

    def stop_agent(self) -> None:
        """Kill an agent that is a program; `run_agent` returns what it left."""
        with suppress(EnvironmentLost):
            self._process.send({"stop": True})

    async def keep(self, name: str) -> Path:
        """Move the working directory of an agent that is a program to where it stays, beside the logs."""
        assert self.folder is not None
        place = self._pool.log_path.parents[1] / "agents" / name
        await asyncio.to_thread(_move, self.folder / "work", place)
        return place

    async def close(self, *, reuse: bool = True) -> None:
        """Give the environment back; its process serves another episode if nothing is left running in it, and
        `reuse`."""
        if self._closed:
            return
        self._closed = True
        clean = False
        try:
            with suppress(EnvironmentLost):
                if reuse and not self._process.dead and not self._process.busy:
                    clean = bool((await self._ask({"do": "end"}))["clean"])
        finally:
            self._pool._take_back(self._process, clean)
            if self.folder is not None:
                await asyncio.to_thread(remove_folder, self.folder)

    async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        limit_s = self._pool.call_timeout_s
        with self._process.killed_on_error():
            self._process.request(message)
            try:
                async with asyncio.timeout(limit_s):
                    answer = await self._process.receive()
            except TimeoutError:
                raise EnvironmentLost("timeout", f"no answer within {limit_s:g} s") from None
            if "failed" in answer:
                raise EnvironmentLost("crash", answer["failed"])
            return answer


def _move(source: Path, place: Path) -> None:
    if source.exists():
        remove_folder(place)  # of an attempt that was begun before
        place.parent.mkdir(parents=True, exist_ok=True)
        with suppress(shutil.Error):  # sockets and pipes cannot be copied to another file system; all else was
            shutil.move(source, place)

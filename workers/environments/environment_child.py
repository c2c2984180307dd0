"""Answer the requests of one episode after another, in a process that was forked for it.

JSON lines over a socket: first what there is (`{"mode": ..., "tools": ...}`) or `{"error": ..., "hint": ...}`, then a
line for each request, or `{"failed": text}` where the episode cannot continue, each with the number `n` of the request.
While an agent runs, its requests to the sampler, `{"chat": ...}`, go the other way, and which of them it has given up.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from specs.errors import RewardError
from workers.environments.harness import MODEL_NAME, HarnessRun, prompt_of
from workers.environments.loaded import Loaded, add_tool, keywords
from workers.environments.mcp_tools import server_tools
from workers.environments.replies import (
    Lost,
    as_content,
    as_reward,
    as_text,
    first,
    has_reward,
    in_one_line,
    step_outcome,
    wrong_arguments,
)
from workers.environments.tool_schema import as_hinted
from workers.grading.child import as_number, describe

READ_BYTES = 1 << 16
_SETTLE_S = 0.5  # in which threads without work end


class Pipe:
    """JSON lines on a socket."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.request = 0  # number of the one that is being answered
        self._in = bytearray()
        self._owner = os.getpid()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a line. Values that JSON does not know become text, halves of surrogate pairs question marks."""
        if os.getpid() != self._owner:  # user code forked and the copy returned here: only the original may answer
            os._exit(1)
        text = json.dumps({"n": self.request, **message}, ensure_ascii=False, default=str)
        self.end.sendall(text.encode(errors="replace") + b"\n")

    def receive(self) -> Any:
        while (message := self.received()) is None:
            self.read()
        return message

    def received(self) -> Any:
        """Return the next message of those that were read; None if there is none."""
        end = self._in.find(b"\n") + 1
        if not end:
            return None
        line = bytes(self._in[:end])
        del self._in[:end]
        return json.loads(line)

    def read(self) -> None:
        chunk = self.end.recv(READ_BYTES)
        if not chunk:  # the parent is gone, or done with this process
            os._exit(0)
        self._in += chunk


class RefusedTurn(RuntimeError):
    """The episode's limits allow no more."""


class AgentClient:
    """The sampler, for an agent."""

    def __init__(self, pipe: Pipe, loop: asyncio.AbstractEventLoop) -> None:
        self._pipe, self._loop = pipe, loop
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def chat(self, messages: Sequence[Mapping[str, Any]], max_tokens: int | None = None) -> dict[str, Any]:
        """Return the model's message. Several may be asked for at once. Raises RuntimeError where the episode's limits
        allow no more."""
        number = next(self._numbers)
        answer = self._waiting[number] = self._loop.create_future()
        self._pipe.send({"chat": number, "messages": messages, "max_tokens": max_tokens})
        try:
            reply = await answer
        except asyncio.CancelledError:  # of an agent that waits no longer
            self._pipe.send({"chat": number, "given_up": True})
            raise
        if "error" in reply:
            raise RefusedTurn(reply["error"])
        return dict(reply["message"])

    def read(self) -> None:
        """Hand out answers that came."""
        self._pipe.read()
        while (reply := self._pipe.received()) is not None:
            waiting = self._waiting.pop(reply["chat"])
            if not waiting.done():
                waiting.set_result(reply)


class Session:
    """The user's environment, a fresh instance for each episode; MCP servers stay from one to the next."""

    def __init__(self, loaded: Loaded, base: str, pipe: Pipe, memory_MiB: int) -> None:
        self._loaded, self._base, self._pipe = loaded, base, pipe
        self._tools = dict(loaded.tools)
        self._instance: Any = None
        self._harness: HarnessRun | None = None
        self._loop = asyncio.new_event_loop()
        self._executor: ThreadPoolExecutor | None = None  # of the loop, in an episode
        self._held: set[asyncio.Task[None]] = set()
        self._began = os.getcwd(), dict(os.environ)
        asyncio.set_event_loop(self._loop)
        self._reusable_bytes = _limit_memory(memory_MiB) - (memory_MiB << 18)  # a quarter of that is left

    def serve(self) -> None:
        self._pipe.send(self._describe())
        self._servers, self._own_tasks = children(), asyncio.all_tasks(self._loop)
        self._own_threads = {*threading.enumerate()}
        self._renew_executor()
        while True:
            message = self._pipe.receive()
            if "do" not in message:  # an answer that its agent did not wait for
                continue
            self._pipe.request = message["n"]
            try:
                answer = self._answer(message)
            except BaseException as error:  # user code may raise anything
                answer = {"failed": in_one_line(error), "refused": _came_of_refusal(error)}
            self._pipe.send(answer)

    def _describe(self) -> dict[str, Any]:
        try:
            for command in self._loaded.servers:
                for tool in self._loop.run_until_complete(server_tools(command, self._base, self._held)):
                    add_tool(self._tools, tool)
        except RewardError as error:
            return {"error": error.message, "hint": error.hint}
        tools = [tool.schema for tool in self._tools.values()]
        return {"mode": self._loaded.mode, "tools": tools, "gives_reward": self._loaded.gives_reward}

    def _answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        match message["do"]:
            case "reset":
                return self._reset(message["row"], message["seed"], message["messages"])
            case "call":
                return self._call(message["name"], message["arguments"])
            case "step":
                return self._step(message["text"])
            case "reward":
                return {"reward": self._reward(message["messages"])}
            case "run" if self._loaded.harness:
                return self._run_harness(message["task"], message["variables"], message["folder"])
            case "run":
                return self._run(message["task"], message["variables"])
        return {"clean": self._end()}

    def _finish(self, value: Any) -> Any:
        """Return what a call returned, after it was awaited where it is async."""
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value

    def _reset(self, row: Mapping[str, Any], seed: int, prompt: list[Any]) -> dict[str, Any]:
        _seed_generators(seed)
        if self._loaded.kind is None:
            return {"content": None}
        self._instance = self._loaded.kind()
        if not hasattr(self._instance, "reset"):  # SkyRL-Gym's `init` is given the prompt, and returns what begins
            content = as_content(first(self._finish(self._instance.init(deepcopy(prompt)))))
            begin, rest = content[: len(prompt)], content[len(prompt) :]
            is_all = isinstance(content, list) and begin not in ([], prompt)
            return {"content": (rest or None) if begin == prompt else content, "is_all": is_all}
        reset = self._instance.reset
        return {"content": as_content(first(self._finish(reset(**keywords(reset, {"seed": seed, **row})))))}

    def _call(self, name: str, arguments: Any) -> dict[str, Any]:
        tool = self._tools.get(name)
        if tool is None or (wrong := wrong_arguments(name, tool.schema["function"]["parameters"], arguments)):
            text = wrong if tool else f"there is no tool {name}; the tools are {', '.join(self._tools)}"
            return {"text": text, "reward": None, "done": False, "error": True}
        reward, failed = None, False
        try:
            function = tool.function or getattr(self._instance, name)
            value = self._finish(function(**as_hinted(function, arguments)))
            if has_reward(value):
                value, reward = value
            text = as_text(value)
        except Lost:
            raise
        except BaseException as error:  # user code: sys.exit() too is this call's failure only
            text, failed = in_one_line(error), True
        return {"text": text, "reward": as_reward("a tool", reward), "done": self._done(), "error": failed}

    def _done(self) -> bool:
        done = getattr(self._instance, "done", False)
        return not callable(done) and bool(done)

    def _step(self, text: str) -> dict[str, Any]:
        content, reward, done, truncated = step_outcome(self._finish(self._instance.step(text)))
        done = done or truncated or self._done()
        return {"text": content, "reward": reward, "done": done, "truncated": truncated, "error": False}

    def _reward(self, messages: Sequence[Mapping[str, Any]]) -> float | None:
        if not self._loaded.gives_reward:
            return None
        value = self._finish(self._instance.get_reward() if self._harness is None else self._graded(messages))
        number = as_number(value)
        if number is None:
            raise Lost(f"{'get_reward' if self._harness is None else 'the reward function'} gave {describe(value)}")
        return number

    def _graded(self, messages: Sequence[Mapping[str, Any]]) -> Any:
        run = self._harness
        assert run is not None
        assert run.harness.reward is not None
        found = {"cwd": str(run.cwd), "exit_code": run.exit_code, "output": run.output.decode(errors="replace")}
        return run.harness.reward(**keywords(run.harness.reward, {**run.values, **found, "messages": messages}))

    def _run_harness(self, task: Mapping[str, Any], variables: Mapping[str, str], folder: str) -> dict[str, Any]:
        assert self._loaded.harness is not None
        known = {"prompt": prompt_of(task["messages"]), "spec_dir": str(Path(self._base).resolve())}
        known |= {"model": MODEL_NAME, "base_url": variables["OPENAI_BASE_URL"], "key": variables["OPENAI_API_KEY"]}
        self._harness = HarnessRun(self._loaded.harness, Path(folder), self._base, {**task, **known})
        self._loop.add_reader(self._pipe.end, self._stop_harness)
        try:
            return self._finish(self._harness.run(variables))  # type: ignore[no-any-return]
        finally:
            self._loop.remove_reader(self._pipe.end)

    def _stop_harness(self) -> None:
        self._pipe.read()
        while self._pipe.received() is not None:
            assert self._harness is not None
            self._harness.stop()

    def _run(self, task: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
        _seed_generators(task.get("seed"))
        direct = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
        if "127.0.0.1" not in direct:  # where the gateway is; other addresses keep their proxy
            variables = {**variables, "no_proxy": f"{direct},127.0.0.1".lstrip(",")}
        os.environ.update(variables)
        assert self._loaded.agent is not None
        client = AgentClient(self._pipe, self._loop)
        self._loop.add_reader(self._pipe.end, client.read)
        try:
            value = self._finish(self._loaded.agent(task, client))
        finally:
            self._loop.remove_reader(self._pipe.end)
        table = dict(value) if isinstance(value, Mapping) else {"reward": value}
        reward = as_reward("the agent", table.pop("reward", None))
        table |= table.pop("metrics", None) or {}
        return {
            "reward": reward,
            "metrics": {str(name): n for name, one in table.items() if (n := as_number(one)) is not None},
        }

    def _end(self) -> bool:
        """Drop the instance; return whether nothing of the episode is left running, or in much of the memory."""
        instance, self._instance, self._harness = self._instance, None, None
        if self._loaded.mode == "text" and callable(getattr(instance, "close", None)):
            self._finish(instance.close())
        folder, variables = self._began
        signal.alarm(0)
        os.chdir(folder)
        if os.environ != variables:
            os.environ.clear()
            os.environ.update(variables)
        if _data_bytes() > self._reusable_bytes:
            return False
        self._renew_executor()
        until = time.monotonic() + _SETTLE_S
        while (running := {*threading.enumerate()} - self._own_threads) and time.monotonic() < until:
            time.sleep(0.002)
        return not running and children() == self._servers and asyncio.all_tasks(self._loop) <= self._own_tasks

    def _renew_executor(self) -> None:
        """Have the threads of `asyncio.to_thread` end when they have no more work, and new ones serve from now on."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)
        self._executor = ThreadPoolExecutor(thread_name_prefix="asyncio")
        self._loop.set_default_executor(self._executor)


def _came_of_refusal(error: BaseException | None) -> bool:
    """Return whether an agent ended since a turn was refused: not of its own fault after it had coped with that."""
    if error is None or isinstance(error, RefusedTurn):
        return error is not None
    return any(map(_came_of_refusal, (error.__cause__, error.__context__, *getattr(error, "exceptions", ()))))


def children() -> set[int]:
    """Return this process's children; of a subreaper also what its descendants left behind."""
    found: set[int] = set()
    for thread in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found.update(map(int, thread.read_text().split()))
    return found


def _limit_memory(memory_MiB: int) -> int:
    """Limit what this process and each that it starts may allocate beyond what it has now; return the limit in bytes.
    Address space is no measure: interpreters of other languages reserve much more than they use."""
    limit = _data_bytes() + (memory_MiB << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return limit


def _data_bytes() -> int:
    """Return what this process has allocated, as RLIMIT_DATA counts it."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def _seed_generators(seed: Any) -> None:
    """Seed the global generators: forked processes would draw the same numbers in every episode."""
    seed = seed if isinstance(seed, int) else None
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(None if seed is None else seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(random.getrandbits(63) if seed is None else seed)

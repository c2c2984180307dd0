"""Serve a model behind the gateway, for any client by hand: `rlctl serve`. Keep the conversations as rows.

The model's weights come from the trainer's own export and are compared with what the sampler holds, as in a run.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from backends.completions import SampleRequest
from backends.hf.tokenizer import load_codec
from backends.protocol import Rank, RolloutEngine
from backends.registry import rollout_engine, train_engine
from specs.errors import RlctlError, SyncError, UsageError
from specs.schema.engines.ddp_table import DdpTable
from specs.schema.environment import EnvironmentSection
from specs.schema.roles import ACTOR
from specs.schema.table import Table
from specs.wire.role_config import RolloutConfig, Sampling, TrainConfig
from workers.chat.chat_renderer import renderer_of
from workers.chat.chat_turns import Chats, chats_by_tools
from workers.environments.environment_pool import Described
from workers.episodes.agent_episode import AgentEpisode
from workers.episodes.episode import Ended
from workers.episodes.episode_runner import gateway_for_agents
from workers.episodes.trajectory import Sample, SampledTurn, Task
from workers.gateway.chat_request import ChatReply, FailedRequest, RefusedRequest
from workers.gateway.turn_tree import TreeTurn
from workers.watchdog import die_with_parent

_WRITE_EVERY_S = 10.0
_UNLIMITED = 10**9
_AGENT = Described("agent", (), gives_reward=False)


class ServeConfig(Table):
    """Say what is served, and where. `key`: the only one that is let in; empty: any, each for its own conversations."""

    rollout: RolloutConfig
    host: str
    port: int
    key: str
    temperature: float
    out: str  # file of the conversations


def build_sampler(config: RolloutConfig) -> RolloutEngine:
    """Return a sampler with the weights of its folder. Raises ModelError, and SyncError where they do not arrive."""
    held = TrainConfig(
        role=ACTOR, model=config.model, engine=DdpTable(), optimizer=None, total_optimizer_steps=1,
        micro_batch_tokens=config.model.max_sequence_tokens, gradient_checkpointing=False, temperature=1.0,
    )  # fmt: skip
    trainer = train_engine(held.engine.kind).build(held, Rank())
    sampler = rollout_engine(config.engine.kind).build(config, Rank())
    for weight in trainer.export_weights(config.model.dtype, sampler.weight_form()):
        buffer_U = np.zeros(weight.spec.nbytes, dtype=np.uint8)
        if weight.copy_to(buffer_U) != sampler.import_weight(weight.spec, buffer_U):
            raise SyncError(f"weight {weight.spec.name}: what the sampler read back is not what it was given")
    sampler.finish_import()
    return sampler  # the trainer has joined no group that it could leave; the sampler's own library may have


class SamplerThread:
    """Steps a sampler as long as it has requests, in a thread of its own. `on_failure` is called in the loop, once."""

    failure: FailedRequest | None = None

    def __init__(
        self, sampler: RolloutEngine, loop: asyncio.AbstractEventLoop, on_failure: Callable[[], object]
    ) -> None:
        self._sampler, self._loop, self._on_failure = sampler, loop, on_failure
        self._asked: queue.SimpleQueue[SampleRequest] = queue.SimpleQueue()
        self._waiting: dict[int, asyncio.Future[SampledTurn]] = {}
        threading.Thread(target=self._run, name="sampler", daemon=True).start()

    async def draw(self, request: SampleRequest) -> SampledTurn:
        """Return the completion of a request. Raises FailedRequest once the sampler has failed."""
        if self.failure is not None:
            raise self.failure
        future: asyncio.Future[SampledTurn] = self._loop.create_future()
        self._waiting[request.id] = future
        self._asked.put(request)
        return await future

    def _run(self) -> None:
        try:
            while True:
                new = [] if self._sampler.open_requests else [self._asked.get()]
                with suppress(queue.Empty):
                    while True:
                        new.append(self._asked.get_nowait())
                if new:
                    self._sampler.add(new)
                for done in self._sampler.step():
                    turn = SampledTurn(
                        done.tokens.tolist(), done.logprobs.tolist(), [0] * len(done.tokens), done.finished
                    )
                    self._loop.call_soon_threadsafe(self._hand_on, done.id, turn)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._fail, error)

    def _hand_on(self, id_: int, turn: SampledTurn) -> None:
        if not (future := self._waiting.pop(id_)).done():
            future.set_result(turn)

    def _fail(self, error: Exception) -> None:
        self.failure = FailedRequest(f"the sampler failed: {error}")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self.failure)
        self._on_failure()


class ServedEpisode(AgentEpisode):
    """The conversations of a key. No episode ends here: a prompt that is too long is refused as model servers do."""

    async def _reply(self, turn: TreeTurn) -> ChatReply:
        try:
            return await super()._reply(turn)
        except Ended:
            most = self.section.max_episode_tokens
            raise RefusedRequest(f"the prompt fills the model's maximum context length of {most} tokens") from None


class Served:
    """The conversations of every key."""

    def __init__(self, config: ServeConfig, chats: Chats, sampler: SamplerThread) -> None:
        self._config, self._chats, self._sampler = config, chats, sampler
        self._requests = 0
        self._written = b""
        self.gateway = gateway_for_agents()
        self.episodes: list[ServedEpisode] = []
        self._section = EnvironmentSection(
            agent="served.py:client",
            max_turns=_UNLIMITED,
            max_tool_calls=_UNLIMITED,
            max_episode_tokens=config.rollout.model.max_sequence_tokens,
            learn_from="all",
            history="branch",
        )

    async def start(self) -> None:
        """Listen. Raises UsageError where the port is taken."""
        config = self._config
        try:
            await self.gateway.start(config.host, config.port, stranger=None if config.key else self.conversations)
        except OSError as error:
            raise UsageError(f"{config.host}:{config.port}: {error.strerror}", hint="choose another --port") from None
        if config.key:
            self.gateway.open(self.conversations(), config.key)

    def conversations(self) -> ServedEpisode:
        """Return the conversations of a new key."""
        number = len(self.episodes)
        task = Task(number, number, number, 0, False, 0, [0], {}, (), self._section.name)
        limit = self._config.rollout.max_response_tokens
        made = ServedEpisode(task, self._section, _AGENT, self._chats, self._draw, limit, self.gateway)
        self.episodes.append(made)
        return made

    async def _draw(self, task: Task, number: int, sample: Sample, limit: int) -> SampledTurn:
        self._requests += 1
        sampling = Sampling(
            seed=self._config.rollout.model.seed, max_response_tokens=limit,
            greedy=self._config.temperature == 0, temperature=self._config.temperature or 1.0,
        )  # fmt: skip
        tokens = np.array(sample.tokens, dtype=np.int64)
        return await self._sampler.draw(SampleRequest(self._requests, tokens, sampling, prefix=self._requests))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the conversations that clients have read to their ends, with what the model wrote as it wrote it, and
        `train`: a client may send answers that it never gave. `finish` says whether the model ended the last turn
        itself ("stop") or a limit did ("length"): learned from, the latter teaches an end where there is none."""
        for episode in self.episodes:
            turns = [turn for turn in episode.tree.turns if turn.turn is not None and turn.delivered]
            inner = {id(turn.parent) for turn in turns}
            for turn in turns:
                if id(turn) not in inner and turn.request.prompt is None:
                    tools = {"tools": [*turn.request.tools]} if turn.request.tools else {}
                    finish = {"finish": turn.reply.result().finish}
                    messages = [*turn.request.messages, {}]
                    for one in turn.path:
                        if one.turn is not None:
                            messages[len(one.request.messages)] = {**one.turn.message, "train": True}
                    yield {"messages": messages, **finish, **tools}

    def write(self) -> None:
        """Write the rows, where any is new. Raises OSError; then the next call tries again."""
        rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows()).encode(errors="replace")
        if rows != self._written:
            write_among(Path(self._config.out), rows, self._written)
            self._written = rows


def write_among(out: Path, rows: bytes, before: bytes) -> None:
    """Write rows into a file that others write, too: in place of those that were written `before`, else at its end."""
    there = out.read_bytes() if out.exists() else b""
    kept, found, behind = there.partition(before) if before else (there, b"", b"")
    new = out.with_name(f"{out.name}.{os.getpid()}")
    new.write_bytes(kept + (b"" if found or kept.endswith(b"\n") or not kept else b"\n") + rows + behind)
    os.replace(new, out)


def chats_of(model_path: str) -> Chats:
    """Return a model's chat template. Raises ModelError where there is none, or none that writes a message."""
    codec = load_codec(model_path)
    renderer = renderer_of(codec)
    renderer.render([{"role": "user", "content": "Hi"}])
    return chats_by_tools(codec, renderer)


async def serve(config: ServeConfig) -> None:
    """Serve until a signal comes, or `rlctl serve` is killed. Raises FailedRequest once the sampler has failed."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    die_with_parent(signal.SIGTERM)
    chats = chats_of(config.rollout.model.path)
    print(f"loading {config.rollout.model.path} with {config.rollout.engine.kind} …", flush=True)
    sampler = SamplerThread(build_sampler(config.rollout), loop, over.set)
    served = Served(config, chats, sampler)
    await served.start()
    address = f"http://{config.host}:{served.gateway.port}"
    key = "the key you gave" if config.key else "any key; each has conversations of its own"
    print(f"serving {config.rollout.model.path} until Ctrl-C\n")
    print(
        f"  OPENAI_BASE_URL={address}/v1\n  ANTHROPIC_BASE_URL={address}\n  OPENAI_API_KEY, ANTHROPIC_API_KEY: {key}\n"
    )
    print(f'conversations: {config.out}, rows for run.recipe = "sft"', flush=True)
    while not over.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), _WRITE_EVERY_S)
        try:
            served.write()
        except OSError as error:
            print(f"warning: {config.out} cannot be written: {error.strerror}; it is tried again", file=sys.stderr)
    await served.gateway.close()
    if sampler.failure is not None:
        raise sampler.failure


def main() -> int:
    """Serve what the JSON on stdin says."""
    config = ServeConfig.model_validate_json(sys.stdin.read())
    try:
        asyncio.run(serve(config))
    except (RlctlError, FailedRequest) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, FailedRequest) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs the episodes of a rank, in an event loop of its own: each is a task that waits for its environment or for the
sampler, and what is ready at the same time travels together."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from backends.hf.tokenizer import TextCodec
from specs.errors import RewardError
from specs.schema.rewards import EnvironmentReward
from specs.wire import bodies
from specs.wire.batch import Batch, Column
from specs.wire.role_config import RewardConfig
from workers.chat.chat_renderer import renderer_of
from workers.chat.chat_turns import chats_by_tools
from workers.environments.environment_pool import Described, EnvironmentPool
from workers.episodes.agent_episode import AgentEpisode
from workers.episodes.episode import Episode, usual_replies
from workers.episodes.trajectory import Sample, SampledTurn, Task, Trajectory, columns_of, each
from workers.grading.loop_thread import LoopThread
from workers.serve import Emit, Reply, Request

if TYPE_CHECKING:
    from workers.gateway.gateway_server import Gateway

_CLOSE_S = 10.0
_PACE_S = 0.02  # between messages to the driver, each of which costs both sides some 0.3 ms


class EpisodeRunner:
    """The environments of a rank of the reward role. Use `open`, `episodes`, `turns` and `close` from one thread."""

    def __init__(self, config: RewardConfig, codec: TextCodec, rank: int, log_path: Path) -> None:
        self._config, self.rank = config, rank
        self._renderer = renderer_of(codec)
        self.chat = chats_by_tools(codec, self._renderer)
        self._pools = {
            section.name: EnvironmentPool(section, config.spec_dir, log_path=log_path, sources=config.sources)
            for section in config.environments
        }
        self._sections = {section.name: section for section in config.environments}
        self._described: dict[str, Described] = {}
        self._waiting: dict[int, asyncio.Future[SampledTurn]] = {}  # for the sampler, by sample
        self._gateway: Gateway | None = None
        self._thread = LoopThread("episodes")

    def open(self) -> EpisodeRunner:
        """Start what the environments need. Raises RewardError where one cannot be made, ModelError for a chat template
        that cannot show its tools."""
        self._thread.start()
        try:
            self._thread.run(self._start()).result()
        except BaseException:
            self.close()
            raise
        return self

    async def _start(self) -> None:
        if any(section.agent for section in self._sections.values()):
            self._gateway = gateway_for_agents()
            await self._gateway.start()
        for name, pool in self._pools.items():
            described = self._described[name] = await pool.start()
            chat, section = self.chat(described.tools), self._sections[name]
            if section.history == "append":
                chat.check_history(usual_replies(described.mode, section, chat))

    # ── calls of the rank ─────────────────────────────────────────────────────────────────────────

    def episodes(self, call: Request[bodies.Episodes], emit: Emit) -> Future[Reply]:
        """Begin episodes. Parts ask for turns, name episodes that have ended, or bring the samples of whole groups."""
        return self._thread.run(_Batch(self, emit).run(self._tasks(call)))

    def turns(self, call: Request[bodies.Nothing]) -> None:
        """Hand on what the sampler wrote."""
        batch = call.batch
        written_T = batch["loss_mask_T"] != 0
        ends = np.cumsum(batch.sum_by_sequence("loss_mask_T")).astype(int).tolist()
        tokens, logprobs, versions = [
            batch[name][written_T].tolist() for name in ("tokens_T", "rollout_logprob_T", "version_T")
        ]
        stretches = [slice(start, end) for start, end in pairwise([0, *ends])]
        turns = {
            id_: SampledTurn(tokens[at], logprobs[at], versions[at], bool(finished))
            for id_, finished, at in zip(batch["id_B"].tolist(), batch["finished_B"], stretches, strict=True)
        }
        self._thread.loop.call_soon_threadsafe(self._hand_on, turns)

    def _hand_on(self, turns: Mapping[int, SampledTurn]) -> None:
        for id_, turn in turns.items():
            future = self._waiting.pop(id_, None)
            if future is not None and not future.done():
                future.set_result(turn)

    def close(self) -> None:
        """Break off what is under way, and end every environment; what does not end in time ends with the process."""
        self._thread.close(self._end, _CLOSE_S)
        self._renderer.close()

    async def _end(self) -> None:
        for pool in self._pools.values():
            await pool.close()
        if self._gateway is not None:
            await self._gateway.close()

    # ── what an episode needs ─────────────────────────────────────────────────────────────────────

    def _tasks(self, call: Request[bodies.Episodes]) -> list[Task]:
        batch, found = call.batch, list[Task]()
        prompts = batch.sequences("tokens_T")
        greedy_B = batch.columns.get("greedy_B", np.zeros(len(batch), np.uint8)).tolist()
        names = zip(*(batch[f"{name}_B"].tolist() for name in ("id", "group", "rollout", "row")), strict=True)
        for index, (id_, group, rollout, number) in enumerate(names):
            row, seed = call.body.rows[str(number)], _seed_of(self._config.seed, group)
            whose = id_, group, rollout, number, bool(greedy_B[index]), seed, prompts[index].tolist()
            found.append(Task(*whose, row.values, row.messages or (), self._environment_of(row)))
        return found

    def _environment_of(self, row: bodies.Row) -> str:
        """Return the name of a row's environment; a row without one was refused when it was read."""
        if len(self._sections) == 1:
            return next(iter(self._sections))
        return str(row.values[self._config.environment_column])

    async def play(self, task: Task, batch: _Batch) -> Trajectory:
        """Run one episode."""
        section = self._sections[task.environment]
        described, pool = self._described[section.name], self._pools[section.name]
        what = task, section, described, self.chat, batch.draw, self._config.max_response_tokens
        if self._gateway is None or described.mode != "agent":
            return await Episode(*what).run(pool)
        graded = any(isinstance(term, EnvironmentReward) for term in self._config.reward.terms)
        return await AgentEpisode(*what, self._gateway, graded).run(pool)

    def wait_for(self, id_: int) -> asyncio.Future[SampledTurn]:
        """Return the turn to come of a sample."""
        future = self._waiting[id_] = self._thread.loop.create_future()
        return future


class _Batch:
    """Episodes of one call. The first that comes up is sent at once, what follows within `_PACE_S` together."""

    def __init__(self, runner: EpisodeRunner, emit: Emit) -> None:
        self._runner, self._emit = runner, emit
        self._asked: list[tuple[Task, int, Sample, int]] = []
        self._ended: list[int] = []
        self._groups: list[Trajectory] = []  # of groups that are complete
        self._round: asyncio.TimerHandle | None = None
        self._sent_at = 0.0

    async def run(self, tasks: Sequence[Task]) -> Reply:
        """Play all of them; their samples leave in parts, group by group."""
        groups: dict[int, list[Task]] = defaultdict(list)
        for task in tasks:
            groups[task.group].append(task)
        await asyncio.gather(*map(self._play_group, groups.values()))
        self._send()
        return {}, {}

    async def _play_group(self, members: Sequence[Task]) -> None:
        found = await asyncio.gather(*(self._play(task) for task in members))
        self._groups += found  # after the wait: meanwhile the list is sent, and another begun
        self._send_soon()

    async def _play(self, task: Task) -> Trajectory:
        trajectory = await self._runner.play(task, self)
        self._ended.append(task.rollout)
        self._send_soon()
        return trajectory

    async def draw(self, task: Task, number: int, sample: Sample, limit: int) -> SampledTurn:
        """Have a turn drawn."""
        self._asked.append((task, number, sample, limit))
        self._send_soon()
        return await self._runner.wait_for(task.sample_id(number))

    def _send_soon(self) -> None:
        if self._round is None:
            self._round = asyncio.get_running_loop().call_at(self._sent_at + _PACE_S, self._send)

    def _send(self) -> None:
        asked, ended, groups, rank = self._asked, self._ended, self._groups, self._runner.rank
        self._asked, self._ended, self._groups, self._round = [], [], [], None
        self._sent_at = asyncio.get_running_loop().time()
        if asked or ended:
            self._emit({"kind": "turns", "rank": rank, "ended": ended}, _turn_columns(asked) if asked else {})
        if groups:
            records = {str(one.task.id): one.record() for one in groups}
            self._emit({"kind": "samples", "rank": rank, "episodes": records}, Batch(columns_of(groups)).columns)


def _turn_columns(asked: Sequence[tuple[Task, int, Sample, int]]) -> dict[str, Column]:
    """Return the prompts of turns that are asked for."""
    return {
        "tokens_T": np.concatenate([each(sample.tokens) for _, _, sample, _ in asked]),
        "length_B": each([len(sample.tokens) for _, _, sample, _ in asked]),
        "position_B": each([sample.drawn for _, _, sample, _ in asked]),
        "limit_B": each([limit for _, _, _, limit in asked]),
        "greedy_B": each([task.greedy for task, _, _, _ in asked], np.uint8),
        "id_B": each([task.sample_id(number) for task, number, _, _ in asked]),
        **{f"{name}_B": each([getattr(task, name) for task, *_ in asked]) for name in ("group", "rollout", "row")},
    }


def gateway_for_agents() -> Gateway:
    """Return a gateway on loopback. Raises RewardError where its server is not installed."""
    try:
        from workers.gateway.gateway_server import Gateway
    except ModuleNotFoundError as error:
        raise RewardError(f"an agent needs {error.name}", hint="pip install aiohttp openai") from None
    return Gateway()


def _seed_of(seed: int, group: int) -> int:
    """Return the seed of a group's environments, of 31 bits."""
    digest = hashlib.blake2b(f"{seed} {group}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1

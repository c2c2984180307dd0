"""Keep what an episode leaves behind: exact tokens, who wrote them, and why it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specs.schema.environment import BY_ITSELF, STOP_REASONS, StopReason
from specs.wire.batch import Column

BRANCH_BITS = 48  # ids of further samples of a rollout lie so far above the first ones, those of evaluations too


@dataclass(frozen=True)
class Task:
    """One attempt at a row. `prompt`: tokens of the row's own prompt, for an episode whose environment never began."""

    id: int
    group: int
    rollout: int
    row: int
    greedy: bool
    seed: int  # of `reset`: the same for all attempts of a group
    prompt: Sequence[int]
    values: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    environment: str  # its name

    def sample_id(self, number: int) -> int:
        """Return the id of one of its samples."""
        return self.id + (number << BRANCH_BITS)


@dataclass(frozen=True)
class SampledTurn:
    """Hold what the sampler wrote. `finished`: a stop token, the last of them, ended it rather than a limit."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]  # of the weights that drew each token
    finished: bool


@dataclass
class Sample:
    """A path of tokens. Several of a rollout differ in what came before their last turns."""

    tokens: list[int]
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)  # at which token
    versions: list[int] = field(default_factory=list)  # of the weights that drew each token; -1: none did
    drawn: int = 0

    def __post_init__(self) -> None:
        self._pad()

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens that the policy did not write."""
        self.tokens += tokens
        self._pad()

    def add_turn(self, turn: SampledTurn, *, learn: bool) -> None:
        """Add what the policy wrote; `learn`: whether it is on the loss mask."""
        self.tokens += turn.tokens
        self.mask += [int(learn)] * len(turn.tokens)
        self.logprobs += turn.logprobs
        self.drawn += len(turn.tokens)
        self.versions += turn.versions

    @property
    def version(self) -> int:
        """The oldest weights that drew any of it; -1: none did."""
        return min((version for version in self.versions if version >= 0), default=-1)

    def _pad(self) -> None:
        more = len(self.tokens) - len(self.mask)
        self.mask += [0] * more
        self.logprobs += [0.0] * more
        self.versions += [-1] * more


@dataclass
class Trajectory:
    """All samples of a rollout, and what is counted of it."""

    task: Task
    samples: list[Sample] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    stop: StopReason = "environment_lost"
    why: str = ""  # it was lost
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    parse_errors: int = 0
    environment_s: float = 0.0
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # that an agent gave
    notes: dict[str, Any] = field(default_factory=dict)  # of an agent's requests, and of what it printed

    def add_reward(self, reward: float | None, number: int = -1) -> None:
        """Add a reward, credited to the last turn of a sample."""
        if reward is not None:
            self.reward += reward
            if self.samples:
                self.samples[number].rewards.append((len(self.samples[number].tokens) - 1, reward))

    def record(self) -> dict[str, Any]:
        """Return the episode as JSON, for rewards and people."""
        return {
            **self.metrics,
            "metrics": self.metrics,
            "messages": self.messages,
            "stop": self.stop,
            "reward": self.reward,
            "why": self.why,
            **self.notes,
        }


def each(values: Sequence[float], dtype: type = np.int64) -> Column:
    """Return these values as a column of a batch."""
    return np.array(values, dtype=dtype)


def columns_of(trajectories: Sequence[Trajectory]) -> dict[str, Column]:
    """Return the columns of samples and of episodes, each sample with what holds for its whole rollout. Where the
    policy wrote nothing, the sample has the tokens that it would have begun with."""
    rows = [
        (one, one.task.sample_id(number), sample)
        for one in trajectories
        for number, sample in enumerate(one.samples or [Sample(list(one.task.prompt))])
    ]

    def flat(name: str, dtype: type) -> Column:
        return np.concatenate([np.asarray(getattr(sample, name), dtype=dtype) for _, _, sample in rows])

    return {
        "tokens_T": flat("tokens", np.int64),
        "loss_mask_T": flat("mask", np.uint8),
        "rollout_logprob_T": flat("logprobs", np.float32),
        "version_T": flat("versions", np.int64),
        "turn_reward_T": np.concatenate([_rewards_T(sample) for _, _, sample in rows]),
        "length_B": each([len(sample.tokens) for _, _, sample in rows]),
        "id_B": each([id_ for _, id_, _ in rows]),
        "version_B": each([sample.version for _, _, sample in rows]),
        **{f"{name}_B": each([getattr(one.task, name) for one, _, _ in rows]) for name in ("group", "rollout", "row")},
        **{
            f"{name}_B": each([getattr(one, name) for one, _, _ in rows])
            for name in ("turns", "tool_calls", "tool_errors", "parse_errors")
        },
        "finished_B": each([one.stop in BY_ITSELF for one, _, _ in rows], np.uint8),
        "stop_B": each([STOP_REASONS.index(one.stop) for one, _, _ in rows], np.uint8),
        "environment_s_B": each([one.environment_s for one, _, _ in rows], np.float64),
        "environment_reward_B": each([one.reward for one, _, _ in rows], np.float64),
    }


def _rewards_T(sample: Sample) -> Column:
    reward_T = np.zeros(len(sample.tokens), dtype=np.float32)
    for at, reward in sample.rewards:
        reward_T[at] += reward
    return reward_T

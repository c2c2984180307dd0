"""The driver: what every recipe's step is made of. The steps themselves are in `rlctl/recipes`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlctl.loop import finite_check
from rlctl.loop.clock import Clock
from rlctl.loop.episodes import EpisodeGeneration
from rlctl.loop.residency import Residency
from rlctl.loop.sampling import Sampler
from rlctl.loop.scores.term_scores import ScoreModel
from rlctl.loop.step_metrics import RankReport
from specs.errors import NotFiniteError
from specs.phases import Phase
from specs.schema.algorithms.algorithm import AnyLoss
from specs.schema.eval_sets import Evaluation
from specs.schema.rank_groups import sequence_parallel_of
from specs.schema.roles import REWARD_MODEL, RoleName
from specs.schema.spec import Spec
from specs.wire import bodies, partition
from specs.wire.as_built import ModelBuilt
from specs.wire.batch import Batch
from specs.wire.messages import COLUMNS, Message, Verb
from specs.wire.sequence_work import SequenceWork

if TYPE_CHECKING:
    from rlctl.loop.recovery import SteadyGrading, SteadySync
    from rlctl.processes.calls import Call
    from rlctl.processes.group import Group
    from rlctl.show.progress import Progress
    from specs.schema.recipes import SamplingSpec


Arrived = Callable[[Evaluation, int, int], None]  # of an evaluation, so many completions of all


@dataclass(frozen=True)
class StepRecord:
    """The outcome of a step: a line of metrics and a few decoded samples."""

    metrics: dict[str, Any]
    samples: list[dict[str, Any]]


@dataclass(frozen=True)
class ModelColumn:
    """A column that a model computes: whose ranks, and what they are asked."""

    group: Group
    verb: Verb
    body: bodies.Body | None = None


@dataclass
class UpdateWindow:
    """Open from the first optimizer step of an RL step to that step's end, when what the learners hold belongs to no
    step, and while a step is saved, since a save that is broken off leaves nothing. A Ctrl-C waits until it is closed.
    An error leaves it open: then nothing is saved."""

    is_open: bool = False

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


class Driver(ABC):
    """Drives the roles through the steps of a recipe: phases, clock, columns that models compute, and optimizer steps.
    Knows no processes, sockets or files: tests drive fake roles with it."""

    def __init__(
        self,
        spec: Spec,
        groups: Mapping[str, Group],
        residency: Residency,
        window: UpdateWindow,
        progress: Progress,
        built: Mapping[RoleName, ModelBuilt] | None = None,
    ) -> None:
        """`built`: each role's model, as far as it is known."""
        self.built = built or {}
        self.residency, self.window, self.progress = residency, window, progress
        self.data = groups["data"]
        self.lead = groups[spec.lead]
        self.ref = groups.get("ref")
        self.learners = {role: groups[role] for role in spec.losses}
        self.sequence_parallel = {role: sequence_parallel_of(spec.role(role)) for role in spec.roles}
        self.clock = Clock()

    # ── what a recipe does ────────────────────────────────────────────────────────────────────────

    def prepare(self) -> None:
        """Compute what is of the models as they were built, before a checkpoint is loaded."""

    def begin(self, done: int) -> None:
        """Prepare for the first step of an attempt; `done` steps are behind it."""

    @abstractmethod
    def step(self, step: int) -> StepRecord:
        """Take a step, which counts from 1."""

    @abstractmethod
    def evaluate(self, step: int, arrived: Arrived | None = None) -> StepRecord:
        """Return the metrics of every evaluation with the weights after `step` steps, and its completions. `arrived` is
        told of each set of prompts how many completions of all are here."""

    @abstractmethod
    def proof_prompts(self) -> list[list[int]]:
        """Return tokens on which an export of the run's models must repeat what they say."""

    @abstractmethod
    def save(self, folder: Path) -> dict[str, Any]:
        """Write the driver's files of a checkpoint; return its state."""

    @abstractmethod
    def restore(self, folder: Path, state: Mapping[str, Any]) -> Mapping[int, int]:
        """Go on from what `save` left; return how many samples drawn ahead are left out, by step."""

    @abstractmethod
    def begin_at(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Go on with the data that comes after what another run's `save` left."""

    @abstractmethod
    def loss_of(self, role: RoleName) -> AnyLoss:
        """Return the loss of a role's updates, as it is now."""

    @abstractmethod
    def loss_scale(self, mini: Batch) -> bodies.LossScale:
        """Return global counts of a mini-batch: what every rank divides by."""

    def inspect(self, sums: Mapping[RoleName, Sequence[Mapping[str, float]]], batch: Batch, step: int) -> None:
        """Look at what each rank of each role reports of a mini-batch, before the optimizer steps."""

    @abstractmethod
    def not_finite(self, role: RoleName, found: str, mini: Batch, step: int) -> NotFiniteError:
        """Return the error of a mini-batch whose loss, of which `found` says what is wrong, is not finite."""

    # ── phases ────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def phase(self, phase: Phase, step: int, doing: str = "") -> Iterator[None]:
        """Every role where `phase` wants it, then the block, whose seconds the clock gets, also of one that raises.
        `doing`: what it is, for the person, where `phase` does not say it."""
        self.progress.phase(phase, doing)
        self.residency.enter(phase, step=step)
        with self.clock.measure(phase):
            yield

    # ── samples ───────────────────────────────────────────────────────────────────────────────────

    def make_sampler(
        self,
        spec: SamplingSpec,
        groups: Mapping[str, Group],
        sync: SteadySync,
        grading: SteadyGrading | None = None,
    ) -> Sampler:
        """Return what samples completions and has them graded, also by a reward model where a term asks one."""
        model: ScoreModel | None = None
        if (group := groups.get(REWARD_MODEL)) is not None:
            number = next(index for index, term in enumerate(spec.reward_terms) if term.graded_by == "model")

            def begin(step: int) -> None:
                self.progress.phase("score")
                self.residency.enter("score", step=step)

            model = ScoreModel(group, number, begin, partial(self._shares, group=group, whole=True))
        generation = EpisodeGeneration if spec.environments else None
        roles = groups["data"], groups["rollout"], groups["reward"]
        return Sampler(spec, *roles, self.clock, sync, model, grading, generation)

    # ── columns ───────────────────────────────────────────────────────────────────────────────────

    @staticmethod
    def logprobs_of(group: Group, *, adapters: bool = True) -> ModelColumn:
        return ModelColumn(group, Verb.LOGPROBS, bodies.Logprobs(adapters=adapters))

    def compute(self, wanted: Mapping[str, ModelColumn], batch: Batch, step: int) -> dict[str, NDArray[np.float32]]:
        """These columns of the batch. Roles that share devices compute one after the other, others together."""
        columns: dict[str, NDArray[np.float32]] = {}
        for turn in self.residency.turns([column.group for column in wanted.values()]):
            calls = {
                name: self._post_column(column, batch, step) for name, column in wanted.items() if column.group in turn
            }
            for name, (call, shards) in calls.items():
                (given,) = COLUMNS[wanted[name].verb].gives
                columns[name] = self._unshard(call, given, shards, batch)
        return columns

    def _post_column(self, column: ModelColumn, batch: Batch, step: int) -> tuple[Call, list[NDArray[np.int64]]]:
        shards = self._shares(batch, column.group)
        needed = batch.only(COLUMNS[column.verb].needs)
        tensors = [needed.select(shard).columns for shard in shards]
        return column.group.post(column.verb, column.body, tensors=tensors, step=step), shards

    def _shares(self, batch: Batch, group: Group, *, whole: bool = False) -> list[NDArray[np.int64]]:
        """The sequences of each rank of a role that holds a model. `whole`: they are computed to their end."""
        if group.size == 1:
            return [np.arange(len(batch))]
        built = self.built.get(group.role)
        size = built.size if built else None
        if whole:
            work = SequenceWork.of_whole(batch, size=size)
        else:
            work = SequenceWork.of(batch, size=size, share_prompts=built is None or built.shares_prompts)
        together = self.sequence_parallel[group.role]
        if "unit_B" in batch:
            return partition.unit_shards(work, batch["unit_B"], group.size, together)
        return partition.shards(work, group.size, together)

    @staticmethod
    def _unshard(call: Call, name: str, shards: Sequence[NDArray[np.int64]], batch: Batch) -> NDArray[np.float32]:
        """Put each rank's numbers, its column `name`, back to where its sequences stand in the batch."""
        out_T = np.zeros(batch.num_tokens, dtype=np.float32)
        for answer, shard in zip(call.result(), shards, strict=True):
            out_T[batch.token_index(shard)] = answer.tensors[name]
        return out_T

    # ── updates ───────────────────────────────────────────────────────────────────────────────────

    def one_update(
        self, batch: Batch, mini: Batch, roles: Sequence[RoleName], step: int
    ) -> dict[RoleName, list[RankReport]]:
        """An optimizer step of each role on samples of the batch; none, where the loss of one is not a number."""
        answers = self.in_turns(roles, lambda role: self._post_update(role, mini, step))
        sums = {role: [bodies.Updated.of(answer).sums for answer in answers[role]] for role in roles}
        self.inspect(sums, batch, step)
        for role in roles:
            if found := finite_check.check_sums(sums[role], step):
                raise self.not_finite(role, found, mini, step)
        self.window.open()
        answers = self.in_turns(roles, lambda role: self.learners[role].post(Verb.STEP, step=step))
        stepped = {role: [bodies.Stepped.of(answer) for answer in answers[role]] for role in roles}
        return {role: [RankReport(*pair) for pair in zip(sums[role], stepped[role], strict=True)] for role in roles}

    def in_turns(self, roles: Sequence[RoleName], post: Callable[[RoleName], Call]) -> dict[RoleName, list[Message]]:
        """Answers of these learners. Those that share devices compute one after the other, others together."""
        answers: dict[RoleName, list[Message]] = {}
        for turn in self.residency.turns([self.learners[role] for role in roles]):
            calls = {group.role: post(group.role) for group in turn}
            answers |= {role: call.result() for role, call in calls.items()}
        return answers

    def _post_update(self, role: RoleName, mini: Batch, step: int, verb: Verb = Verb.UPDATE) -> Call:
        """Loss and gradients of the mini-batch; weights are not changed yet. `verb` EVALUATE: the loss alone."""
        loss, group = self.loss_of(role), self.learners[role]
        mini.require(loss.columns, verb)
        needed = mini.only(loss.columns)
        shards = self._shares(needed, group)
        body = bodies.Update(loss=loss, scale=self.loss_scale(mini))
        return group.post(verb, body, tensors=[needed.select(shard).columns for shard in shards], step=step)

"""The driver: one step of training, top to bottom, on one screen (`Driver.step`)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlctl import advantages, step_metrics
from rlctl.gap_budget import Gap, GapBudget
from rlctl.residency import Phase, Residency
from rlctl.revive import SteadySync
from rlctl.run_ahead import RunAhead
from rlctl.sampling import Sampler, Scored
from rlctl.step_metrics import Clock
from rlctl.sync import SyncReport
from rlctl.unjudged import UnjudgedWatch
from specs.batch import Batch, balanced_shards
from specs.messages import COLUMNS, Verb
from specs.schema import Spec

if TYPE_CHECKING:
    from rlctl.calls import Call
    from rlctl.groups import Group
    from rlctl.progress import Progress


@dataclass(frozen=True)
class StepRecord:
    """What a step leaves: a line of metrics and a few decoded samples."""

    metrics: dict[str, Any]
    samples: list[dict[str, Any]]


class Driver:
    """Drives the roles through the algorithm. Knows no processes, sockets or files: tests drive fake roles with it."""

    def __init__(
        self,
        spec: Spec,
        groups: Mapping[str, Group],
        residency: Residency,
        sync: SteadySync,
        gap_budget: GapBudget,
        progress: Progress,
    ) -> None:
        self.spec, self.residency, self.sync, self.progress = spec, residency, sync, progress
        self.gap_budget = gap_budget
        self.actor = groups["actor"]
        self.sampler = Sampler(spec, groups["rollout"], groups["reward"], sync.restore)
        self.ref = groups.get("ref")
        self.ahead = RunAhead(spec, self.sampler)
        self.unjudged = UnjudgedWatch(lambda text: progress.warning(text))
        self.updating = False  # between the first optimizer step of a step and its end: not a state to save
        self.eval_prompts: Batch | None = None

    # ── one step ──────────────────────────────────────────────────────────────────────────────────

    def step(self, number: int) -> StepRecord:
        """Generate, score, learn, sync. `number` counts from 1. Its batch stays in line until the step is done."""
        clock, started = Clock(), time.perf_counter()
        with self.phase("generate", number), clock.measure("rollout"):
            self.ahead.fill(number)
            drawn = self.ahead.take(number, clock)
        with self.phase("learn", number), clock.measure("update"):
            learning_since = time.perf_counter()
            batch = self.with_logprobs(drawn.batch, number)
            batch = self.with_advantages(batch, drawn.scored)
            updates = self.update(batch, number)
            overlap_s = self.ahead.overlap_s(learning_since, time.perf_counter())
        self.sync.weights.version = number
        synced = self.send_weights(number, clock) if self.ahead.due(number) else None

        self.ahead.learned()
        self.updating = False
        total_s = time.perf_counter() - started
        # Against the sampler the gap of later updates also holds what this step has learned.
        gaps = updates[:1] if self.spec.ratio_against == "sampler" else updates
        metrics = step_metrics.collect(number, batch, drawn.scored, updates, gaps, synced, clock.seconds, total_s)
        metrics |= self.ahead.take_metrics(batch, number, overlap_s)
        self.unjudged.see(drawn.scored.failures, len(batch), number)
        metrics |= self.gap_budget.note(metrics, number) | self.residency.take_memory() | self.sync.take_metrics()
        return StepRecord(metrics, drawn.scored.samples)

    def send_weights(self, done: int, clock: Clock) -> SyncReport:
        """The rollout finishes what it is writing and gets the weights that the actor has after `done` steps."""
        with clock.measure("rollout"):
            self.ahead.written()
        with self.phase("sync", done), clock.measure("sync"):
            return self.sync.run(done)

    @contextmanager
    def phase(self, name: Phase, number: int) -> Iterator[None]:
        self.progress.phase(name)
        if name == "generate":
            self.sync.ready(number)
        self.residency.enter(name, step=number)
        yield

    # ── learning ──────────────────────────────────────────────────────────────────────────────────

    def with_logprobs(self, batch: Batch, number: int) -> Batch:
        """Add the log-probs that the loss needs: the actor's before the update, and the reference's."""
        wanted: dict[str, tuple[Group, bool]] = {}  # column → who computes it, and whether with adapters
        if self.spec.ratio_against == "trainer":
            wanted["old_logprob_T"] = (self.actor, True)
        if self.ref is not None:
            wanted["ref_logprob_T"] = (self.ref, True)
        elif self.spec.ref_is_actor:
            wanted["ref_logprob_T"] = (self.actor, False)
        calls = {
            name: self._post_logprobs(group, adapters, batch, number) for name, (group, adapters) in wanted.items()
        }
        columns = {name: self._unshard(call, shards, batch) for name, (call, shards) in calls.items()}
        return batch.with_columns(**columns)

    def _post_logprobs(
        self, group: Group, adapters: bool, batch: Batch, number: int
    ) -> tuple[Call, list[NDArray[np.int64]]]:
        shards = balanced_shards(batch["length_B"], group.size, batch["group_B"])
        needed = batch.only(COLUMNS[Verb.LOGPROBS].needs)
        tensors = [needed.select(shard).columns for shard in shards]
        return group.post(Verb.LOGPROBS, {"adapters": adapters}, tensors=tensors, step=number), shards

    @staticmethod
    def _unshard(call: Call, shards: Sequence[NDArray[np.int64]], batch: Batch) -> NDArray[np.float32]:
        """Put each rank's `logprob_T` back to where its sequences stand in the batch."""
        out_T = np.zeros(batch.num_tokens, dtype=np.float32)
        for answer, shard in zip(call.result(), shards, strict=True):
            out_T[batch.token_index(shard)] = answer.tensors["logprob_T"]
        return out_T

    def with_advantages(self, batch: Batch, scored: Scored) -> Batch:
        advantage_B = advantages.grpo_advantages(
            scored.reward_B, batch["group_B"].astype(np.int64), scored.scored_B, self.spec.algorithm.scale
        )
        return batch.with_columns(advantage_T=advantages.per_token(advantage_B, batch))

    def update(self, batch: Batch, number: int) -> list[list[Mapping[str, Any]]]:
        """All optimizer steps of this step; returns each rank's report for each."""
        algorithm = self.spec.algorithm
        reports: list[list[Mapping[str, Any]]] = []
        columns = COLUMNS[Verb.UPDATE]
        batch.require(columns.needs, Verb.UPDATE)
        unused = () if self.spec.ratio_against == "sampler" else ("version_B",)
        optional = [name for name in columns.optional if name in batch and name not in unused]
        needed = batch.only([*columns.needs, *optional])
        if self.spec.ratio_against == "trainer":
            self.check_gap(batch, Gap.of_batch(batch, batch["old_logprob_T"]), number)
        for epoch in range(algorithm.epochs_per_step):
            seed = (self.spec.run.seed, number, epoch)
            for chosen in mini_batches(batch["group_B"], algorithm.mini_batches_per_step, seed):
                mini = needed.select(chosen)
                shards = balanced_shards(mini["length_B"], self.actor.size, batch["group_B"][chosen])
                answers = self.actor.call(
                    Verb.UPDATE,
                    {"algorithm": algorithm.model_dump(), "scale": self.loss_scale(mini)},
                    tensors=[mini.select(shard).columns for shard in shards],
                    step=number,
                )
                if not reports and self.spec.ratio_against != "trainer":
                    self.check_gap(batch, Gap.of_sums(answer.body["sums"] for answer in answers), number)
                self.updating = True
                steps = self.actor.call(Verb.STEP, step=number)
                reports.append([{**sums.body, **done.body} for sums, done in zip(answers, steps, strict=True)])
        return reports

    def check_gap(self, batch: Batch, gap: Gap, number: int) -> None:
        """Refuse to learn from samples on which sampler and trainer disagree. Raises LogprobGapError."""
        if not self.gap_budget.broken_by(gap):
            return
        if "old_logprob_T" not in batch:  # the trainer's are still the current ones
            batch = batch.with_columns(
                old_logprob_T=self._unshard(*self._post_logprobs(self.actor, True, batch, number), batch)
            )
        raise self.gap_budget.stop(gap, batch, batch["old_logprob_T"], number)

    def loss_scale(self, mini: Batch) -> dict[str, int]:
        """Global counts of a mini-batch: what every rank divides by."""
        tokens_B = mini.sum_by_sequence("loss_mask_T")
        return {
            "num_loss_tokens": int(tokens_B.sum()),
            "num_sequences": int((tokens_B > 0).sum()),
            "max_response_tokens": self.spec.data.max_response_tokens,
        }

    # ── evaluation ────────────────────────────────────────────────────────────────────────────────

    def evaluate(self, number: int) -> dict[str, float]:
        """Greedy answers to the held-out prompts."""
        section = self.spec.eval
        assert section is not None
        if self.sync.weights.sent != number:
            self.send_weights(number, Clock())
        with self.phase("generate", number):
            self.progress.phase("eval")
            sampler = self.sampler
            if self.eval_prompts is None:
                self.eval_prompts = sampler.held_out(section.prompts, number)
            scored = sampler.start(self.eval_prompts, sampler.greedy(), number, "eval").finish(Clock()).scored
        return {f"eval/{section.name}/reward_mean": float(scored.reward_B.mean())}


def mini_batches(group_B: NDArray[Any], pieces: int, seed: tuple[int, ...]) -> list[NDArray[np.int64]]:
    """Indices of each mini-batch, ascending: equal pieces, each with an equal share of every group.

    All prompts in every optimizer step make its gradient steadier than a few whole groups would (the quickstart ends
    at 0.97 instead of 0.90), and what a group has in a mini-batch still shares its prompt.
    """
    if pieces == 1:
        return [np.arange(len(group_B))]
    order = np.random.default_rng(seed).permutation(len(group_B))
    _, inverse_B = np.unique(group_B[order], return_inverse=True)
    by_group = np.argsort(inverse_B, kind="stable")
    starts_G = np.cumsum(np.bincount(inverse_B)) - np.bincount(inverse_B)
    member_B = np.empty(len(group_B), dtype=np.int64)  # how many of its group come before it, in random order
    member_B[by_group] = np.arange(len(group_B)) - starts_G[inverse_B[by_group]]
    return [np.sort(piece) for piece in np.array_split(order[np.argsort(member_B, kind="stable")], pieces)]

"""Reinforcement learning: one step, top to bottom, on one screen (`Rl.step`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlctl.loop import advantages, correction, covariance, finite_check, step_metrics
from rlctl.loop.driver import Arrived, Driver, ModelColumn, StepRecord, UpdateWindow
from rlctl.loop.kl_control import KlController
from rlctl.loop.logprob_gap import Gap, GapLimits
from rlctl.loop.prompt_evaluation import PromptEvaluation
from rlctl.loop.recovery import SteadyGrading, SteadySync
from rlctl.loop.residency import Residency
from rlctl.loop.rollouts import Rollouts, without_truncated
from rlctl.loop.sample_queue import SampleQueue
from rlctl.loop.sampling import Scored
from rlctl.loop.scores.reward_failure_watch import RewardFailureWatch
from rlctl.loop.scores.signal_watch import SignalWatch
from rlctl.loop.step_metrics import Updates
from rlctl.loop.sync import SyncReport
from rlctl.loop.turn_credit import by_turn
from specs.errors import NotFiniteError
from specs.schema.algorithms.algorithm import AnyLoss, placed
from specs.schema.metric import Metric
from specs.schema.recipes import RlSpec
from specs.schema.roles import ACTOR, RoleName
from specs.wire import bodies
from specs.wire.as_built import ModelBuilt
from specs.wire.batch import Batch
from specs.wire.messages import Verb

if TYPE_CHECKING:
    from rlctl.processes.group import Group
    from rlctl.show.progress import Progress

METRICS: tuple[Metric, ...] = (
    Metric(
        name="critic/explained_variance",
        unit="share",
        meaning="Of the returns' variance, what the critic's values before the update explain.",
        when="with a critic, unless all returns are the same",
    ),
)


class Rl(Driver):
    """Drives the roles through an algorithm."""

    def __init__(
        self,
        spec: RlSpec,
        groups: Mapping[str, Group],
        residency: Residency,
        sync: SteadySync,
        gap_limits: GapLimits,
        window: UpdateWindow,
        progress: Progress,
        spec_dir: Path = Path(),
        built: Mapping[RoleName, ModelBuilt] | None = None,
        grading: SteadyGrading | None = None,
    ) -> None:
        """`spec_dir`: where relative paths of the spec start. `built`: each role's model, as far as it is known.
        `grading` brings back what is lost of the reward role; None: nothing does."""
        super().__init__(spec, groups, residency, window, progress, built)
        self.spec, self.spec_dir, self.sync = spec, spec_dir, sync
        self.gap_limits = gap_limits
        self.actor = self.lead
        self.kl = KlController(spec.algorithm)
        self.sampler = self.make_sampler(spec, groups, sync, grading)
        self.evaluation = PromptEvaluation(self.sampler, self.phase, progress.warning)
        self.queue = SampleQueue(spec, self.sampler)
        self.reward_failures = RewardFailureWatch(spec.reward.max_failed_share, progress.warning)
        self.signals = SignalWatch(spec, progress.warning)
        self.correction_metrics: dict[str, float] = {}

    # ── one step ──────────────────────────────────────────────────────────────────────────────────

    def step(self, step: int) -> StepRecord:
        """Sample, grade, train, and send the weights where samples to come need them. `step` counts from 1."""
        self.clock.start()
        self.sampler.graders.restore(step)
        self.sync.resend_if_asleep(step)
        with self.phase("rollout", step):
            drawn = self.queue.take(step)
        self.reward_failures.see(drawn.scored, f"step {step}")
        with self.phase("train", step):
            batch = self.add_model_columns(drawn.batch, step)
            batch = self.add_correction(batch)
            batch = self.add_advantages(batch, drawn.scored)
            finite_check.check_batch(batch, drawn.scored.reward_B, step)
            updates = self.update(batch, step)
        self.sync.weights.actor_finished(self.spec.weights_version(step))
        synced = self.send_weights(step) if self.queue.needs_weights(step) else None
        self.queue.trained()
        self.window.close()
        return self.record(step, batch, drawn.scored, updates, synced)

    def begin(self, done: int) -> None:
        """Before the first step of an attempt: the rollout gets the weights that the actor has after `done` steps."""
        self.sync.weights.actor_finished(self.spec.weights_version(done))
        self.send_weights(done)

    def send_weights(self, step: int) -> SyncReport | None:
        """Wait until nothing is being sampled, then give the rollout the weights that the actor has after `step`
        steps. None: it has them, for the actor has not learned since."""
        with self.clock.measure("rollout"):
            self.queue.wait_until_sampled()
        if self.sync.weights.holds(self.spec.weights_version(step)):
            return None
        with self.phase("sync", step):
            return self.sync.run(step)

    def record(
        self, step: int, batch: Batch, scored: Scored, updates: Updates, synced: SyncReport | None
    ) -> StepRecord:
        """Return the outcome of the step. Warn of what went wrong in it without ending the run."""
        advantage, times = self.spec.algorithm.advantage, self.clock.metrics()
        compared = (advantage.min_group, advantage.equal_is_silent)
        metrics = step_metrics.collect(step, batch, scored, self.spec.losses, updates, synced, times, *compared)
        metrics |= explained(batch, scored) | correction.diagnostics(batch) | self.correction_metrics
        rollouts = len(Rollouts.of(batch["rollout_B"]).first_R)
        metrics |= self.kl.after_step(metrics, rollouts, learned="actor" in updates)
        metrics |= self.queue.take_metrics(batch, step, self.clock.span("train"))
        metrics |= self.sampler.take_prefix_share("train")
        self.signals.see(metrics, scored, step)
        metrics |= self.gap_limits.note(metrics, step) | self.residency.take_memory() | self.sync.take_metrics()
        if self.sampler.grading is not None:
            metrics |= self.sampler.grading.metrics()
        return StepRecord(metrics, scored.samples)

    # ── training ──────────────────────────────────────────────────────────────────────────────────

    def add_model_columns(self, batch: Batch, step: int) -> Batch:
        """The batch with what advantage and losses read of the models before the update: log-probs of the actor and the
        reference, the critic's values."""
        wanted: dict[str, ModelColumn] = {}
        if self.spec.needs_critic:
            wanted["value_T"] = ModelColumn(self.learners["critic"], Verb.VALUES)
        if "old_logprob_T" in self.spec.columns_read:
            wanted["old_logprob_T"] = self.logprobs_of(self.actor)
        if self.ref is not None:
            wanted["ref_logprob_T"] = self.logprobs_of(self.ref)
        elif self.spec.ref_is_actor:
            wanted["ref_logprob_T"] = self.logprobs_of(self.actor, adapters=False)
        return batch.with_columns(**self.compute(wanted, batch, step))

    def add_correction(self, batch: Batch) -> Batch:
        """The batch with the off-policy weights, where there are any. The gap's limits hold all the same (`update`)."""
        table = self.spec.algorithm.correction
        if table is None:
            return batch
        batch, excluded = correction.without_non_numbers(batch)
        column_T, metrics = correction.correct(table, batch, self.spec.ratio_against)
        self.correction_metrics = {**metrics, "correction/not_finite": excluded}
        return batch.with_columns(correction_T=column_T)

    def add_advantages(self, batch: Batch, scored: Scored) -> Batch:
        table, penalty_T = placed(self.spec.algorithm.advantage, self.spec_dir), self.kl.penalty_T(batch)
        score_B = scored.reward_B
        if (weight := self.spec.turn_weight) is not None:
            score_B, penalty_T = by_turn(batch, score_B, weight, penalty_T)
        return batch.with_columns(**advantages.columns(table, batch, score_B, scored.scored_B, penalty_T))

    def update(self, batch: Batch, step: int) -> Updates:
        """All optimizer steps of this step; returns what each rank of each role that learned reports of each. Raises
        LogprobGapError before the first one when sampler and trainer disagree, NotFiniteError before the one whose
        loss is not a number."""
        algorithm = self.spec.algorithm
        updates: Updates = {role: [] for role in self.learners if step > self.spec.learns_after(role)}
        empty = 0
        if "old_logprob_T" in batch:
            self.check_gap(batch, Gap.of_batch(batch, batch["old_logprob_T"]), step)
        if self.spec.masks_truncated:
            batch = without_truncated(batch)
        for epoch in range(algorithm.epochs_per_step):
            seed = (self.spec.run.seed, step, epoch)
            pieces = mini_batches(batch["group_B"], algorithm.mini_batches_per_step, seed)
            for number, chosen in enumerate(pieces):
                piece = batch.select(chosen)
                if not piece["loss_mask_T"].any():
                    empty += 1  # weight decay and the schedule's clock would move by nothing that was learned
                    continue
                mini = covariance.with_selection(self.spec.loss, piece, (*seed, number))
                for role, reports in self.one_update(batch, mini, list(updates), step).items():
                    updates[role].append(reports)
        if empty:
            self.progress.warning(f"step {step}: {empty} mini-batches have no loss tokens: no optimizer step is made")
        return {role: reports for role, reports in updates.items() if reports}

    def inspect(self, sums: Mapping[RoleName, Sequence[Mapping[str, float]]], batch: Batch, step: int) -> None:
        """Refuse to learn where the actor disagrees with the sampler, if its log-probs before the step came with the
        first update."""
        if ACTOR in sums and "old_logprob_T" not in batch and not self.window.is_open:
            self.check_gap(batch, Gap.of_sums(sums[ACTOR]), step)

    def loss_of(self, role: RoleName) -> AnyLoss:
        return placed(self.kl.in_loss(self.spec.losses[role]), self.spec_dir)

    def check_gap(self, batch: Batch, gap: Gap, step: int) -> None:
        """Refuse to learn from samples on which sampler and trainer disagree. Raises LogprobGapError."""
        if not self.gap_limits.broken_by(gap):
            return
        if "old_logprob_T" not in batch:  # the trainer's are still the current ones
            batch = batch.with_columns(**self.compute({"old_logprob_T": self.logprobs_of(self.actor)}, batch, step))
        raise self.gap_limits.stop(gap, batch, batch["old_logprob_T"], step)

    def not_finite(self, role: RoleName, found: str, mini: Batch, step: int) -> NotFiniteError:
        if self.learners[role] is not self.actor:
            return finite_check.of_value_update(found, mini)
        now_T = self.compute({"now": self.logprobs_of(self.actor)}, mini, step)["now"]
        return finite_check.of_update(found, mini, now_T)

    def loss_scale(self, mini: Batch) -> bodies.LossScale:
        """Global counts of a mini-batch: what every rank divides by."""
        tokens_B = mini.sum_by_sequence("loss_mask_T")
        return bodies.LossScale(
            num_loss_tokens=int(tokens_B.sum()),
            num_sequences=int((tokens_B > 0).sum()),
            max_response_tokens=self.spec.max_sequence_tokens - self.spec.max_prompt_tokens,
        )

    # ── checkpoints ───────────────────────────────────────────────────────────────────────────────

    def proof_prompts(self) -> list[list[int]]:
        first = bodies.Prompts(what="train", position=0, count=2, group_size=1)
        return [tokens.tolist() for tokens in self.data.call(Verb.PROMPTS, first)[0].batch.sequences("tokens_T")]

    def save(self, folder: Path) -> dict[str, Any]:
        return {**self.queue.save(folder), **self.kl.save()}

    def restore(self, folder: Path, state: Mapping[str, Any]) -> Mapping[int, int]:
        """Go on from what `save` left; returns how many samples drawn ahead are left out, by step."""
        self.kl.restore(state)
        return self.queue.restore(folder, state)

    def begin_at(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Go on with the prompts that come after what another run's `save` left. What it had drawn ahead, and how it
        steered β, are that run's own."""
        self.queue.restore(folder, {"position": state["position"]})

    # ── evaluation ────────────────────────────────────────────────────────────────────────────────

    def evaluate(self, step: int, arrived: Arrived | None = None) -> StepRecord:
        """Metrics of every set of prompts, with the weights after `step` steps, and all of the completions. `arrived`
        is told of each set how many completions of all are here."""
        self.send_weights(step)
        return self.evaluation.run(step, arrived)


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


def explained(batch: Batch, scored: Scored) -> dict[str, float]:
    """Share of the returns' variance that the critic's values, from before the update, explain: 1 - Var(R - V) / Var(R)
    over the loss tokens of graded samples. Left out where all returns are the same."""
    if "return_T" not in batch:
        return {}
    graded_T = (batch["loss_mask_T"] > 0) & np.repeat(scored.scored_B, batch["length_B"])
    value_N, return_N = (batch[name][graded_T].astype(np.float64) for name in ("value_T", "return_T"))
    variance = float(return_N.var()) if len(return_N) else 0.0
    return {"critic/explained_variance": 1 - float((return_N - value_N).var()) / variance} if variance > 0 else {}

"""The driver: one step of training, top to bottom, on one screen (`Driver.step`)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlctl import advantages, step_metrics
from rlctl.gap_budget import Gap, GapBudget
from rlctl.residency import Phase, Residency
from rlctl.sync import WeightSync
from specs.batch import Batch, balanced_shards
from specs.messages import COLUMNS, Verb
from specs.role_config import Sampling
from specs.schema import Spec

if TYPE_CHECKING:
    from rlctl.calls import Call
    from rlctl.groups import Group
    from rlctl.progress import Progress

SAMPLES_SHOWN = 4  # decoded samples that each step leaves in samples.jsonl


@dataclass
class Clock:
    """Seconds by phase of one step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


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
        sync: WeightSync,
        gap_budget: GapBudget,
        progress: Progress,
    ) -> None:
        self.spec, self.residency, self.sync, self.progress = spec, residency, sync, progress
        self.gap_budget = gap_budget
        self.actor, self.rollout, self.reward = groups["actor"], groups["rollout"], groups["reward"]
        self.ref = groups.get("ref")
        self.position = 0  # prompt draws so far: the data cursor
        self.updating = False  # between the first optimizer step of a step and its end: not a state to save
        self.eval_prompts: Batch | None = None

    # ── one step ──────────────────────────────────────────────────────────────────────────────────

    def step(self, number: int) -> StepRecord:
        """Generate, score, learn, sync. `number` counts from 1. The cursor moves only when the step is done."""
        clock, started = Clock(), time.perf_counter()
        prompts, position = self.draw_prompts(number)

        with self.phase("generate", number), clock.measure("rollout"):
            samples, scored = self.generate_and_score(prompts, number, clock)
        with self.phase("learn", number), clock.measure("update"):
            batch = self.with_logprobs(samples, number)
            batch = self.with_advantages(batch, scored)
            updates = self.update(batch, number)
        with self.phase("sync", number), clock.measure("sync"):
            synced = self.sync.run(number)

        self.position, self.updating = position, False
        total_s = time.perf_counter() - started
        metrics = step_metrics.collect(number, batch, scored, updates, synced, clock.seconds, total_s)
        metrics |= self.gap_budget.note(metrics, number) | self.residency.take_memory()
        return StepRecord(metrics, scored.samples)

    @contextmanager
    def phase(self, name: Phase, number: int) -> Iterator[None]:
        self.progress.phase(name)
        self.residency.enter(name, step=number)
        yield

    # ── prompts, samples, scores ──────────────────────────────────────────────────────────────────

    def draw_prompts(self, number: int) -> tuple[Batch, int]:
        """This step's prompts, each repeated for its group, and the cursor after them."""
        spec = self.spec
        body = {
            "what": "train",
            "position": self.position,
            "count": spec.data.prompts_per_step,
            "group_size": spec.algorithm.group_size,
        }
        answer = self.reward.call(Verb.PROMPTS, body, step=number)[0]
        return answer.batch, int(answer.body["position"])

    def generate_and_score(self, prompts: Batch, number: int, clock: Clock) -> tuple[Batch, Scored]:
        """Samples in the order of their ids, judged while others are still being written."""
        spec = self.spec
        sampling = Sampling(
            seed=spec.run.seed,
            temperature=spec.rollout.temperature,
            top_p=spec.rollout.top_p,
            top_k=spec.rollout.top_k,
            max_response_tokens=spec.data.max_response_tokens,
        )
        parts, judging = [], []
        for part in self.generate(prompts, sampling, number):
            parts.append(part)
            judging.append(self.score(part, "train", number, SAMPLES_SHOWN if len(parts) == 1 else 0))
        with clock.measure("reward"):  # what judging costs beyond generation
            scored = Scored.gather(parts, judging)
        return in_id_order(Batch.concat(parts)), scored

    def generate(self, prompts: Batch, sampling: Sampling, number: int) -> Iterator[Batch]:
        """Batches of finished groups, as they finish. Whole groups are dealt out to the replicas in turn."""
        shards = group_shards(prompts["group_B"], self.rollout.size)
        prompts.require(COLUMNS[Verb.GENERATE].needs, Verb.GENERATE)
        call = self.rollout.post(
            Verb.GENERATE,
            {"sampling": sampling.model_dump()},
            tensors=[prompts.select(shard).columns for shard in shards],
            step=number,
        )
        count = 0
        for part in call.parts():
            count += len(part.batch)
            yield part.batch
        assert count == len(prompts), f"{len(prompts)} prompts went out, {count} answers came back"

    def score(self, samples: Batch, what: str, number: int, show: int) -> Call:
        columns = samples.only(COLUMNS[Verb.SCORE].needs).columns
        return self.reward.post(Verb.SCORE, {"what": what, "samples": show}, tensors=columns, step=number)

    # ── learning ──────────────────────────────────────────────────────────────────────────────────

    def with_logprobs(self, batch: Batch, number: int) -> Batch:
        """Add the log-probs that the loss needs: the actor's before the update, and the reference's."""
        wanted: dict[str, tuple[Group, bool]] = {}  # column → who computes it, and whether with adapters
        if not self.spec.algorithm.on_policy:
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
        needed = batch.only([*columns.needs, *(name for name in columns.optional if name in batch)])
        if not algorithm.on_policy:
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
                if algorithm.on_policy:
                    self.check_gap(batch, Gap.of_sums(answer.body["sums"] for answer in answers), number)
                self.updating = True
                steps = self.actor.call(Verb.STEP, step=number)
                reports.append([{**sums.body, **done.body} for sums, done in zip(answers, steps, strict=True)])
        return reports

    def check_gap(self, batch: Batch, gap: Gap, number: int) -> None:
        """Refuse to learn from samples on which sampler and trainer disagree. Raises LogprobGapError."""
        if not self.gap_budget.broken_by(gap):
            return
        if "old_logprob_T" not in batch:  # on-policy: the trainer's are still the current ones
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
        with self.phase("generate", number):
            self.progress.phase("eval")
            if self.eval_prompts is None:
                body = {"what": "eval", "position": 0, "count": section.prompts, "group_size": 1}
                self.eval_prompts = self.reward.call(Verb.PROMPTS, body, step=number)[0].batch
            sampling = Sampling(
                seed=self.spec.run.seed, greedy=True, max_response_tokens=self.spec.data.max_response_tokens
            )
            parts = list(self.generate(self.eval_prompts, sampling, number))
            scored = Scored.gather(parts, [self.score(part, "eval", number, 0) for part in parts])
        return {f"eval/{section.name}/reward_mean": float(scored.reward_B.mean())}


@dataclass(frozen=True)
class Scored:
    """Scores in the order of sample ids, and what judging had to say."""

    reward_B: NDArray[np.float32]
    scored_B: NDArray[np.bool_]  # False: judging failed and the fallback stands
    failures: dict[str, int]
    terms: dict[str, float]
    samples: list[dict[str, Any]]

    @staticmethod
    def gather(parts: Sequence[Batch], calls: Sequence[Call]) -> Scored:
        answers = [call.result()[0] for call in calls]
        order = np.argsort(np.concatenate([part["id_B"] for part in parts]), kind="stable")
        columns = {
            name: np.concatenate([answer.tensors[name] for answer in answers])[order] for name in answers[0].tensors
        }
        failures: dict[str, int] = {}
        for answer in answers:
            for cause, count in answer.body["failures"].items():
                failures[cause] = failures.get(cause, 0) + int(count)
        terms = {
            name: float(column.mean()) for name, column in columns.items() if name.startswith("term_") and len(column)
        }
        samples = [sample for answer in answers for sample in answer.body.get("samples", ())]
        return Scored(columns["reward_B"], columns["scored_B"].astype(bool), failures, terms, samples)


def in_id_order(batch: Batch) -> Batch:
    """Samples in the order of their ids: which replica finished first must not change a bit of the step."""
    return batch.select(np.argsort(batch["id_B"], kind="stable"))


def group_shards(group_B: NDArray[Any], shards: int) -> list[NDArray[np.int64]]:
    """Whole groups to each shard, in turn."""
    _, inverse_B = np.unique(group_B, return_inverse=True)
    return [np.flatnonzero(inverse_B % shards == shard) for shard in range(shards)]


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

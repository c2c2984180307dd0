"""From prompts to graded samples: completions are graded as they arrive, while others are still being sampled."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlctl.loop.rollouts import Rollouts, first_valid
from rlctl.loop.scores.graders import Graders, Grading
from rlctl.loop.scores.term_scores import TermScores, add_up, of_environments
from rlctl.processes.calls import RanksFailed
from specs.schema.metric import Metric, metrics
from specs.schema.recipes import SamplingSpec
from specs.schema.rewards import JUDGED_PARTS, MAX_SCORE
from specs.schema.spec import RewardSection
from specs.wire import bodies
from specs.wire.batch import Batch
from specs.wire.bodies import PromptsDrawn, Row, What
from specs.wire.messages import COLUMNS, Verb
from specs.wire.role_config import Sampling

if TYPE_CHECKING:
    from rlctl.loop.clock import Clock
    from rlctl.loop.recovery import SteadyGrading, SteadySync
    from rlctl.loop.scores.term_scores import ScoreModel
    from rlctl.processes.calls import Call
    from rlctl.processes.group import Group
    from specs.schema.eval_sets import Evaluation
    from specs.wire.messages import Message

OnArrival = Callable[[int, int], None]
"""Gets how many completions are here, and how many there will be."""

PREFIX_COUNTS = ("reused_tokens", "prefilled_tokens")  # of prompts, that the sampler had or computed
SAMPLES_SHOWN = 4  # decoded samples that each step leaves in samples.jsonl


@dataclass(frozen=True)
class PromptBatch:
    """Prompts, each repeated for its group, and the rows that they were made from, by the numbers in `row_B`: a row
    goes to the scorer with the samples of its group, so that the scorer holds no data of its own."""

    batch: Batch
    rows: Mapping[str, Row]

    @staticmethod
    def of(answer: Message) -> PromptBatch:
        """From the data role's answer."""
        return PromptBatch(answer.batch, PromptsDrawn.of(answer).rows)

    def select(self, indices: NDArray[np.int64]) -> PromptBatch:
        batch = self.batch.select(indices)
        return PromptBatch(batch, self.rows_of(batch))

    @staticmethod
    def concat(first: PromptBatch, second: PromptBatch) -> PromptBatch:
        return PromptBatch(Batch.concat([first.batch, second.batch]), {**first.rows, **second.rows})

    def rows_of(self, batch: Batch) -> dict[str, Row]:
        """The rows of some of the samples, each once."""
        return {key: self.rows[key] for key in map(str, np.unique(batch["row_B"]).tolist())}


class Sampler:
    """Has the data role draw prompts, the rollout complete them and the reward role grade the completions."""

    def __init__(
        self,
        spec: SamplingSpec,
        data: Group,
        rollout: Group,
        reward: Group,
        clock: Clock,
        sync: SteadySync,
        score_model: ScoreModel | None = None,
        grading: SteadyGrading | None = None,
        generation: type[Generation] | None = None,
    ) -> None:
        """`clock` measures the grading beyond the sampling. `sync` restores failed replicas, and gives the rollout its
        weights where a reward model has taken their place on the device. `grading` restores failed graders; None:
        nothing does. `generation`: how a batch is sampled, where a completion is not all of a rollout."""
        self.score_model, self._generation = score_model, generation or Generation
        self.spec, self.data, self.rollout, self.reward = spec, data, rollout, reward
        judged = any(term.graded_by == "judge" for term in spec.reward_terms)
        self.graders = Graders(reward, JUDGED_PARTS if judged else 1, grading)
        self.prefix_counts: dict[What, Counter[str]] = defaultdict(Counter)
        self.forgotten: dict[int, list[int]] = defaultdict(list)  # by replica: samples that it may drop (`TurnRelay`)
        self.episodes: deque[Callable[[], None]] = deque()  # batches of them that have begun or will, by their start
        self.unbegun: list[Callable[[], None]] = []  # starts of episodes that found no rank to run them
        self.stranded: list[Callable[[], None]] = []  # how turns are drawn that found no replica
        self.clock, self.sync, self.grading = clock, sync, grading

    def take_prefix_share(self, what: What) -> dict[str, float]:
        """Return which share of the turns' prompts was not computed again, since the last call."""
        reused, computed = (self.prefix_counts[what].pop(name, 0) for name in PREFIX_COUNTS)
        return {"episode/prefix_reused": reused / (reused + computed)} if reused + computed else {}

    def held_out(self, one: Evaluation, step: int) -> PromptBatch:
        """Prompts for an evaluation, each as often as it is completed."""
        request = bodies.Prompts(
            what="eval", name=one.name, position=0, count=one.prompts, group_size=one.samples_per_prompt
        )
        return PromptBatch.of(self.data.call(Verb.PROMPTS, request, step=step)[0])

    def measured(self, one: Evaluation) -> Sampling:
        """How the samples of an evaluation are drawn."""
        chance = {"temperature": one.temperature, "top_p": one.top_p} if one.temperature > 0 else {"greedy": True}
        return Sampling(seed=self.spec.run.seed, max_response_tokens=self.spec.max_response_tokens, **chance)

    def start(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        step: int,
        what: What = "train",
        show: int = 0,
        on_arrival: OnArrival = lambda arrived, total: None,
    ) -> Generation:
        """Send the prompts out and return at once."""
        generation = self._generation(self, prompts, sampling, step, what, show, on_arrival)
        generation.start()
        return generation


@dataclass(frozen=True)
class SampledPart:
    """Completions that came in together, and their grading."""

    batch: Batch
    grading: Grading


class Generation:
    """A batch on its way. Completions arrive, and are sent on to the grader, whenever the driver waits for any role.

    Whole groups are dealt out to the replicas in turn, and come back one by one as they finish.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompts: PromptBatch,
        sampling: Sampling,
        step: int,
        what: What,
        show: int,
        on_arrival: OnArrival,
    ) -> None:
        """`show`: of how many rollouts a sample is kept as text; of an evaluation it is all."""
        self.prompts, self.step = prompts, step
        self._sampler, self._sampling, self._what = sampler, sampling, what
        places = np.linspace(0, len(prompts.batch) - 1, min(show, len(prompts.batch))).astype(int)
        self._shown = set(prompts.batch["rollout_B"][places].tolist())  # not what ends first, which is the shortest
        self._on_arrival = on_arrival
        self.sent_at = 0.0
        self.written_at = 0.0  # when the last completion came in; 0: some are still to come
        self._parts: list[SampledPart] = []
        self._answered = 0  # prompts: a rollout may leave several samples
        self._scores: dict[str, list[TermScores]] = defaultdict(list)  # by grader, of the first `_scored` parts
        self._scored = 0
        self._calls: list[Call] = []  # one per replica

    def start(self) -> None:
        """Send the prompts out."""
        self.sent_at = time.perf_counter()
        self._send(self.prompts.batch)

    def extend(self, more: PromptBatch) -> None:
        """Send out further prompts, whose samples belong to the same batch. Everything before them is here."""
        self._sampler.sync.resend_if_asleep(self.step)
        self.prompts = PromptBatch.concat(self.prompts, more)
        self._send(more.batch)

    def _send(self, prompts: Batch) -> None:
        rollout = self._sampler.rollout
        shards = group_shards(prompts["group_B"], rollout.size)
        self._calls = [
            rollout.post(
                Verb.GENERATE,
                bodies.Generate(sampling=self._sampling),
                tensors=prompts.select(shard).columns,
                step=self.step,
                ranks=[replica],
                on_part=lambda message: self._grade(message.batch),
                alone=self._sampler.spec.rollout.in_order,
            )
            for replica, shard in zip(rollout.here, shards, strict=True)
        ]

    def _grade(self, batch: Batch, episodes: Mapping[str, dict[str, Any]] = MappingProxyType({})) -> None:
        """Have completions that have just come in graded. `episodes`: what they are part of, by first sample."""
        sampler = self._sampler
        needed = (*COLUMNS[Verb.SCORE].needs, *(("rollout_logprob_T",) if episodes else ()))
        rows, columns = self.prompts.rows_of(batch), batch.only(needed).columns
        shown = batch["id_B"].tolist()
        if self._what != "eval":
            places = [place for place, rollout in enumerate(batch["rollout_B"].tolist()) if rollout in self._shown]
            shown = _one_of_each_rollout(batch.select(places)) if places else []
        request = bodies.Score(what=self._what, samples=shown, rows=rows, episodes=dict(episodes))
        self._parts.append(SampledPart(batch, sampler.graders.grade(request, columns, self.step)))
        self._answered += len(np.unique(batch["rollout_B"]))
        of_all = len(self.prompts.batch)
        if self._answered == of_all:
            self.written_at = time.perf_counter()
        self._on_arrival(self._answered, of_all)

    def wait(self) -> None:
        """Wait until every completion is here, though perhaps not graded. What a lost replica had not finished goes out
        again, to all."""
        lost = False
        for call in self._calls:
            try:
                call.result()
            except RanksFailed:
                lost = True
        if lost:
            left = self._unanswered()
            if len(left):
                self._sampler.sync.restore(self.step)
                self._send(left)
                self.wait()
        assert not len(self._unanswered()), "prompts went out, and no completion came back"

    def _unanswered(self) -> Batch:
        prompts = self.prompts.batch
        answered = np.concatenate([np.zeros(0), *(part.batch["id_B"] for part in self._parts)])
        return prompts.select(np.flatnonzero(~np.isin(prompts["id_B"], answered)))

    def finish(self) -> Drawn:
        """Wait for samples, in the order of their ids, and their scores."""
        self.wait()
        batches = [part.batch for part in self._parts]
        batch = in_id_order(Batch.concat(batches))
        assert len(np.unique(batch["id_B"])) == len(batch), "a sample came back twice"
        with self._sampler.clock.measure("grading"):
            self._wait_for_scores()
            found = [TermScores.concat(parts) for parts in self._scores.values()]
            scored = Scored.gather(batches, found, self._sampler.spec.grading)
        drawn, prompts = Drawn(batch, scored), self.prompts.batch
        if "greedy_B" not in prompts:
            return drawn
        return drawn.with_baseline(np.isin(batch["rollout_B"], prompts["rollout_B"][prompts["greedy_B"] != 0]))

    def _wait_for_scores(self) -> None:
        """Wait for those of the parts that are new since the last time. A wait that is broken off begins again."""
        if not (new := self._parts[self._scored :]):
            return
        graded = [part.grading.result() for part in new]
        found = {"role": [*map(TermScores.of, graded)]}
        if (model := self._sampler.score_model) is not None:
            model.begin(self.step)
            id_B = np.concatenate([part.batch["id_B"] for part in new])
            found["model"] = [model.score(graded, id_B, self.step)]
        if "stop_B" in new[0].batch:
            number = self._sampler.spec.environment_term
            found["environments"] = [of_environments(part.batch, number) for part in new]
        for grader, scores in found.items():
            self._scores[grader] += scores
        self._scored += len(new)


def _one_of_each_rollout(batch: Batch) -> list[int]:
    """Return the id of a sample of each rollout: the first that is learned from, as an agent may begin with a title,
    else the first."""
    order = np.argsort(batch.sum_by_sequence("loss_mask_T") == 0, kind="stable")
    first_R = order[Rollouts.of(batch["rollout_B"][order]).first_R]
    ids: list[int] = batch["id_B"][first_R].tolist()
    return ids


METRICS: tuple[Metric, ...] = (
    Metric(name="reward/term_<i>", meaning="Mean of entry i of `reward.terms`, before its weight.", in_eval=True),
    *metrics(
        "with dynamic sampling",
        {
            "rollout/refills": "How often prompts were drawn again.",
            "rollout/thrown_groups [groups]": "Thrown away because all completions score the same.",
        },
    ),
    *metrics(
        "the baseline is greedy (`remax`)",
        {
            "reward/greedy_mean": "Mean score of the greedy completions that the samples are compared with.",
            "rollout/greedy_samples": "How many greedy completions there were.",
            "rollout/greedy_tokens [tokens]": "Of the greedy completions.",
        },
    ),
)


@dataclass(frozen=True)
class Thrown:
    """Count what dynamic sampling threw away of a step (rlctl/loop/dynamic_sampling.py)."""

    refills: int  # how often prompts were drawn again
    groups: int  # thrown away
    signal: int  # groups whose scores differ, of those that stayed
    reward_R: list[float]  # scores of the rollouts that were thrown away, of those that could be graded
    term_R: Mapping[str, list[float]] = field(default_factory=dict)  # the same of each term, as `Scored.term_B`

    def metrics(self) -> dict[str, int]:
        return {"rollout/refills": self.refills, "rollout/thrown_groups": self.groups}


@dataclass(frozen=True)
class Greedy:
    """Greedy completions that samples were compared with: graded, not learned from."""

    samples: int
    tokens: int
    reward_mean: float  # of those that could be graded

    def metrics(self) -> dict[str, float | int]:
        return {
            "reward/greedy_mean": self.reward_mean,
            "rollout/greedy_samples": self.samples,
            "rollout/greedy_tokens": self.tokens,
        }


@dataclass(frozen=True)
class Scored:
    """Scores in the order of sample ids, and what grading had to say."""

    reward_B: NDArray[np.float32]
    scored_B: NDArray[np.bool_]  # False: grading failed and the fallback stands
    failures: dict[str, int]
    samples: list[dict[str, Any]]
    counts: dict[str, float] = field(default_factory=dict)  # what grading took, as metrics below reward/
    thrown: Thrown | None = None  # None without dynamic sampling
    greedy: Greedy | None = None  # None without a greedy baseline
    completions: int = 0  # that were sent to be graded
    first_failure: str = ""  # what the first one without a score died of
    zero_terms: tuple[int, ...] = ()  # those that gave 0 to all that were graded
    term_B: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # by name, `term_<i>_B`

    @staticmethod
    def gather(parts: Sequence[Batch], found: Sequence[TermScores], reward: RewardSection) -> Scored:
        """Weigh what each grader says of all samples, in the order in which they came in.

        A sample that any term could not grade has `reward.fallback` as its whole score; so has one whose score, or
        value of a term, is beyond MAX_SCORE, with which a step cannot compute.
        """
        order = np.argsort(np.concatenate([part["id_B"] for part in parts]), kind="stable")
        id_B, rollout_B = (np.concatenate([part[name] for part in parts])[order] for name in ("id_B", "rollout_B"))
        found = [part.select(order) for part in found]
        value_B = {n: column.astype(np.float64) for part in found for n, column in part.value_B.items()}
        total_B = np.zeros(len(id_B))
        with np.errstate(over="ignore", invalid="ignore"):
            for number, column in value_B.items():
                total_B += reward.terms[number].weight * column
        graded_B = np.logical_and.reduce([part.scored_B for part in found])
        usable_B = np.all([np.abs(column) <= MAX_SCORE for column in (total_B, *value_B.values())], axis=0)
        unusable, scored_B = np.flatnonzero(graded_B & ~usable_B), graded_B & usable_B
        first_failure = next((part.first_failure for part in found if part.first_failure), "")
        if len(unusable) and not first_failure:
            values = ", ".join(f"term {number} is {column[unusable[0]]:g}" for number, column in value_B.items())
            first_failure = f"{values}: beyond ±{MAX_SCORE:g} (sample {id_B[unusable[0]]})"
        term_B = {n: np.where(scored_B, column, 0.0).astype(np.float32) for n, column in sorted(value_B.items())}
        reward_B = np.where(scored_B, total_B, reward.fallback).astype(np.float32)

        def whole(sample: Mapping[str, Any]) -> dict[str, Any]:
            at = int(np.searchsorted(id_B, sample["id"]))
            terms = [float(column[at]) for column in term_B.values()]
            return {**sample, "reward": float(reward_B[at]), "scored": bool(scored_B[at]), "terms": terms}

        return Scored(
            reward_B,
            scored_B,
            add_up([*(part.failures for part in found), {"bad_values": len(np.unique(rollout_B[unusable]))}]),
            sorted((whole(sample) for part in found for sample in part.samples), key=itemgetter("id")),
            add_up([part.counts for part in found]),
            completions=len(np.unique(rollout_B)),
            first_failure=first_failure,
            zero_terms=tuple(number for number, column in term_B.items() if not column[scored_B].any()),
            term_B={f"term_{number}_B": column for number, column in term_B.items()},
        )

    def lost_more_than(self, share: float) -> bool:
        """Return whether more of the completions than this share could not be graded."""
        return sum(self.failures.values()) > share * self.completions

    def by_rollout(self, rollout_B: NDArray[np.int64]) -> NDArray[np.float32]:
        """The score of each rollout whose grading worked, also of those that were thrown away; of every one here, with
        the fallback, where none did."""
        thrown_R = np.array(self.thrown.reward_R if self.thrown else (), dtype=np.float32)
        graded_R = np.concatenate([self.reward_B[first_valid(rollout_B, self.scored_B)], thrown_R])
        return graded_R if len(graded_R) else self.reward_B[first_valid(rollout_B, np.ones_like(self.scored_B))]

    def mean_terms(self, rollout_B: NDArray[np.int64]) -> dict[str, float]:
        """Return term_<i>: its mean over the same rollouts, also those thrown away; 0 where no grading worked."""
        chosen, thrown = first_valid(rollout_B, self.scored_B), self.thrown.term_R if self.thrown else {}
        return {
            name.removesuffix("_B"): _mean(np.concatenate([column[chosen], thrown.get(name, ())]))
            for name, column in self.term_B.items()
        }

    def select(self, indices: NDArray[np.int64]) -> Scored:
        """The scores of some samples. What grading had to say stays as it was said of all."""
        term_B = {name: column[indices] for name, column in self.term_B.items()}
        return replace(self, reward_B=self.reward_B[indices], scored_B=self.scored_B[indices], term_B=term_B)


@dataclass(frozen=True)
class Drawn:
    """Samples in the order of their ids, and their scores."""

    batch: Batch
    scored: Scored

    def with_baseline(self, greedy_B: NDArray[np.bool_]) -> Drawn:
        """Without the greedy rollouts, one in each group, whose scores become the column `baseline_B`. Where that could
        not be graded, its group counts as not graded."""
        batch, scored = self.batch, self.scored
        greedy, kept = np.flatnonzero(greedy_B), np.flatnonzero(~greedy_B)
        groups, of_B = np.unique(batch["group_B"], return_inverse=True)
        rollouts = len(np.unique(batch["rollout_B"][greedy]))
        assert rollouts == len(groups), "a greedy rollout in each group"
        baseline_G, valid_G = np.zeros(len(groups), np.float32), np.zeros(len(groups), dtype=bool)
        baseline_G[of_B[greedy]], valid_G[of_B[greedy]] = scored.reward_B[greedy], scored.scored_B[greedy]
        tokens = int(batch.sum_by_sequence("loss_mask_T")[greedy].sum())
        summary = Greedy(rollouts, tokens, _mean(baseline_G[valid_G]))
        left = replace(scored.select(kept), scored_B=(scored.scored_B & valid_G[of_B])[kept], greedy=summary)
        return Drawn(batch.select(kept).with_columns(baseline_B=baseline_G[of_B][kept]), left)

    def fresh(self, version: int, max_staleness: int) -> Drawn:
        """Without the groups that hold a sample which is more than `max_staleness` older than weights of `version`: a
        group is compared within itself, so it stays or goes as a whole."""
        stale_B = version - self.batch["version_B"] > max_staleness
        if not stale_B.any():
            return self
        group_B = self.batch["group_B"]
        kept = np.flatnonzero(~np.isin(group_B, group_B[stale_B]))
        return Drawn(self.batch.select(kept), self.scored.select(kept))


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean(dtype=np.float64)) if len(values) else 0.0


def in_id_order(batch: Batch) -> Batch:
    """Samples in the order of their ids: which replica finished first must not change a bit of the step."""
    return batch.select(np.argsort(batch["id_B"], kind="stable"))


def group_shards(group_B: NDArray[Any], shards: int) -> list[NDArray[np.int64]]:
    """Whole groups to each shard, in turn."""
    _, inverse_B = np.unique(group_B, return_inverse=True)
    return [np.flatnonzero(inverse_B % shards == shard) for shard in range(shards)]

"""From prompts to graded samples: completions are graded as they arrive, while others are still being sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlctl.loop.rollouts import first_valid
from rlctl.loop.scores import late_scores
from rlctl.loop.scores.graders import HOME, Graders, Grading
from rlctl.processes.calls import RanksFailed
from specs.schema.metric import Metric
from specs.schema.spec import RewardSection, Spec
from specs.wire import bodies
from specs.wire.batch import Batch
from specs.wire.bodies import PromptsDrawn, Row, What
from specs.wire.messages import COLUMNS, Verb
from specs.wire.role_config import Sampling

if TYPE_CHECKING:
    from rlctl.loop.clock import Clock
    from rlctl.loop.recovery import SteadySync
    from rlctl.loop.scores.late_scores import LateScores, ScoreModel
    from rlctl.processes.calls import Call
    from rlctl.processes.group import Group
    from specs.schema.eval_sets import Evaluation
    from specs.wire.messages import Message

OnArrival = Callable[[int, int], None]
"""Gets how many completions are here, and how many there will be."""

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
        spec: Spec,
        data: Group,
        rollout: Group,
        reward: Group,
        clock: Clock,
        sync: SteadySync,
        score_model: ScoreModel | None = None,
    ) -> None:
        """`clock` measures the grading beyond the sampling. `sync` restores failed replicas, and gives the rollout its
        weights where a reward model has taken their place on the device."""
        self.score_model = score_model
        self.spec, self.data, self.rollout, self.reward = spec, data, rollout, reward
        self.graders = Graders(reward)
        self.judged = any(term.graded_by == "judge" for term in spec.reward.terms)
        self.clock, self.sync = clock, sync

    def ask(self, position: int, count: int, step: int) -> Call:
        """Have so many prompts drawn, each repeated for its group and, where the advantage compares with it, for a
        greedy completion; the answer also has the cursor after them."""
        size = self.spec.algorithm.group_size + self._greedy_rows
        request = bodies.Prompts(what="train", position=position, count=count, group_size=size)
        return self.data.post(Verb.PROMPTS, request, step=step)

    def training_prompts(self, answer: Message) -> PromptBatch:
        """Return the prompts that `ask` asked for; of each group that has one the last is for the greedy completion."""
        prompts, size = PromptBatch.of(answer), self.spec.algorithm.group_size
        if not self._greedy_rows:
            return prompts
        greedy_B = np.tile(np.arange(size + 1) == size, len(prompts.batch) // (size + 1))
        return PromptBatch(prompts.batch.with_columns(greedy_B=greedy_B.astype(np.uint8)), prompts.rows)

    @property
    def _greedy_rows(self) -> int:
        return int(self.spec.algorithm.advantage.greedy_baseline)

    def held_out(self, one: Evaluation, step: int) -> PromptBatch:
        """Prompts for an evaluation, each as often as it is completed."""
        request = bodies.Prompts(
            what="eval", name=one.name, position=0, count=one.prompts, group_size=one.samples_per_prompt
        )
        return PromptBatch.of(self.data.call(Verb.PROMPTS, request, step=step)[0])

    def training(self) -> Sampling:
        """How the samples that are learned from are drawn."""
        rollout = self.spec.rollout
        return Sampling(
            seed=self.spec.run.seed,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_response_tokens=self.spec.data.max_response_tokens,
        )

    def measured(self, one: Evaluation) -> Sampling:
        """How the samples of an evaluation are drawn."""
        chance = {"temperature": one.temperature, "top_p": one.top_p} if one.temperature > 0 else {"greedy": True}
        most = self.spec.data.max_response_tokens
        return Sampling(seed=self.spec.run.seed, max_response_tokens=most, **chance)

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
        generation = Generation(self, prompts, sampling, step, what, show, on_arrival)
        generation.start()
        return generation


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
        self.prompts, self.step, self.what, self.show = prompts, step, what, show
        self._sampling = sampling
        self._rollout, self._reward, self._sync = sampler.rollout, sampler.reward, sampler.sync
        self._graders = sampler.graders
        self._clock, self._weights = sampler.clock, sampler.spec.reward
        self._on_arrival = on_arrival
        self.sent_at = 0.0
        self.written_at = 0.0  # when the last completion came in; 0: some are still to come
        self._parts: list[Batch] = []
        self._grading: list[Grading] = []
        self._sent_to_judges: list[Call] | None = [] if sampler.judged else None
        self._score_model = sampler.score_model
        self._rendering: list[Call] = []  # for the reward model
        self._late: dict[str, LateScores] = {}  # of terms that are graded apart, for the first `_joined` parts
        self._joined = 0
        self._call: Call | None = None

    def start(self) -> None:
        """Send the prompts out."""
        self.sent_at = time.perf_counter()
        self.prompts.batch.require(COLUMNS[Verb.GENERATE].needs, Verb.GENERATE)
        self._call = self._send(self.prompts.batch)

    def _send(self, prompts: Batch) -> Call:
        shards = group_shards(prompts["group_B"], self._rollout.size)
        return self._rollout.post(
            Verb.GENERATE,
            bodies.Generate(sampling=self._sampling),
            tensors=[prompts.select(shard).columns for shard in shards],
            step=self.step,
            on_part=self._take,
        )

    def extend(self, more: PromptBatch) -> None:
        """Send out further prompts, whose samples belong to the same batch. Everything before them is here."""
        self._sync.resend_if_asleep(self.step)
        self.prompts = PromptBatch.concat(self.prompts, more)
        self._call = self._send(more.batch)

    def wait(self) -> None:
        """Until every completion is here, though perhaps not graded."""
        self._write_all()
        count = sum(len(part) for part in self._parts)
        assert count == len(self.prompts.batch), (
            f"{len(self.prompts.batch)} prompts went out, {count} completions came back"
        )

    def finish(self) -> Drawn:
        """Wait for samples, in the order of their ids, and their scores."""
        self.wait()
        prompts, greedy_B = self.prompts.batch, None
        if "greedy_B" in prompts:
            greedy_B = prompts["greedy_B"][np.argsort(prompts["id_B"], kind="stable")].astype(bool)
        with self._clock.grading():
            answers = [grading.result() for grading in self._grading]
            self._wait_for_late(answers)
            scored = Scored.gather(self._parts, answers, list(self._late.values()), self._weights, greedy_B)
        drawn = Drawn(in_id_order(Batch.concat(self._parts)), scored)
        return drawn if greedy_B is None else drawn.with_baseline(greedy_B)

    def _wait_for_late(self, answers: Sequence[Message]) -> None:
        """For what is graded apart, of the parts that are new since the last time."""
        first, self._joined = self._joined, len(answers)
        new = answers[first:]
        found: dict[str, LateScores] = {}
        if not new:
            return
        id_B = np.concatenate([part["id_B"] for part in self._parts[first:]])
        if (model := self._score_model) is not None:
            rendered = [call.result()[0] for call in self._rendering[first:]]
            model.begin(self.step)
            found["model"] = late_scores.of_model(model, rendered, id_B, self.step)
        if self._sent_to_judges is not None:
            sent = [call.result()[0] for call in self._sent_to_judges[first:]]
            scored_B = np.concatenate([answer.tensors["scored_B"] for answer in new]).astype(bool)
            lost = id_B[~scored_B].tolist()
            found["judges"] = late_scores.of_judges(self._reward, self.what, sent, lost, self.step)
        self._late |= {name: late_scores.concat(self._late.get(name), part) for name, part in found.items()}

    def _write_all(self) -> None:
        """Wait for every completion. What a lost replica had not finished goes out again, to all."""
        while True:
            assert self._call is not None, "it was not started"
            try:
                self._call.result()
                return
            except RanksFailed:
                left = self._unanswered()
                if not len(left):
                    return
                self._sync.restore(self.step)
                self._call = self._send(left)

    def _unanswered(self) -> Batch:
        answered = np.concatenate([part["id_B"] for part in self._parts]) if self._parts else np.zeros(0)
        prompts = self.prompts.batch
        return prompts.select(np.flatnonzero(~np.isin(prompts["id_B"], answered)))

    def _take(self, message: Message) -> None:
        part = message.batch
        kept = len(part) if self.what == "eval" else self.show  # of an evaluation every completion is kept
        shown = kept if self.what == "eval" or not self._parts else 0
        request = bodies.Score(what=self.what, samples=shown, rows=self.prompts.rows_of(part))
        columns = part.only(COLUMNS[Verb.SCORE].needs).columns
        self._parts.append(part)
        arrived = sum(len(part) for part in self._parts)
        self._on_arrival(arrived, len(self.prompts.batch))
        if arrived == len(self.prompts.batch):
            self.written_at = time.perf_counter()
        home = [HOME]
        if self._sent_to_judges is not None:
            judge = bodies.SendToJudges(what=self.what, rows=request.rows)
            self._sent_to_judges.append(
                self._reward.post(Verb.JUDGE, judge, tensors=columns, step=self.step, ranks=home)
            )
        self._grading.append(self._graders.grade(request, columns, self.step))
        if self._score_model is not None:
            asked = bodies.Render(what=self.what, rows=request.rows)
            self._rendering.append(self._reward.post(Verb.RENDER, asked, tensors=columns, step=self.step, ranks=home))


_REFILLED = "with dynamic sampling"
_GREEDY = "the baseline is greedy (`remax`)"
METRICS: tuple[Metric, ...] = (
    Metric(name="reward/term_<i>", meaning="Mean of entry i of `reward.terms`, before its weight.", in_eval=True),
    Metric(name="rollout/refills", meaning="How often prompts were drawn again.", when=_REFILLED),
    Metric(
        name="rollout/thrown_groups",
        unit="groups",
        meaning="Thrown away because all completions score the same.",
        when=_REFILLED,
    ),
    Metric(
        name="reward/greedy_mean",
        meaning="Mean score of the greedy completions that the samples are compared with.",
        when=_GREEDY,
    ),
    Metric(
        name="rollout/greedy_samples",
        meaning="How many greedy completions there were.",
        when=_GREEDY,
    ),
    Metric(
        name="rollout/greedy_tokens",
        unit="tokens",
        meaning="Of the greedy completions.",
        when=_GREEDY,
    ),
)


@dataclass(frozen=True)
class Thrown:
    """Count what dynamic sampling threw away of a step (rlctl/loop/dynamic_sampling.py)."""

    refills: int  # how often prompts were drawn again
    groups: int  # thrown away
    signal: int  # groups whose scores differ, of those that stayed
    reward_R: list[float]  # scores of the rollouts that were thrown away

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
    terms: dict[str, float]  # term_<i>: its mean over the rollouts that were graded
    samples: list[dict[str, Any]]
    counts: dict[str, float] = field(default_factory=dict)  # what grading took, as metrics below reward/
    thrown: Thrown | None = None  # None without dynamic sampling
    greedy: Greedy | None = None  # None without a greedy baseline
    completions: int = 0  # that were sent to be graded
    first_failure: str = ""  # what the first one without a score died of
    zero_terms: tuple[int, ...] = ()  # those that gave 0 to all that were graded
    term_B: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # by name, `term_<i>_B`

    @staticmethod
    def gather(
        parts: Sequence[Batch],
        answers: Sequence[Message],
        late: Sequence[LateScores],
        reward: RewardSection,
        greedy_B: NDArray[np.bool_] | None = None,
    ) -> Scored:
        """Joins what the reward role answered for each part, and of the terms that came `late`. `greedy_B`, in the
        order of ids: samples that the means of terms leave out."""
        order = np.argsort(np.concatenate([part["id_B"] for part in parts]), kind="stable")
        id_B, rollout_B = (np.concatenate([part[name] for part in parts])[order] for name in ("id_B", "rollout_B"))
        columns = {
            name: np.concatenate([answer.tensors[name] for answer in answers])[order] for name in answers[0].tensors
        }
        joined = late_scores.join(columns, [part.select(order) for part in late], reward, id_B)
        graded = [bodies.Scores.of(answer) for answer in answers]
        place = {int(sample): index for index, sample in enumerate(id_B)}
        counted_B = joined.scored_B if greedy_B is None else joined.scored_B & ~greedy_B
        terms = term_means(joined.term_B, first_valid(rollout_B, counted_B))
        return Scored(
            joined.reward_B,
            joined.scored_B,
            late_scores.add_up(
                [*(part.failures for part in graded), *(part.failures for part in late), joined.failures]
            ),
            terms,
            [joined.complete(sample, place[sample["id"]]) for part in graded for sample in part.samples],
            late_scores.add_up([part.counts for part in late]),
            completions=len(id_B),
            first_failure=next((part.first_failure for part in graded if part.first_failure), joined.first_failure),
            zero_terms=zero_terms(joined.term_B, counted_B),
            term_B=joined.term_B,
        )

    def by_rollout(self, rollout_B: NDArray[np.int64]) -> NDArray[np.float32]:
        """The score of each rollout whose grading worked; of every one, with the fallback, where none did."""
        valid_B = self.scored_B if self.scored_B.any() else np.ones_like(self.scored_B)
        return self.reward_B[first_valid(rollout_B, valid_B)]

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
        """Without the greedy completions, one in each group, whose scores become the column `baseline_B`. Where that
        could not be graded, its group counts as not graded."""
        batch, scored = self.batch, self.scored
        greedy, kept = np.flatnonzero(greedy_B), np.flatnonzero(~greedy_B)
        groups, of_B = np.unique(batch["group_B"], return_inverse=True)
        assert len(greedy) == len(groups), "a greedy completion in each group"
        baseline_G, valid_G = np.zeros(len(groups), np.float32), np.zeros(len(groups), dtype=bool)
        baseline_G[of_B[greedy]], valid_G[of_B[greedy]] = scored.reward_B[greedy], scored.scored_B[greedy]
        reward_G = baseline_G[valid_G]
        tokens = int(batch.sum_by_sequence("loss_mask_T")[greedy].sum())
        said = Greedy(len(greedy), tokens, float(reward_G.mean(dtype=np.float64)) if len(reward_G) else 0.0)
        left = replace(scored.select(kept), scored_B=(scored.scored_B & valid_G[of_B])[kept], greedy=said)
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


def term_means(columns: Mapping[str, NDArray[Any]], chosen: NDArray[np.int64]) -> dict[str, float]:
    """Mean of each term over the chosen samples; 0 when there is none."""
    names = sorted(name for name in columns if name.startswith("term_"))
    return {
        name.removesuffix("_B"): float(columns[name][chosen].mean(dtype=np.float64)) if len(chosen) else 0.0
        for name in names
    }


def zero_terms(columns: Mapping[str, NDArray[Any]], counted_B: NDArray[np.bool_]) -> tuple[int, ...]:
    """Numbers of the terms that gave 0 to all of the samples that count."""
    return tuple(
        sorted(
            int(name.split("_")[1])
            for name, column_B in columns.items()
            if name.startswith("term_") and not column_B[counted_B].any()
        )
    )


def in_id_order(batch: Batch) -> Batch:
    """Samples in the order of their ids: which replica finished first must not change a bit of the step."""
    return batch.select(np.argsort(batch["id_B"], kind="stable"))


def group_shards(group_B: NDArray[Any], shards: int) -> list[NDArray[np.int64]]:
    """Whole groups to each shard, in turn."""
    _, inverse_B = np.unique(group_B, return_inverse=True)
    return [np.flatnonzero(inverse_B % shards == shard) for shard in range(shards)]

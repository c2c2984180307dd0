"""Terms of the reward that are graded apart, because they take longer than others: what is known of them at last, and
how it joins the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlctl.loop.scores.graders import HOME
from specs.schema.metric import Metric
from specs.schema.rewards import MAX_SCORE
from specs.wire import bodies
from specs.wire.batch import Batch
from specs.wire.messages import COLUMNS, Verb

if TYPE_CHECKING:
    from rlctl.processes.group import Group
    from specs.schema.spec import RewardSection
    from specs.wire.messages import Message

UNUSABLE = "bad_values"
_WITH_MODEL = "a reward term is a model"
METRICS: tuple[Metric, ...] = (
    Metric(
        name="reward/model_tokens",
        unit="tokens",
        meaning="That the reward model read.",
        when=_WITH_MODEL,
        in_eval=True,
    ),
    Metric(
        name="reward/model_s",
        unit="s",
        meaning="Scoring by the reward model.",
        when=_WITH_MODEL,
        in_eval=True,
    ),
)


@dataclass(frozen=True)
class LateScores:
    """The values of some terms, by their number in `reward.terms`, for samples in the order in which they came in.
    `scored_B`: of which samples there are any. `counts`: what it took, as metrics below `reward/`. `first_failure`:
    what the first one without a score died of."""

    value_B: Mapping[int, NDArray[np.float32]]
    scored_B: NDArray[np.bool_]
    failures: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    first_failure: str = ""

    def select(self, indices: NDArray[np.int64]) -> LateScores:
        value_B = {number: column[indices] for number, column in self.value_B.items()}
        return replace(self, value_B=value_B, scored_B=self.scored_B[indices])


def concat(before: LateScores | None, part: LateScores) -> LateScores:
    """The scores of samples that came in earlier, and those of later ones."""
    if before is None:
        return part
    return LateScores(
        {number: np.concatenate([before.value_B[number], column]) for number, column in part.value_B.items()},
        np.concatenate([before.scored_B, part.scored_B]),
        add_up([before.failures, part.failures]),
        add_up([before.counts, part.counts]),
        before.first_failure or part.first_failure,
    )


@dataclass(frozen=True)
class ScoreModel:
    """The model that a term of the reward asks. `begin`, with the step: give it the device; nothing is sampled after it
    before the next sync."""

    group: Group
    number: int  # of its term in `reward.terms`
    begin: Callable[[int], None]
    shares: Callable[[Batch], list[NDArray[np.int64]]]  # the sequences of each of its ranks


def of_judges(
    reward: Group, asked: bodies.What, sent: Sequence[Message], lost_ids: Sequence[int], step: int
) -> LateScores:
    """Wait for what the judges say of samples that were sent to them. `lost_ids`: of those without a score already."""
    tickets = [bodies.SentToJudges.of(answer).ticket for answer in sent]
    asking = bodies.AwaitJudges(what=asked, tickets=tickets, lost=[*lost_ids])
    (answer,) = reward.call(Verb.AWAIT_JUDGES, asking, step=step, ranks=[HOME])
    judged = bodies.Judged.of(answer)
    value_B = {int(name.split("_")[1]): column for name, column in answer.tensors.items() if name.startswith("term_")}
    scored_B = answer.tensors["scored_B"].astype(bool)
    return LateScores(value_B, scored_B, judged.failures, judged.counts, judged.first_failure)


def of_model(model: ScoreModel, rendered: Sequence[Message], id_B: NDArray[np.int64], step: int) -> LateScores:
    """Ask the reward model about samples that were `rendered` for it. `id_B`: of all samples; those that it could not
    be given have no score."""
    begin = time.perf_counter()
    parts = [part.batch for part in rendered if len(part.batch)]
    score_of: dict[int, float] = {}
    if parts:
        batch = Batch.concat(parts)
        shards = model.shares(batch)
        needed = batch.only(COLUMNS[Verb.SCORES].needs)
        answers = model.group.call(Verb.SCORES, tensors=[needed.select(shard).columns for shard in shards], step=step)
        for answer, shard in zip(answers, shards, strict=True):
            score_of |= dict(zip(batch["id_B"][shard].tolist(), answer.tensors["score_B"].tolist(), strict=True))
    value_B = np.array([score_of.get(int(sample), 0.0) for sample in id_B], dtype=np.float32)
    scored_B = np.array([int(sample) in score_of for sample in id_B], dtype=bool)
    said = [bodies.Rendered.of(part) for part in rendered]
    failures = add_up([part.failures for part in said])
    first = next((part.first_failure for part in said if part.first_failure), "")
    tokens = sum(part.num_tokens for part in parts)
    counts = {"model_tokens": tokens, "model_s": time.perf_counter() - begin}
    return LateScores({model.number: value_B}, scored_B, failures, counts, first)


def add_up(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums by name, in the order in which names are first met."""
    names = dict.fromkeys(name for one in counts for name in one)
    return {name: sum(one.get(name, 0) for one in counts) for name in names}


def join(
    columns: Mapping[str, NDArray[Any]], late: Sequence[LateScores], reward: RewardSection, id_B: NDArray[np.int64]
) -> JoinedScores:
    """The whole score of each sample. `columns`: `reward_B`, `scored_B` and `term_<i>_B` of what was graded at once.

    A sample that any term could not grade has `reward.fallback` as its whole score; so has one whose score is beyond
    MAX_SCORE, with which a step cannot compute.
    """
    total = columns["reward_B"].astype(np.float64)
    scored = columns["scored_B"].astype(bool)
    terms = {name: column for name, column in columns.items() if name.startswith("term_")}
    for part in late:
        scored = scored & part.scored_B
        with np.errstate(over="ignore", invalid="ignore"):
            for number, value_B in part.value_B.items():
                total = total + reward.terms[number].weight * value_B.astype(np.float64)
                terms[f"term_{number}_B"] = value_B
    usable = np.abs(total) <= MAX_SCORE
    for part in late:
        for value_B in part.value_B.values():
            usable = usable & (np.abs(value_B.astype(np.float64)) <= MAX_SCORE)
    unusable = np.flatnonzero(scored & ~usable)
    first = next((part.first_failure for part in late if part.first_failure), "")
    if len(unusable) and not first:
        values = [f"term {name.split('_')[1]} is {column[unusable[0]]:g}" for name, column in terms.items()]
        first = f"{', '.join(values)}: beyond ±{MAX_SCORE:g} (sample {id_B[unusable[0]]})"
    scored = scored & usable
    terms = {name: np.where(scored, column, 0.0).astype(np.float32) for name, column in terms.items()}
    reward_B = np.where(scored, total, reward.fallback).astype(np.float32)
    return JoinedScores(reward_B, scored, terms, {UNUSABLE: len(unusable)} if len(unusable) else {}, first)


@dataclass(frozen=True)
class JoinedScores:
    """Scores of all terms. `term_B`: their columns, `term_<i>_B`. `failures`: samples lost in joining, by cause.
    `first_failure`: what the first that was lost late, or in joining, died of."""

    reward_B: NDArray[np.float32]
    scored_B: NDArray[np.bool_]
    term_B: dict[str, NDArray[np.float32]]
    failures: dict[str, int]
    first_failure: str = ""

    def complete(self, sample: Mapping[str, Any], index: int) -> dict[str, Any]:
        """A decoded sample that shows the whole score; `index`: where it stands."""
        terms = [float(self.term_B[f"term_{number}_B"][index]) for number in range(len(self.term_B))]
        return {
            **sample,
            "reward": float(self.reward_B[index]),
            "scored": bool(self.scored_B[index]),
            "terms": terms,
        }

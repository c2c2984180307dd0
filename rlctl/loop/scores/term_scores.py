"""Values of the reward's terms, as each grader gives them: the reward role, the environments, the reward model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlctl.loop.rollouts import Rollouts
from specs.schema.environment import UNSCORED
from specs.schema.metric import Metric, metrics
from specs.wire import bodies
from specs.wire.batch import Batch
from specs.wire.messages import COLUMNS, Verb

if TYPE_CHECKING:
    from rlctl.processes.group import Group
    from specs.wire.messages import Message

METRICS: tuple[Metric, ...] = metrics(
    "a reward term is a model",
    {
        "reward/model_tokens [tokens]": "That the reward model read.",
        "reward/model_s [s]": "Scoring by the reward model.",
    },
    in_eval=True,
)


@dataclass(frozen=True)
class TermScores:
    """Values of some terms, by their number in `reward.terms`, for samples in the order in which they came in.
    `scored_B`: whether a sample has them; `failures`: how many do not, by cause; `first_failure`: why the first does
    not. `counts`: what it took, as metrics below `reward/`. `samples`: some of them as text."""

    value_B: Mapping[int, NDArray[Any]]
    scored_B: NDArray[np.bool_]
    failures: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    first_failure: str = ""
    samples: Sequence[Mapping[str, Any]] = ()

    @staticmethod
    def of(answer: Message) -> TermScores:
        """Read an answer of the reward role."""
        body, columns = bodies.Scores.of(answer), answer.tensors
        value_B = {int(name.split("_")[1]): column for name, column in columns.items() if name.startswith("term_")}
        scored_B = columns["scored_B"].astype(bool)
        return TermScores(value_B, scored_B, body.failures, body.counts, body.first_failure, body.samples)

    @staticmethod
    def concat(parts: Sequence[TermScores]) -> TermScores:
        """Join the same terms' scores of samples that came in one after another."""
        return TermScores(
            {number: np.concatenate([part.value_B[number] for part in parts]) for number in parts[0].value_B},
            np.concatenate([part.scored_B for part in parts]),
            add_up([part.failures for part in parts]),
            add_up([part.counts for part in parts]),
            next((part.first_failure for part in parts if part.first_failure), ""),
            [sample for part in parts for sample in part.samples],
        )

    def select(self, indices: NDArray[np.int64]) -> TermScores:
        value_B = {number: column[indices] for number, column in self.value_B.items()}
        return replace(self, value_B=value_B, scored_B=self.scored_B[indices])


@dataclass(frozen=True)
class ScoreModel:
    """The model that a term of the reward asks. `begin`, with the step: give it the device; nothing is sampled after it
    before the next sync."""

    group: Group
    number: int  # of its term in `reward.terms`
    begin: Callable[[int], None]
    shares: Callable[[Batch], list[NDArray[np.int64]]]  # the sequences of each of its ranks

    def score(self, graded: Sequence[Message], id_B: NDArray[np.int64], step: int) -> TermScores:
        """Score samples by what their `graded` parts say that it is to read, the same tokens once, so that they score
        the same. `id_B`: of all samples; those that it cannot read have no score."""
        begin = time.perf_counter()
        tokens_T, length_B = (np.concatenate([one.tensors[f"rendered_{unit}"] for one in graded]) for unit in "TB")
        every = Batch({"tokens_T": tokens_T, "length_B": length_B, "id_B": id_B}).select(np.flatnonzero(length_B))
        score_of, num_tokens = dict[int, float](), 0
        if len(every):
            texts = [piece.tobytes() for piece in np.split(every["tokens_T"], every.offsets[1:-1])]
            first_of = {text: number for number, text in reversed([*enumerate(texts)])}
            batch = every.select(np.array(sorted(first_of.values()), dtype=np.int64))
            shards, needed, num_tokens = self.shares(batch), batch.only(COLUMNS[Verb.SCORES].needs), batch.num_tokens
            tensors = [needed.select(shard).columns for shard in shards]
            for answer, shard in zip(self.group.call(Verb.SCORES, tensors=tensors, step=step), shards, strict=True):
                score_of |= dict(zip(batch["id_B"][shard].tolist(), answer.tensors["score_B"].tolist(), strict=True))
            firsts = every["id_B"][[first_of[text] for text in texts]].tolist()
            score_of = {id_: score_of[first] for id_, first in zip(every["id_B"].tolist(), firsts, strict=True)}
        value_B = np.array([score_of.get(sample, 0.0) for sample in id_B.tolist()], dtype=np.float32)
        counts = {"model_tokens": num_tokens, "model_s": time.perf_counter() - begin}
        return TermScores({self.number: value_B}, length_B > 0, counts=counts)


def of_environments(batch: Batch, number: int | None) -> TermScores:
    """Return what environments gave, as the term of this number if there is one. An episode that was lost has no
    score."""
    lost_B = np.isin(batch["stop_B"], UNSCORED)
    lost = np.flatnonzero(lost_B)[Rollouts.of(batch["rollout_B"][lost_B]).first_R]
    first = f"the environment of sample {batch['id_B'][lost[0]]} was lost" if len(lost) else ""
    value_B = {} if number is None else {number: batch["environment_reward_B"]}
    return TermScores(value_B, ~lost_B, {"environment_lost": len(lost)}, first_failure=first)


def add_up(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return sums by name, in the order in which names are first met."""
    names = dict.fromkeys(name for one in counts for name in one)
    return {name: sum(one.get(name, 0) for one in counts) for name in names}

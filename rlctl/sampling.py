"""Prompts to judged samples: answers go to the judge as they arrive, while others are still being written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlctl.calls import RanksLost
from specs.batch import Batch
from specs.messages import COLUMNS, Verb
from specs.role_config import Sampling
from specs.schema import Spec

if TYPE_CHECKING:
    from rlctl.calls import Call
    from rlctl.groups import Group
    from rlctl.step_metrics import Clock
    from specs.messages import Message

SAMPLES_SHOWN = 4  # decoded samples that each step leaves in samples.jsonl


class Sampler:
    """Has the rollout answer prompts and the reward role judge the answers."""

    def __init__(self, spec: Spec, rollout: Group, reward: Group, restore: Callable[[int], None]) -> None:
        """`restore` (with the step) brings lost replicas back, with weights (rlctl/revive.py)."""
        self.spec, self.rollout, self.reward, self.restore = spec, rollout, reward, restore

    def ask_for_steps(self, position: int, steps: int, number: int) -> Call:
        """Have the prompts of so many steps drawn, each repeated for its group; the answer also has the cursor after
        them."""
        body = {
            "what": "train",
            "position": position,
            "count": steps * self.spec.data.prompts_per_step,
            "group_size": self.spec.algorithm.group_size,
        }
        return self.reward.post(Verb.PROMPTS, body, step=number)

    def held_out(self, count: int, number: int) -> Batch:
        """Prompts for evaluation."""
        body = {"what": "eval", "position": 0, "count": count, "group_size": 1}
        return self.reward.call(Verb.PROMPTS, body, step=number)[0].batch

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

    def greedy(self) -> Sampling:
        """How the samples that are only measured are drawn."""
        return Sampling(seed=self.spec.run.seed, greedy=True, max_response_tokens=self.spec.data.max_response_tokens)

    def start(self, prompts: Batch, sampling: Sampling, number: int, what: str = "train", show: int = 0) -> Generation:
        """Send the prompts out and return at once."""
        return Generation(self, prompts, sampling, number, what, show)


class Generation:
    """A batch on its way. Answers arrive, and are sent on to the judge, whenever the driver waits for any role.

    Whole groups are dealt out to the replicas in turn, and come back one by one as they finish.
    """

    def __init__(self, sampler: Sampler, prompts: Batch, sampling: Sampling, number: int, what: str, show: int) -> None:
        self.prompts, self.number, self.what, self.show = prompts, number, what, show
        self._sampling = sampling
        self._rollout, self._reward, self._restore = sampler.rollout, sampler.reward, sampler.restore
        self.sent_at = time.perf_counter()
        self.written_at = 0.0  # when the last answer came in; 0: some are still to come
        self._parts: list[Batch] = []
        self._judging: list[Call] = []
        prompts.require(COLUMNS[Verb.GENERATE].needs, Verb.GENERATE)
        self._call = self._send(prompts)

    def _send(self, prompts: Batch) -> Call:
        shards = group_shards(prompts["group_B"], self._rollout.size)
        return self._rollout.post(
            Verb.GENERATE,
            {"sampling": self._sampling.model_dump()},
            tensors=[prompts.select(shard).columns for shard in shards],
            step=self.number,
            on_part=self._take,
        )

    def wait(self) -> None:
        """Until every answer is here, though perhaps not judged."""
        self._write_all()
        count = sum(len(part) for part in self._parts)
        assert count == len(self.prompts), f"{len(self.prompts)} prompts went out, {count} answers came back"

    def finish(self, clock: Clock) -> Drawn:
        """Samples in the order of their ids, and their scores. `clock` gets what judging takes beyond the writing."""
        self.wait()
        with clock.measure("reward"):
            scored = Scored.gather(self._parts, self._judging)
        return Drawn(in_id_order(Batch.concat(self._parts)), scored)

    def _write_all(self) -> None:
        """Wait for every answer. What a lost replica had not finished goes out again, to all."""
        while True:
            try:
                self._call.result()
                return
            except RanksLost:
                left = self._unanswered()
                if not len(left):
                    return
                self._restore(self.number)
                self._call = self._send(left)

    def _unanswered(self) -> Batch:
        answered = np.concatenate([part["id_B"] for part in self._parts]) if self._parts else np.zeros(0)
        return self.prompts.select(np.flatnonzero(~np.isin(self.prompts["id_B"], answered)))

    def _take(self, message: Message) -> None:
        part = message.batch
        body = {"what": self.what, "samples": 0 if self._parts else self.show}
        columns = part.only(COLUMNS[Verb.SCORE].needs).columns
        self._parts.append(part)
        if sum(len(part) for part in self._parts) == len(self.prompts):
            self.written_at = time.perf_counter()
        self._judging.append(self._reward.post(Verb.SCORE, body, tensors=columns, step=self.number))


@dataclass(frozen=True)
class Scored:
    """Scores in the order of sample ids, and what judging had to say."""

    reward_B: NDArray[np.float32]
    scored_B: NDArray[np.bool_]  # False: judging failed and the fallback stands
    failures: dict[str, int]
    terms: dict[str, float]  # term_<i>: its mean over what was judged
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
        samples = [sample for answer in answers for sample in answer.body.get("samples", ())]
        scored_B = columns["scored_B"].astype(bool)
        return Scored(columns["reward_B"], scored_B, failures, term_means(columns, scored_B), samples)

    def select(self, indices: NDArray[np.int64]) -> Scored:
        """The scores of some samples. What judging had to say stays as it was said of all."""
        return replace(self, reward_B=self.reward_B[indices], scored_B=self.scored_B[indices])


@dataclass(frozen=True)
class Drawn:
    """Samples in the order of their ids, and their scores."""

    batch: Batch
    scored: Scored

    def fresh(self, number: int, most: int) -> Drawn:
        """Without the groups that hold a sample which is more than `most` steps old in step `number`: a group is
        compared within itself, so it stays or goes as a whole."""
        stale_B = number - 1 - self.batch["version_B"] > most
        if not stale_B.any():
            return self
        group_B = self.batch["group_B"]
        kept = np.flatnonzero(~np.isin(group_B, group_B[stale_B]))
        return Drawn(self.batch.select(kept), self.scored.select(kept))


def term_means(columns: Mapping[str, NDArray[Any]], scored_B: NDArray[np.bool_]) -> dict[str, float]:
    """Mean of each term over the samples that were judged; 0 when there is none."""
    names = sorted(name for name in columns if name.startswith("term_"))
    return {name.removesuffix("_B"): float(columns[name][scored_B].mean()) if scored_B.any() else 0.0 for name in names}


def in_id_order(batch: Batch) -> Batch:
    """Samples in the order of their ids: which replica finished first must not change a bit of the step."""
    return batch.select(np.argsort(batch["id_B"], kind="stable"))


def group_shards(group_B: NDArray[Any], shards: int) -> list[NDArray[np.int64]]:
    """Whole groups to each shard, in turn."""
    _, inverse_B = np.unique(group_B, return_inverse=True)
    return [np.flatnonzero(inverse_B % shards == shard) for shard in range(shards)]

"""Prompts to judged samples: answers go to the judge as they arrive, while others are still being written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

    def draw(self, what: str, position: int, count: int, group_size: int, number: int) -> tuple[Batch, int]:
        """`count` prompts of the data ("train" or "eval"), each repeated for its group, and the cursor after them."""
        body = {"what": what, "position": position, "count": count, "group_size": group_size}
        answer = self.reward.call(Verb.PROMPTS, body, step=number)[0]
        return answer.batch, int(answer.body["position"])

    def draw_step(self, position: int, number: int) -> tuple[Batch, int]:
        """The prompts of one step of training, and the cursor after them."""
        return self.draw("train", position, self.spec.data.prompts_per_step, self.spec.algorithm.group_size, number)

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

    @property
    def written(self) -> bool:
        """Every answer is here, though perhaps not judged."""
        return self._call.done

    def finish(self, clock: Clock) -> tuple[Batch, Scored]:
        """Samples in the order of their ids, and their scores. `clock` gets what judging takes beyond the writing."""
        self._write_all()
        count = sum(len(part) for part in self._parts)
        assert count == len(self.prompts), f"{len(self.prompts)} prompts went out, {count} answers came back"
        with clock.measure("reward"):
            scored = Scored.gather(self._parts, self._judging)
        return in_id_order(Batch.concat(self._parts)), scored

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
        self._judging.append(self._reward.post(Verb.SCORE, body, tensors=columns, step=self.number))


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

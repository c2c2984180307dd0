"""What graders say of terms becomes whole scores: sums, failures and the samples that a person is shown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_spec import raw_spec

from rlctl.loop.sampling import Scored
from rlctl.loop.scores.term_scores import ScoreModel, TermScores
from specs.load.load import spec_from
from specs.schema.spec import RewardSection
from specs.wire.batch import Batch
from specs.wire.messages import Kind, Message, Verb

JUDGE = {"kind": "judge", "base_url": "http://h", "model": "m", "prompt": "{completion}", "min_score": 0}


def reward(*weights: float, fallback: float = -1.0) -> RewardSection:
    """The first term is graded at once, the others are judges'."""
    first, *others = weights
    judges = [{**JUDGE, "max_score": 1e18, "weight": weight} for weight in others]
    terms = [{"kind": "exact_match", "weight": first}, *judges]
    return spec_from(raw_spec(reward={"terms": terms, "fallback": fallback})).reward


def scored(reward: RewardSection, *found: TermScores) -> Scored:
    """Of samples that came in with the last one first."""
    backwards = np.arange(43, 39, -1)
    ones = np.ones(4, np.int64)
    part = Batch({"length_B": ones, "id_B": backwards, "rollout_B": backwards})
    return Scored.gather([part], [of_one.select(np.array([3, 2, 1, 0])) for of_one in found], reward)


def values(number: int, value_B: list[float], scored_B: list[int], **more: object) -> TermScores:
    return TermScores({number: np.array(value_B)}, np.array(scored_B, dtype=bool), **more)


class NumberingGroup:
    """Stands for ranks of a reward model: a sequence scores its place in what is asked."""

    def call(self, verb: Verb, *, tensors: list[dict[str, Any]], step: int) -> list[Message]:
        self.asked = [len(columns["length_B"]) for columns in tensors]
        return [
            Message(Kind.ANSWER, {}, verb, 1, {"score_B": np.arange(count) + 10.0 * rank})
            for rank, count in enumerate(self.asked)
        ]


def test_the_same_tokens_score_the_same() -> None:
    """Five samples for two ranks; one of them the model cannot read."""
    sequences = [[1, 2], [3], [1, 2], [2, 1], [3]]
    columns = {"rendered_T": np.concatenate(sequences), "rendered_B": np.array([2, 1, 2, 2, 0, 1])}
    graded = Message(Kind.ANSWER, {}, Verb.SCORE, 1, columns)
    group = NumberingGroup()
    model = ScoreModel(group, 0, print, lambda batch: [np.array([1, 2]), np.array([0])])
    found = model.score([graded], np.arange(40, 46), 1)
    assert group.asked == [2, 1]
    assert found.value_B[0].tolist() == [10, 0, 10, 1, 0, 0]
    assert found.scored_B.tolist() == [True, True, True, True, False, True]
    assert found.counts["model_tokens"] == 5


def test_weights_and_failures() -> None:
    """reward = 2 · exact + 0.5 · judge; the second fails at once, the third later."""
    exact = values(0, [1, 0, 1, 1], [1, 0, 1, 1], samples=[{"id": 43, "prompt": "p"}], failures={"crashes": 1})
    judged = values(1, [4, 6, 0, 8], [1, 1, 0, 1], failures={"crashes": 0, "judge_errors": 1}, counts={"judge_cost": 1})
    found = scored(reward(2.0, 0.5), exact, judged)
    assert found.reward_B.tolist() == [4.0, -1.0, -1.0, 6.0]
    assert found.scored_B.tolist() == [True, False, False, True]
    assert {name: column.tolist() for name, column in found.term_B.items()} == {
        "term_0_B": [1, 0, 0, 1],
        "term_1_B": [4, 0, 0, 8],
    }
    assert found.mean_terms(np.arange(40, 44)) == {"term_0": 1.0, "term_1": 6.0}
    assert (found.failures, found.counts) == ({"crashes": 1, "judge_errors": 1, "bad_values": 0}, {"judge_cost": 1})
    assert found.samples == [{"id": 43, "prompt": "p", "reward": 6.0, "scored": True, "terms": [1.0, 8.0]}]


def test_samples_as_text_do_not_depend_on_who_was_quicker() -> None:
    came_in = [{"id": 42}, {"id": 40}, {"id": 43}]
    found = scored(reward(1.0), values(0, [1, 0, 1, 1], [1] * 4, samples=came_in))
    assert [sample["id"] for sample in found.samples] == [40, 42, 43]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2e18])
def test_a_value_that_a_step_cannot_compute_with_is_a_bad_value(value: float) -> None:
    """Also with weight 0, and also where the sum is small: 1e38 is finite in float32, its square is not."""
    exact = values(0, [1] * 4, [1] * 4)
    for weight in (0.0, 1e-18):
        found = scored(reward(1.0, weight), exact, values(1, [1, value, 1, 1], [1] * 4))
        assert found.scored_B.tolist() == [True, False, True, True]
        assert found.reward_B[1] == -1.0
        assert found.failures == {"bad_values": 1}
        assert found.first_failure == f"term 0 is 1, term 1 is {value:g}: beyond ±1e+18 (sample 41)"
    large = values(1, [1e10] * 4, [1, 1, 1, 0])
    assert scored(reward(1.0, 1e10), exact, large).failures == {"bad_values": 3}


def test_later_samples_come_behind() -> None:
    """Samples of a refill: their values, and what they cost."""
    first = values(1, [1.0], [1], failures={"judge_errors": 1}, counts={"judge_cost": 0.5})
    second = values(1, [2.0, 0.0], [1, 0], failures={"judge_errors": 1, "x": 2}, first_failure="HTTP 500")
    both = TermScores.concat([first, second])
    assert (both.value_B[1].tolist(), both.scored_B.tolist()) == ([1, 2, 0], [True, True, False])
    assert (both.failures, both.counts) == ({"judge_errors": 2, "x": 2}, {"judge_cost": 0.5})
    assert both.first_failure == "HTTP 500"

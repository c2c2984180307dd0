"""Terms that are graded apart join the rest: sums, failures and the samples that a person is shown."""

from __future__ import annotations

import numpy as np
import pytest
from small_spec import raw_spec

from rlctl.loop.scores import late_scores
from rlctl.loop.scores.late_scores import JoinedScores, LateScores, concat
from specs.load.load import spec_from
from specs.schema.spec import RewardSection

JUDGE = {"kind": "judge", "base_url": "http://h", "model": "m", "prompt": "{completion}", "min_score": 0}


def reward(*weights: float, fallback: float = -1.0) -> RewardSection:
    """The first term is graded at once, the others are judges'."""
    first, *others = weights
    judges = [{**JUDGE, "max_score": 1e18, "weight": weight} for weight in others]
    terms = [{"kind": "exact_match", "weight": first}, *judges]
    return spec_from(raw_spec(reward={"terms": terms, "fallback": fallback})).reward


def at_once(reward_B: list[float], scored_B: list[int]) -> dict[str, np.ndarray]:
    scored = np.array(scored_B, dtype=np.uint8)
    return {
        "reward_B": np.array(reward_B, dtype=np.float32),
        "scored_B": scored,
        "term_0_B": np.array([1, 1, 1, 1], dtype=np.float32) * scored,
    }


def join(columns: dict[str, np.ndarray], late: list[LateScores], reward: RewardSection) -> JoinedScores:
    return late_scores.join(columns, late, reward, np.arange(40, 44))


def test_weights_and_failures() -> None:
    """reward = 2 · exact + 0.5 · late; the second failed at once, the third late."""
    late = LateScores({1: np.array([4, 6, 0, 8], dtype=np.float32)}, np.array([True, True, False, True]))
    joined = join(at_once([2, -1, 2, 2], [1, 0, 1, 1]), [late], reward(2.0, 0.5))
    assert joined.reward_B.tolist() == [4.0, -1.0, -1.0, 6.0]
    assert joined.scored_B.tolist() == [True, False, False, True]
    assert {name: column.tolist() for name, column in joined.term_B.items()} == {
        "term_0_B": [1, 0, 0, 1],
        "term_1_B": [4, 0, 0, 8],
    }
    assert joined.failures == {}
    shown = joined.complete({"id": 7, "terms": [1.0], "reward": 2.0, "scored": True}, 3)
    assert shown == {"id": 7, "reward": 6.0, "scored": True, "terms": [1.0, 8.0]}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2e18])
def test_a_value_that_a_step_cannot_compute_with_is_a_bad_value(value: float) -> None:
    """Also with weight 0, and also where the sum is small."""
    late = LateScores({1: np.array([1, value, 1, 1], dtype=np.float32)}, np.ones(4, bool))
    for weight in (0.0, 1e-18):
        joined = join(at_once([0] * 4, [1] * 4), [late], reward(1.0, weight))
        assert joined.scored_B.tolist() == [True, False, True, True]
        assert joined.reward_B[1] == -1.0
        assert joined.failures == {"bad_values": 1}
        assert joined.first_failure == f"term 0 is 1, term 1 is {value:g}: beyond ±1e+18 (sample 41)"
    large = LateScores({1: np.array([1e10] * 4, dtype=np.float32)}, np.ones(4, bool))
    assert join(at_once([0] * 4, [1, 1, 1, 0]), [large], reward(1.0, 1e10)).failures == {"bad_values": 3}


def test_later_samples_come_behind() -> None:
    """Samples of a refill: their values, and what they cost."""
    first = LateScores({1: np.array([1.0])}, np.array([True]), {"judge_errors": 1}, {"judge_cost": 0.5})
    second = LateScores({1: np.array([2.0, 0.0])}, np.array([True, False]), {"judge_errors": 1, "x": 2}, {}, "HTTP 500")
    both = concat(concat(None, first), second)
    assert (both.value_B[1].tolist(), both.scored_B.tolist()) == ([1, 2, 0], [True, True, False])
    assert (both.failures, both.counts) == ({"judge_errors": 2, "x": 2}, {"judge_cost": 0.5})
    assert both.select(np.array([2, 0])).value_B[1].tolist() == [0, 1]
    assert both.first_failure == both.select(np.array([0])).first_failure == "HTTP 500"

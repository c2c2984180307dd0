"""Credit by turn, against numbers worked out by hand and a slow loop over tokens."""

from __future__ import annotations

import numpy as np
import pytest

from rlctl.loop.advantages import columns
from rlctl.loop.turn_credit import by_turn
from specs.schema.algorithms.algorithm_tables import Gae, GreedyBaseline, ReturnToGo
from specs.wire.batch import Batch


def batch_of(*samples: tuple[int, list[int], dict[int, float]]) -> Batch:
    """Samples by rollout, each with its loss mask and the rewards at its tokens; ids in this order, within a rollout as
    branches have them."""
    length_B = np.array([len(mask) for _, mask, _ in samples])
    reward_T = np.concatenate([[rewards.get(at, 0.0) for at in range(len(mask))] for _, mask, rewards in samples])
    rollout_B = np.array([rollout for rollout, _, _ in samples])
    before = [int((rollout_B[:index] == rollout).sum()) for index, rollout in enumerate(rollout_B)]
    return Batch(
        {
            "tokens_T": np.arange(length_B.sum()),
            "loss_mask_T": np.concatenate([mask for _, mask, _ in samples]).astype(np.uint8),
            "turn_reward_T": reward_T.astype(np.float32),
            "length_B": length_B,
            "rollout_B": rollout_B,
            "group_B": np.zeros_like(rollout_B),
            "id_B": rollout_B + np.array([number << 48 for number in before]),
        }
    )


def returns(batch: Batch, scores: list[float], weight: float = 1.0, discount: float = 1.0) -> np.ndarray:
    """Advantages that are nothing but what comes after a token: the baseline of each sample is 0."""
    batch = batch.with_columns(baseline_B=np.zeros(len(batch), np.float32))
    left_B, penalty_T = by_turn(batch, np.array(scores, np.float32), weight, None)
    valid_B = np.ones(len(batch), dtype=bool)
    return columns(GreedyBaseline(discount=discount), batch, left_B, valid_B, penalty_T)["advantage_T"]


def test_a_turn_gets_what_comes_after_it() -> None:
    """Turns end at tokens 2 and 5, with rewards 1 and 4; the score holds another term's 10, which comes at the end."""
    batch = batch_of((0, [0, 1, 1, 0, 0, 1, 0], {2: 1.0, 5: 4.0}))
    assert returns(batch, [15.0]).tolist() == [0, 15, 15, 0, 0, 14, 0]
    assert returns(batch, [20.0], weight=2.0).tolist() == [0, 20, 20, 0, 0, 18, 0]
    by_half = returns(batch, [15.0], discount=0.5)  # of loss tokens: those of a reply take no time
    assert by_half.tolist() == [0, (1 + 14 / 2) / 2, 1 + 14 / 2, 0, 0, 14, 0]


def test_samples_of_a_rollout() -> None:
    """The first sample earned 1, the second 2 and 3: what was earned before is not credited to what follows."""
    batch = batch_of((7, [0, 1], {1: 1.0}), (3, [1, 1], {1: 8.0}), (7, [0, 1, 0, 1], {1: 2.0, 3: 3.0}))
    found = returns(batch, [6.5, 8.0, 6.5])
    assert found.tolist() == [0, 6.5, 8, 8, 0, 5.5, 0, 3.5]
    shuffled = batch.select([2, 1, 0])
    assert returns(shuffled, [6.5, 8.0, 6.5]).tolist() == [0, 5.5, 0, 3.5, 8, 8, 0, 6.5], "ids say what came first"


def test_a_reward_off_the_loss_mask_stays_in_the_score() -> None:
    """A turn that is not learned from earned 2: it is credited at the end, and not lost."""
    batch = batch_of((0, [0, 1, 0, 0, 1], {1: 1.0, 3: 2.0, 4: 4.0}))
    assert returns(batch, [7.0]).tolist() == [0, 7, 0, 0, 6]
    nothing = batch_of((0, [0, 0], {1: 2.0}), (1, [0, 1], {1: 1.0}))
    assert returns(nothing, [2.0, 1.0]).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_reinforce_plus_plus_against_a_slow_loop(discount: float, kl: bool) -> None:
    """Rollouts of one to three samples with holes, some ungraded, rewards also off the mask, penalties at tokens."""
    rng = np.random.default_rng(5)
    samples, scores, valid = [], [], []
    for rollout in rng.permutation(24).tolist():
        number, other, graded = int(rng.integers(1, 4)), float(rng.normal()), bool(rng.random() < 0.8)
        drawn = []
        for _ in range(number):
            mask = rng.integers(0, 2, int(rng.integers(1, 9))).tolist()
            drawn.append((rollout, mask, {at: float(rng.normal()) for at in range(len(mask)) if rng.random() < 0.4}))
        total = 1.5 * sum(float(np.float32(one)) for _, _, rewards in drawn for one in rewards.values()) + other
        samples += drawn
        scores += [total] * number
        valid += [graded] * number
    batch = batch_of(*samples)
    penalty_T = rng.normal(size=batch.num_tokens) if kl else None
    score_B, valid_B = np.array(scores, np.float32), np.array(valid)
    left_B, rest_T = by_turn(batch, score_B, 1.5, penalty_T)
    found_T = columns(ReturnToGo(discount=discount), batch, left_B, valid_B, rest_T)["advantage_T"]

    expected: dict[int, float] = {}
    earned_before: dict[int, float] = {}
    starts = batch.offsets
    for index, (rollout, mask, rewards) in enumerate(samples):
        learned = [at for at in range(len(mask)) if mask[at]]
        own = {at: 1.5 * rewards.get(at, 0.0) for at in learned}
        earned_before[rollout] = earned_before.get(rollout, 0.0) + sum(own.values())
        following = scores[index] - earned_before[rollout]
        for at in reversed(learned):
            following += own[at] - (penalty_T[starts[index] + at] if penalty_T is not None else 0.0)
            if valid[index]:
                expected[int(starts[index]) + at] = following
            following *= discount
    values = np.array(list(expected.values()))
    expected_T = np.zeros(batch.num_tokens)
    expected_T[list(expected)] = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)
    assert len(expected) > 40
    np.testing.assert_allclose(found_T, expected_T, atol=2e-5)


def test_a_critic_sees_rewards_where_they_were_given() -> None:
    """δ at a turn's end holds its reward; with λ = 1 and values of 0 advantages are returns by turn."""
    batch = batch_of((0, [0, 1, 1, 0, 1], {2: 1.0, 4: 4.0})).with_columns(value_T=np.zeros(5, np.float32))
    left_B, penalty_T = by_turn(batch, np.array([5.0], np.float32), 1.0, None)
    table = Gae(gae_lambda=1.0, whiten=False)
    found = columns(table, batch, left_B, np.ones(1, dtype=bool), penalty_T)
    assert found["advantage_T"].tolist() == found["return_T"].tolist() == [0, 5, 5, 0, 4]

"""GRPO advantages against hand-computed numbers and a slow, obvious loop."""

import numpy as np
import pytest

from rlctl.advantages import grpo_advantages, per_token, silent_group_share
from specs.batch import Batch


def arrays(reward, group, valid=None):
    valid = [True] * len(reward) if valid is None else valid
    return np.array(reward, np.float32), np.array(group, np.int64), np.array(valid)


def slow_grpo(reward_B, group_B, valid_B, scale):
    out = []
    for i, group in enumerate(group_B):
        peers = [float(r) for r, g, v in zip(reward_B, group_B, valid_B, strict=True) if g == group and v]
        if not valid_B[i] or len(peers) < 2:
            out.append(0.0)
            continue
        mean = sum(peers) / len(peers)
        std = (sum((r - mean) ** 2 for r in peers) / (len(peers) - 1)) ** 0.5
        out.append((float(reward_B[i]) - mean) / ((std + 1e-6) if scale == "std" else 1.0))
    return np.array(out)


def test_by_hand():
    # mean 0.5, unbiased variance of (0, 1) is 0.5
    got = grpo_advantages(*arrays([0.0, 1.0], [7, 7]), scale="std")
    assert got == pytest.approx([-0.5 / (0.5**0.5 + 1e-6), 0.5 / (0.5**0.5 + 1e-6)])
    assert grpo_advantages(*arrays([0.0, 1.0], [7, 7]), scale="none") == pytest.approx([-0.5, 0.5])


@pytest.mark.parametrize("scale", ["std", "none"])
def test_against_slow_loop(scale):
    rng = np.random.default_rng(0)
    reward_B, group_B, valid_B = arrays(
        rng.normal(size=60), rng.permutation(np.repeat([3, 9, 4, 100], 15)), rng.random(60) > 0.2
    )
    got = grpo_advantages(reward_B, group_B, valid_B, scale)
    assert got == pytest.approx(slow_grpo(reward_B, group_B, valid_B, scale), abs=1e-6)


def test_failed_samples_do_not_move_the_group():
    with_failure = grpo_advantages(*arrays([1.0, 0.0, 99.0], [1, 1, 1], [True, True, False]), scale="none")
    assert with_failure == pytest.approx([0.5, -0.5, 0.0])


def test_lonely_and_equal_groups_give_no_signal():
    assert grpo_advantages(*arrays([5.0], [1]), scale="std") == pytest.approx([0.0])
    assert grpo_advantages(*arrays([2.0, 2.0], [1, 1]), scale="std") == pytest.approx([0.0, 0.0])


def test_per_token_and_silent_groups():
    batch = Batch(
        {
            "tokens_T": np.arange(5),
            "loss_mask_T": np.array([0, 1, 1, 0, 1], np.uint8),
            "length_B": np.array([3, 2]),
        }
    )
    assert per_token(np.array([2.0, -1.0], np.float32), batch).tolist() == [0, 2, 2, 0, -1]
    assert silent_group_share(np.array([1, 1, 0, 1], np.float32), np.array([1, 1, 2, 2])) == 0.5

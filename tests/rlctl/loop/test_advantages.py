"""Advantages against hand-computed numbers and slow, obvious loops."""

from typing import Literal

import numpy as np
import pytest

from rlctl.loop.advantages import ADVANTAGES, advantages, advantages_of, per_token, silent_group_share
from specs.errors import RlctlError
from specs.load.keys import tables_of
from specs.schema.algorithms.algorithm_tables import AdvantageTable, GroupRelative, LeaveOneOut
from specs.wire.batch import Batch

TABLES = [GroupRelative(scale="std"), GroupRelative(scale="none"), GroupRelative(scale="batch"), LeaveOneOut()]


def of(table, score, group, valid=None, rollout=None):
    """Each sample is a rollout of its own unless `rollout` says otherwise."""
    valid = [True] * len(score) if valid is None else valid
    rollout = range(len(score)) if rollout is None else rollout
    columns = (
        np.array(score, np.float32),
        np.array(group, np.int64),
        np.array(list(rollout), np.int64),
        np.array(valid, bool),
    )
    return advantages_of(table, *columns)


def slow(table, score_B, group_B, rollout_B, valid_B):
    """By dictionaries: what each valid rollout scored, then each sample against the others."""
    attempts = {}
    for score, group, rollout, valid in zip(score_B, group_B, rollout_B, valid_B, strict=True):
        if valid:
            attempts[rollout] = (float(score), group)
    everyone = [score for score, _ in attempts.values()]
    out = []
    for rollout, valid in zip(rollout_B, valid_B, strict=True):
        if not valid:
            out.append(0.0)
            continue
        score, group = attempts[rollout]
        others = [s for r, (s, g) in attempts.items() if g == group and r != rollout]
        out.append(against(table, score, others, everyone) if others else 0.0)
    return np.array(out)


def against(table, score, others, everyone):
    if isinstance(table, LeaveOneOut):
        return score - sum(others) / len(others)
    peers = [score, *others]
    centered = score - sum(peers) / len(peers)
    if table.scale == "none":
        return centered
    return centered / (unbiased_std(peers if table.scale == "std" else everyone) + 1e-6)


def unbiased_std(values):
    mean = sum(values) / len(values)
    return (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5


def test_group_relative_by_hand():
    # mean 0.5, unbiased variance of (0, 1) is 0.5
    got = of(GroupRelative(scale="std"), [0.0, 1.0], [7, 7])
    assert got == pytest.approx([-0.5 / (0.5**0.5 + 1e-6), 0.5 / (0.5**0.5 + 1e-6)])
    assert of(GroupRelative(scale="none"), [0.0, 1.0], [7, 7]) == pytest.approx([-0.5, 0.5])
    # all four scores have mean 1 and unbiased variance (1 + 1 + 1 + 1) / 3
    got = of(GroupRelative(scale="batch"), [0.0, 2.0, 2.0, 0.0], [1, 1, 2, 2])
    assert got == pytest.approx([-(0.75**0.5), 0.75**0.5, 0.75**0.5, -(0.75**0.5)], rel=1e-5)


def test_leave_one_out_by_hand():
    # the others' means are (1 + 2) / 2, (0 + 2) / 2 and (0 + 1) / 2
    assert of(LeaveOneOut(), [0.0, 1.0, 2.0], [4, 4, 4]) == pytest.approx([-1.5, 0.0, 1.5])
    assert of(LeaveOneOut(), [0.0, 1.0, 3.0, 4.0], [1, 1, 2, 2]) == pytest.approx([-1.0, 1.0, -1.0, 1.0])


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_against_a_slow_loop(table):
    """Uneven groups, rollouts of one to three samples in any order, and failures."""
    rng = np.random.default_rng(0)
    group_R = np.repeat([3, 9, 4, 100, 5], [15, 7, 2, 11, 1])
    score_R = rng.normal(size=len(group_R)).astype(np.float32)
    which_B = rng.permutation(np.repeat(np.arange(len(group_R)), rng.integers(1, 4, len(group_R))))
    given = score_R[which_B], group_R[which_B], 1000 - which_B, rng.random(len(which_B)) > 0.2
    assert advantages_of(table, *given) == pytest.approx(slow(table, *given), abs=1e-5)


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_samples_of_one_rollout_count_once(table):
    """Three samples of one attempt weigh what one does, and share its advantage."""
    alone = of(table, [1.0, 0.0, 0.5, 2.0], [1, 1, 1, 1])
    branched = of(table, [1.0, 1.0, 1.0, 0.0, 0.5, 2.0], [1] * 6, rollout=[9, 9, 9, 2, 3, 4])
    assert branched.tolist() == [alone[0]] * 3 + alone[1:].tolist()


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_failed_samples_do_not_move_the_group(table):
    without = of(table, [1.0, 0.0, 3.0, 4.0], [1, 1, 2, 2])
    with_failure = of(table, [1.0, 0.0, 99.0, 3.0, 4.0], [1, 1, 1, 2, 2], [True, True, False, True, True])
    assert with_failure.tolist() == [*without[:2], 0.0, *without[2:]]
    branch_failed = of(
        table, [-9.0, 1.0, 0.0, 3.0, 4.0], [1, 1, 1, 2, 2], [False, True, True, True, True], [7, 7, 8, 1, 2]
    )
    assert branch_failed.tolist() == [0.0, *without]


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_lonely_and_equal_groups_give_no_signal(table):
    assert of(table, [5.0], [1]).tolist() == [0.0]
    assert of(table, [5.0, 7.0, 7.0], [1, 2, 2]).tolist() == [0.0, 0.0, 0.0]
    assert of(table, [2.0, 3.0], [1, 1], [True, False]).tolist() == [0.0, 0.0]
    assert of(table, [2.0, 3.0], [1, 1], [False, False]).tolist() == [0.0, 0.0]
    assert of(table, [], []).shape == (0,)


@pytest.mark.parametrize("table", tables_of(AdvantageTable))
def test_every_advantage_table_has_its_function(table):
    assert table in ADVANTAGES


class Unheard(LeaveOneOut):
    kind: Literal["unheard"] = "unheard"


def test_an_advantage_without_a_function_is_named():
    with pytest.raises(RlctlError, match=r"(?s)advantage unheard.*advantages.py has group_relative, leave_one_out"):
        of(Unheard(), [1.0, 2.0], [1, 1])


def test_of_a_batch_with_holes_in_its_masks():
    """The samples of rollout 1 branch; what a tool said gets no advantage."""
    batch = Batch(
        {
            "tokens_T": np.arange(9),
            "loss_mask_T": np.array([0, 1, 0, 1, 0, 1, 0, 0, 1], np.uint8),
            "length_B": np.array([4, 3, 2]),
            "group_B": np.array([6, 6, 6]),
            "rollout_B": np.array([1, 1, 2]),
            "id_B": np.array([0, 1, 2]),
        }
    )
    advantage_B = advantages(LeaveOneOut(), batch, np.array([3.0, 3.0, 1.0], np.float32), np.ones(3, bool))
    assert per_token(advantage_B, batch).tolist() == [0, 2, 0, 2, 0, 2, 0, 0, -2]


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

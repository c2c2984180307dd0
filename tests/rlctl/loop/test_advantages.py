"""Advantages against hand-computed numbers and slow, obvious loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.loop.advantages import ADVANTAGES, advantages_of, columns
from rlctl.loop.token_advantages import TOKEN_ADVANTAGES
from specs.schema.algorithms.algorithm import Advantage
from specs.schema.algorithms.algorithm_tables import (
    ADVANTAGE_TABLES,
    GroupCentredWhitened,
    GroupRelative,
    LeaveOneOut,
    LengthWeighted,
)
from specs.wire.batch import Batch

TABLES = [
    GroupRelative(scale="std"),
    GroupRelative(scale="none"),
    GroupRelative(scale="batch"),
    LeaveOneOut(),
    LengthWeighted(),
    GroupCentredWhitened(),
]


def of(table, score, group, valid=None, rollout=None, tokens=None):
    """Each sample is a rollout of its own with 6 loss tokens unless `rollout` and `tokens` say otherwise."""
    valid = [True] * len(score) if valid is None else valid
    rollout = range(len(score)) if rollout is None else rollout
    columns = (
        np.array(score, np.float32),
        np.array(group, np.int64),
        np.array(list(rollout), np.int64),
        np.array(valid, bool),
        np.array([6] * len(score) if tokens is None else tokens, np.int64),
    )
    return advantages_of(table, *columns)


def slow(table, score_B, group_B, rollout_B, valid_B, tokens_B):
    """By dictionaries: what each valid rollout scored, then each sample against the others."""
    attempts, lengths = {}, {}
    for score, group, rollout, valid, tokens in zip(score_B, group_B, rollout_B, valid_B, tokens_B, strict=True):
        if valid:
            attempts[rollout] = (float(score), group)
            lengths[rollout] = lengths.get(rollout, 0) + int(tokens)
    everyone = [score for score, _ in attempts.values()]
    if isinstance(table, LengthWeighted):
        return length_weighted(attempts, lengths, rollout_B, valid_B)
    if isinstance(table, GroupCentredWhitened):
        return whitened(attempts, lengths, rollout_B, valid_B)
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


def length_weighted(attempts, lengths, rollout_B, valid_B):
    out = []
    for rollout, valid in zip(rollout_B, valid_B, strict=True):
        score, group = attempts.get(rollout, (0.0, None))
        peers = [(s, lengths[r]) for r, (s, g) in attempts.items() if g == group]
        total = sum(length for _, length in peers)
        comparable = valid and len(peers) > 1
        out.append(score - sum(s * length for s, length in peers) / (total or 1) if comparable else 0.0)
    return np.array(out)


def whitened(attempts, lengths, rollout_B, valid_B):
    """Token by token: a list with each loss token's centred score, of rollouts that are not alone."""
    mean = {g: np.mean([s for s, group in attempts.values() if group == g]) for _, g in attempts.values()}
    size = {g: sum(group == g for _, group in attempts.values()) for _, g in attempts.values()}
    tokens = [s - mean[g] for r, (s, g) in attempts.items() if size[g] > 1 for _ in range(lengths[r])]
    out = []
    for rollout, valid in zip(rollout_B, valid_B, strict=True):
        score, group = attempts.get(rollout, (0.0, None))
        comparable = valid and sum(g == group for _, g in attempts.values()) > 1 and len(tokens) > 1
        spread = (np.var(tokens, ddof=1) + 1e-8) ** 0.5 if comparable else 1.0
        out.append((score - mean[group] - np.mean(tokens)) / spread if comparable else 0.0)
    return np.array(out)


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


def test_length_weighted_by_hand():
    # (10·1 + 30·0) / 40 is the baseline: a long failure pulls it down
    assert of(LengthWeighted(), [1.0, 0.0], [5, 5], tokens=[10, 30]) == pytest.approx([0.75, -0.25])
    assert of(LengthWeighted(), [1.0, 0.0], [5, 5], tokens=[8, 8]) == pytest.approx([0.5, -0.5])
    # nobody wrote anything: the baseline is 0, and there is no token to learn from either
    assert of(LengthWeighted(), [1.0, 0.0], [5, 5], tokens=[0, 0]) == pytest.approx([1.0, 0.0])


def test_whitened_by_hand():
    # centred -1 and 1; of 4 tokens three have -1 and one has 1: mean -0.5, unbiased variance (3·0.25 + 2.25) / 3 = 1
    assert of(GroupCentredWhitened(), [0.0, 2.0], [1, 1], tokens=[3, 1]) == pytest.approx([-0.5, 1.5], abs=1e-6)
    # a group whose scores are large is not divided by its own spread
    got = of(GroupCentredWhitened(), [0.0, 2.0, 0.0, 20.0], [1, 1, 2, 2], tokens=[1, 1, 1, 1])
    assert got[3] / got[1] == pytest.approx(10.0)


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_against_a_slow_loop(table):
    """Uneven groups, rollouts of one to three samples in any order, and failures."""
    rng = np.random.default_rng(0)
    group_R = np.repeat([3, 9, 4, 100, 5], [15, 7, 2, 11, 1])
    score_R = rng.normal(size=len(group_R)).astype(np.float32)
    which_B = rng.permutation(np.repeat(np.arange(len(group_R)), rng.integers(1, 4, len(group_R))))
    tokens_B = rng.integers(0, 9, len(which_B))
    given = score_R[which_B], group_R[which_B], 1000 - which_B, rng.random(len(which_B)) > 0.2, tokens_B
    assert advantages_of(table, *given) == pytest.approx(slow(table, *given), abs=1e-5)


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_samples_of_one_rollout_count_once(table):
    """Three samples of one attempt weigh what one does, and share its advantage."""
    alone = of(table, [1.0, 0.0, 0.5, 2.0], [1, 1, 1, 1])
    tokens = [2, 3, 1, 6, 6, 6]  # as many in all
    branched = of(table, [1.0, 1.0, 1.0, 0.0, 0.5, 2.0], [1] * 6, rollout=[9, 9, 9, 2, 3, 4], tokens=tokens)
    assert branched.tolist() == [alone[0]] * 3 + alone[1:].tolist()


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_failed_samples_do_not_move_the_group(table):
    without = of(table, [1.0, 0.0, 3.0, 4.0], [1, 1, 2, 2])
    with_failure = of(table, [1.0, 0.0, 99.0, 3.0, 4.0], [1, 1, 1, 2, 2], [True, True, False, True, True])
    assert with_failure.tolist() == [*without[:2], 0.0, *without[2:]]
    valid = [False, True, True, True, True]
    branch_failed = of(table, [-9.0, 1.0, 0.0, 3.0, 4.0], [1, 1, 1, 2, 2], valid, [7, 7, 8, 1, 2])
    assert branch_failed.tolist() == [0.0, *without]


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_lonely_and_equal_groups_give_no_signal(table):
    assert of(table, [5.0], [1]).tolist() == [0.0]
    assert of(table, [5.0, 7.0, 7.0], [1, 2, 2]).tolist() == [0.0, 0.0, 0.0]
    assert of(table, [2.0, 3.0], [1, 1], [True, False]).tolist() == [0.0, 0.0]
    assert of(table, [2.0, 3.0], [1, 1], [False, False]).tolist() == [0.0, 0.0]
    assert of(table, [], []).shape == (0,)


@pytest.mark.parametrize("table", ADVANTAGE_TABLES)
def test_every_advantage_table_has_its_function(table):
    assert (table in ADVANTAGES) != (table in TOKEN_ADVANTAGES)


def branching():
    """The samples of rollout 1 branch; there are holes in their masks."""
    return Batch(
        {
            "tokens_T": np.arange(9),
            "loss_mask_T": np.array([0, 1, 0, 1, 0, 1, 0, 0, 1], np.uint8),
            "length_B": np.array([4, 3, 2]),
            "group_B": np.array([6, 6, 6]),
            "rollout_B": np.array([1, 1, 2]),
            "id_B": np.array([0, 1, 2]),
        }
    )


def test_of_a_batch_with_holes_in_its_masks():
    """What a tool said gets no advantage."""
    made = columns(LeaveOneOut(), branching(), np.array([3.0, 3.0, 1.0], np.float32), np.ones(3, bool))
    assert {name: column_T.tolist() for name, column_T in made.items()} == {"advantage_T": [0, 2, 0, 2, 0, 2, 0, 0, -2]}


def test_penalties_are_taken_off_the_score_of_the_whole_rollout():
    """0.25 at each of the three loss tokens of rollout 1, 1 at the only one of rollout 2; others do not count."""
    penalty_T = np.array([50, 0.25, 50, 0.25, 50, 0.25, 50, 50, 1])
    scores = np.array([3.0, 3.0, 1.0], np.float32)
    made = columns(LeaveOneOut(), branching(), scores, np.ones(3, bool), penalty_T)
    assert made["advantage_T"][[1, 3, 5, 8]].tolist() == [2.25, 2.25, 2.25, -2.25]
    # a branch whose grading failed costs nothing
    made = columns(LeaveOneOut(), branching(), scores, np.array([False, True, True]), penalty_T)
    assert made["advantage_T"][[1, 3, 5, 8]].tolist() == [0, 0, 2.75, -2.75]


# ── what holds of every advantage, whatever the batch ─────────────────────────────────────────────

ALL_TABLES = [table() for table in (*ADVANTAGES, *TOKEN_ADVANTAGES) if not any(
    field.is_required() for field in table.model_fields.values())]  # fmt: skip
QUICK = settings(max_examples=25, deadline=None)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, np.ndarray]:
    """Two to four groups of two to four rollouts with holes in their masks, and scores."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=2, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    group_B = np.repeat(np.arange(len(sizes)), sizes)
    masks = [np.concatenate([[0, 1], rng.random(rng.integers(0, 6)) < 0.6]) for _ in group_B]
    return drawn_batch(masks, group_B, np.arange(len(group_B)), rng), rng.integers(-4, 5, len(group_B)) / 2


def drawn_batch(masks: list[np.ndarray], group_B: np.ndarray, rollout_B: np.ndarray, rng: np.random.Generator) -> Batch:
    mask_T = np.concatenate(masks).astype(np.uint8)
    made = {"length_B": np.array([len(mask) for mask in masks]), "group_B": group_B, "rollout_B": rollout_B}
    reads = {name for table in ALL_TABLES for name in table.columns}
    made |= {name: rng.normal(size=len(mask_T if name.endswith("_T") else group_B)) for name in sorted(reads)}
    return Batch({**made, "loss_mask_T": mask_T})


def advantage(table: Advantage, batch: Batch, score_B: np.ndarray) -> np.ndarray:
    return columns(table, batch, score_B.astype(np.float32), np.ones(len(batch), bool))["advantage_T"]


@pytest.mark.parametrize("table", ALL_TABLES, ids=str)
@QUICK
@given(case=batches())
def test_masked_tokens_never_matter(table: Advantage, case: tuple[Batch, np.ndarray]) -> None:
    """Neither what stands there, nor that they are there."""
    batch, score_B = case
    on_T = batch["loss_mask_T"] > 0
    want_T = advantage(table, batch, score_B)
    assert not want_T[~on_T].any()
    spoiled = {name: np.where(on_T, column, np.nan) if name in table.columns and name.endswith("_T") else column
               for name, column in batch.columns.items()}  # fmt: skip
    assert advantage(table, Batch(spoiled), score_B).tolist() == want_T.tolist()
    gone = {name: column[on_T] if name.endswith("_T") else column for name, column in batch.columns.items()}
    gone["length_B"] = batch.sum_by_sequence("loss_mask_T")
    assert advantage(table, Batch(gone), score_B).tolist() == want_T[on_T].tolist()

"""Sequences are shared out once each, evenly, within the limit, and the result can be put back in order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specs.wire.batch import Batch
from specs.wire.model_flops import DecoderSize
from specs.wire.partition import even_rows, fewest_rows, in_step, shards, unit_shards
from specs.wire.sequence_work import SequenceWork

SIZE = DecoderSize(layers=4, heads=2, head_size=8, layer_weights=300, head_weights=100)


@st.composite
def groups(draw: st.DrawFn) -> Batch:
    """Groups of sequences behind one prompt each; some without a loss token, some without a token."""
    sequences: list[tuple[int, list[int]]] = draw(
        st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(-1, 40), min_size=1, max_size=6)), max_size=12)
    )
    tokens: list[int] = []
    mask: list[int] = []
    lengths: list[int] = []
    for number, (prompt, completions) in enumerate(sequences):
        for own in completions:
            written = max(own, 0)
            lengths.append(prompt + written if own >= 0 else 0)
            tokens += [number] * prompt + [99] * written if own >= 0 else []
            mask += [0] * prompt + [1] * written if own >= 0 else []
    columns = {"length_B": lengths, "tokens_T": tokens, "loss_mask_T": mask}
    return Batch({name: np.array(column, dtype=np.int64) for name, column in columns.items()})


def long_tail(sequences: int = 128, seed: int = 0, size: int = 8) -> SequenceWork:
    """Groups of `size`, lengths log-normal; prompts of about a tenth."""
    rng = np.random.default_rng(seed)
    prompts = np.repeat(rng.integers(50, 200, sequences // size), size)
    own = np.clip(rng.lognormal(6.2, 1.0, sequences), 1, 16_000).astype(np.int64)
    mask = np.repeat(np.tile([0, 1], sequences), np.stack([prompts, own], axis=1).ravel())
    tokens = np.repeat(np.repeat(np.arange(sequences // size), size), prompts + own)
    batch = Batch({"length_B": prompts + own, "tokens_T": tokens, "loss_mask_T": mask})
    large = DecoderSize(layers=28, heads=28, head_size=128, layer_weights=6_525_288_448, head_weights=544_997_376)
    return SequenceWork.of(batch, size=large)


def imbalance(work: SequenceWork, parts: list) -> float:
    flops = [work.flops(part) for part in parts]
    return max(flops) * len(flops) / sum(flops)


@settings(deadline=None)
@given(groups(), st.integers(1, 9))
def test_every_sequence_goes_to_one_rank_and_comes_back_to_its_place(batch: Batch, ranks: int) -> None:
    parts = shards(SequenceWork.of(batch, size=SIZE), ranks)
    assert len(parts) == ranks
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(batch)))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    assert sum(1 for part in parts if len(part)) == min(ranks, len(batch)), "no rank is idle while another has several"
    back_T = np.zeros(batch.num_tokens, dtype=np.int64)
    for part in parts:
        back_T[batch.token_index(part)] = batch.select(part)["tokens_T"]
    assert (back_T == batch["tokens_T"]).all()


@settings(deadline=None)
@given(groups(), st.sampled_from([(1, 1), (3, 1), (4, 2)]))
def test_units_go_whole_to_one_rank(batch: Batch, ranks: tuple[int, int]) -> None:
    unit_B = np.arange(len(batch)) // 2 * 7
    parts = unit_shards(SequenceWork.of(batch, size=SIZE), unit_B, *ranks)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(batch)))
    assert sum(len(np.unique(unit_B[part])) for part in parts) == len(np.unique(unit_B))


def test_ranks_are_even_in_flops_of_pairs() -> None:
    work = long_tail(size=2)
    assert imbalance(work, unit_shards(work, np.arange(128) // 2, 4)) < 1.03


@settings(deadline=None)
@given(groups(), st.integers(60, 150), st.integers(0, 8))
def test_every_sequence_is_in_one_micro_batch_and_none_is_over_the_limit(batch: Batch, limit: int, more: int) -> None:
    work = SequenceWork.of(batch, size=SIZE)
    found = fewest_rows(work, limit)
    even = even_rows(work, limit, found, len(found) + more)
    for parts in (found, even):
        assert sorted(sequence for part in parts for sequence in part) == work.computed.tolist()
        assert all(0 < work.rows(part) <= limit for part in parts)
    assert len(even) == min(len(found) + more, len(work.computed)), "as many as all ranks make"


@settings(deadline=None)
@given(groups(), st.integers(60, 150), st.integers(0, 8), st.floats(1.0, 3.0))
def test_rounds_in_step_hold_the_same_within_the_limit(batch: Batch, limit: int, more: int, above: float) -> None:
    """However much more another rank has in a round: nothing is lost, no round gets more than the heaviest."""
    work = SequenceWork.of(batch, size=SIZE)
    found = fewest_rows(work, limit)
    even = even_rows(work, limit, found, len(found) + more)
    heaviest = [work.flops(part) * above for part in even]
    moved = in_step(work, limit, even, [*heaviest, 1.0])
    assert sorted(sequence for part in moved for sequence in part) == work.computed.tolist()
    assert all(0 < work.rows(part) <= limit for part in moved)
    assert all(work.flops(part) <= most * (1 + 1e-9) for part, most in zip(moved, heaviest, strict=True))


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_are_even_in_flops_on_a_long_tail(ranks: int) -> None:
    work = long_tail()
    parts = shards(work, ranks)
    assert imbalance(work, parts) < 1.05
    computed = sum(work.rows(part) for part in parts) / work.rows(work.computed)
    assert computed < 1.05, "and hardly any prompt is computed twice"


def test_work_is_even_over_ranks_that_share_it() -> None:
    """Eight ranks in groups of two, four sequences: each group has one, though half of the ranks have none."""
    rows_B = np.array([40, 30, 20, 10])
    parts = shards(SequenceWork.apart(rows_B, rows_B * 1.0), 8, 2)
    assert sorted(part.tolist() for part in parts if len(part)) == [[0], [1], [2], [3]]
    assert all(len(parts[first]) + len(parts[first + 1]) == 1 for first in range(0, 8, 2))
    work = long_tail(64, seed=4)
    for together in (1, 2, 4):
        parts = shards(work, 4, together)
        assert sorted(np.concatenate(parts).tolist()) == list(range(64))
        groups = [np.sort(np.concatenate(parts[first : first + together])) for first in range(0, 4, together)]
        wanted = shards(work, 4 // together)
        assert [group.tolist() for group in groups] == [part.tolist() for part in wanted]


def test_groups_are_divided_where_that_saves_a_micro_batch() -> None:
    """Four groups of 60 rows fill three micro-batches of 100; whole they would need four."""
    mask, tokens = np.tile([0] * 4 + [1] * 9, 4 * 7), np.repeat(np.arange(4), 7 * 13)
    batch = Batch({"length_B": np.full(28, 13), "tokens_T": tokens, "loss_mask_T": mask})
    work = SequenceWork.of(batch, size=SIZE)
    assert [work.rows(np.flatnonzero(work.family_B == first)) for first in (0, 7)] == [60, 60]
    parts = fewest_rows(work, 100)
    assert len(parts) == 3
    assert sum(work.rows(part) for part in parts) <= 240 + 3 * 4, "each cut computes a prompt once more"


def test_micro_batches_are_even_and_the_heaviest_first() -> None:
    work = long_tail(256, seed=3)
    found = fewest_rows(work, 32_768)
    parts = even_rows(work, 32_768, found, 0)
    flops = [work.flops(part) for part in parts]
    assert flops == sorted(flops, reverse=True)
    assert imbalance(work, parts) <= 1.05 < imbalance(work, found)


def test_a_rank_that_waits_takes_what_the_last_rounds_have() -> None:
    """Beside a rank with a sequence of 90 rows in its first round: its rounds of 60 become 90, 80 and 10."""
    work = SequenceWork.apart(np.full(18, 10), np.full(18, 10.0))
    even = even_rows(work, 100, fewest_rows(work, 100), 3)
    assert [work.rows(part) for part in even] == [60, 60, 60]
    moved = in_step(work, 100, even, [90.0, 80.0, 60.0])
    assert [work.rows(part) for part in moved] == [90, 80, 10]
    assert in_step(work, 100, even, [60.0, 60.0, 60.0]) == even

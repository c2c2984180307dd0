"""What computing a sequence is: only what predicts a loss token, and a prompt of several once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_helpers import make_batch, make_grouped_batch

from specs.errors import BatchError
from specs.wire.batch import Batch
from specs.wire.model_flops import DecoderSize
from specs.wire.sequence_work import SequenceWork

SIZE = DecoderSize(layers=2, heads=2, head_size=4, layer_weights=100, head_weights=30)


def two_turns() -> Batch:
    """Prompt 7 8: two completions, of which one goes on behind a tool's reply; another prompt; and no loss token."""
    return Batch(
        {
            "length_B": np.array([7, 4, 3, 2, 0]),
            "tokens_T": np.array([7, 8, 1, 5, 5, 2, 3, 7, 8, 1, 6, 7, 9, 1, 7, 8], dtype=np.int32),
            "loss_mask_T": np.array([0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0], dtype=np.int8),
        }
    )


def test_rows_prompts_and_families() -> None:
    work = SequenceWork.of(two_turns(), size=SIZE)
    assert work.rows_B.tolist() == [6, 2, 2, 0, 0], "a sequence ends before its last loss token"
    assert work.prompt_B.tolist() == [2, 2, 2, 0, 0]
    assert work.family_B[0] == work.family_B[1] != work.family_B[2]
    assert work.computed.tolist() == [0, 1, 2]
    assert work.flops_B[0] == SIZE.sequence_flops(6) + SIZE.head_flops(3), "the mask has a hole"
    assert work.flops_B[3] == 0
    assert work.rows(range(5)) == 6 + 2 - 2 + 2
    assert work.flops([0, 1]) == work.flops_B[0] + work.flops_B[1] - SIZE.sequence_flops(2)
    alone = SequenceWork.of(two_turns(), size=SIZE, share_prompts=False)
    assert (alone.rows(range(5)), alone.shares, work.shares) == (10, False, True)


@given(st.integers(0, 200), st.booleans())
def test_it_is_what_a_slow_loop_finds(seed: int, grouped: bool) -> None:
    batch = make_grouped_batch(seed) if grouped else make_batch(seed=seed)
    work = SequenceWork.of(batch, size=SIZE)
    seen, rows, flops = set(), 0, 0.0
    for tokens, mask in zip(batch.sequences("tokens_T"), batch.sequences("loss_mask_T"), strict=True):
        marked = np.flatnonzero(mask)
        if not len(marked):
            continue
        prompt = tuple(tokens[: marked[0]].tolist())
        begin = len(prompt) if prompt in seen else 0
        seen |= {prompt} if len(prompt) > 1 else set()
        rows += int(marked[-1]) - begin
        flops += float(SIZE.sequence_flops(marked[-1]) - SIZE.sequence_flops(begin) + SIZE.head_flops(len(marked)))
    assert work.rows(np.arange(len(batch))) == rows
    assert work.flops(np.arange(len(batch))) == pytest.approx(flops)


@given(st.integers(0, 200), st.booleans())
def test_units_take_what_their_sequences_take_together(seed: int, mixed: bool) -> None:
    """In any parts, also where two units have the same prompt, or one unit several."""
    batch, rng = make_grouped_batch(seed), np.random.default_rng(seed)
    work = SequenceWork.of(batch, size=SIZE)
    unit_B = rng.integers(0, 5, len(batch)) * 10 if mixed else np.arange(len(batch)) // 2
    units = work.joined(unit_B)
    assert sorted(np.concatenate(units.members).tolist()) == list(range(len(batch)))
    part = rng.permutation(len(units.members))[:3]
    chosen = units.sequences(part)
    assert {*unit_B[chosen]}.isdisjoint(np.delete(unit_B, chosen))
    apart = [unit for unit in part if len({*work.family_B[units.members[unit]].tolist()}) > 1]
    assert units.work.rows(part) >= work.rows(chosen), "it fits where it is said to"
    if not apart:  # a unit of several prompts is counted as if it shared none of them with others
        assert units.work.rows(part) == work.rows(chosen)
        assert units.work.flops(part) == pytest.approx(work.flops(chosen))


def test_the_first_token_is_never_a_loss_token() -> None:
    batch = Batch({"length_B": np.array([1]), "tokens_T": np.array([1]), "loss_mask_T": np.array([1])})
    with pytest.raises(BatchError, match="first token"):
        SequenceWork.of(batch)

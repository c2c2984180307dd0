"""Packing: nothing lost, nothing over the budget, nothing computed that no loss token needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from train_helpers import make_batch, make_grouped_batch

from backends.packed.packing import Budget, MicroBatch, MicroBatches, Packing
from specs.errors import BatchError
from specs.wire.batch import Batch


def micro_batches(batch: Batch, limit: int, *, share_prompts: bool = False) -> MicroBatches:
    return Packing(Budget(limit), share_prompts).micro_batches(batch)


def last_token_micro_batches(batch: Batch, limit: int, *, share_prompts: bool = False) -> MicroBatches:
    return Packing(Budget(limit), share_prompts).last_token_micro_batches(batch)


def sequence_rows(micro: MicroBatch, segment: int) -> list[int]:
    """Rows of a sequence that ends with this segment."""
    starts = np.cumsum([0, *micro.lengths])
    chain = [segment] if micro.parents[segment] < 0 else [micro.parents[segment], segment]
    return [row for each in chain for row in range(starts[each], starts[each + 1])]


@pytest.mark.parametrize("batch", [make_batch(30, seed=5), make_grouped_batch(1), make_grouped_batch(2, size=9)])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("limit", [21, 40, 1000])
def test_micro_batches_point_at_the_right_tokens(batch: Batch, share: bool, limit: int) -> None:
    offsets = batch.offsets
    seen = []
    for micro in micro_batches(batch, limit, share_prompts=share):
        assert micro.num_tokens == sum(micro.lengths) <= limit
        assert share or set(micro.parents) == {-1}
        rows = [sequence_rows(micro, segment) for segment in range(len(micro.lengths))]
        for each in rows:
            assert micro.positions_T[each].tolist() == list(range(len(each)))
        segment_T = np.repeat(np.arange(len(micro.lengths)), micro.lengths)
        for hidden, target, column in zip(micro.hidden_N, micro.target_N, micro.column_N, strict=True):
            sequence = int(np.searchsorted(offsets, column, side="right") - 1)
            assert batch["tokens_T"][column] == target
            length = column - offsets[sequence]
            context = rows[segment_T[hidden]][:length]
            assert context[-1] == hidden
            assert (micro.tokens_T[context] == batch["tokens_T"][offsets[sequence] : column]).all()
        seen += micro.column_N.tolist()
    assert sorted(seen) == np.flatnonzero(batch["loss_mask_T"]).tolist()


def answers_to(prompt: list[int], answers: list[list[int]]) -> Batch:
    sequences = [prompt + answer for answer in answers]
    masks = [[0] * len(prompt) + [1] * len(answer) for answer in answers]
    return Batch(
        {
            "length_B": np.array([len(sequence) for sequence in sequences]),
            "tokens_T": np.concatenate(sequences).astype(np.int32),
            "loss_mask_T": np.concatenate(masks).astype(np.int8),
        }
    )


def test_a_shared_prompt_ends_where_the_first_completion_begins() -> None:
    """Two turns with a tool's reply between: rows of the reply are computed, and no loss token is in it."""
    batch = Batch(
        {
            "length_B": np.array([7, 5, 6]),
            "tokens_T": np.array([7, 8, 1, 5, 5, 2, 3, 7, 8, 1, 6, 4, 7, 8, 1, 5, 5, 9], dtype=np.int32),
            "loss_mask_T": np.array([0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 1], dtype=np.int8),
        }
    )
    (micro,) = micro_batches(batch, 100, share_prompts=True)
    assert micro.tokens_T.tolist() == [7, 8, 1, 5, 5, 2, 1, 6, 7, 8, 1, 5, 5], "the third learns of its last turn only"
    assert (micro.lengths, micro.parents) == ([2, 4, 2, 5], [-1, 0, 0, -1])
    assert micro.hidden_N.tolist() == [1, 4, 5, 1, 7, 12]
    assert micro.target_N.tolist() == [1, 2, 3, 1, 4, 9]


def test_last_tokens_fill_the_limit_and_no_more() -> None:
    """A sequence of exactly the limit fits, each computed token once, and empty ones are left out."""
    tokens_T = np.arange(100, 117, dtype=np.int32)
    batch = Batch({"length_B": np.array([0, 8, 0, 3, 1, 5, 0]), "tokens_T": tokens_T})
    micros = last_token_micro_batches(batch, 8)
    assert max(micro.num_tokens for micro in micros) == 8
    last = {
        int(i): int(micro.tokens_T[row])
        for micro in micros
        for i, row in zip(micro.column_N, micro.hidden_N, strict=True)
    }
    assert last == {1: 107, 3: 110, 4: 111, 5: 116}
    assert sorted(np.concatenate([micro.tokens_T for micro in micros]).tolist()) == tokens_T.tolist()
    with pytest.raises(BatchError, match="sequence 1 has 8 tokens"):
        last_token_micro_batches(batch, 7)
    twice = Batch({"length_B": np.array([3, 3]), "tokens_T": np.array([1, 2, 3, 1, 2, 3], dtype=np.int32)})
    (micro,) = last_token_micro_batches(twice, 8, share_prompts=True)
    assert (micro.num_tokens, micro.hidden_N.tolist(), sorted(micro.column_N.tolist())) == (3, [2, 2], [0, 1])


@pytest.mark.parametrize("cut", ["micro_batches", "last_token_micro_batches"])
def test_a_sequence_that_no_row_holds_is_named_with_the_key(cut: str) -> None:
    batch = answers_to([1, 2, 3], [[4], [5, 6, 7, 8, 9]])
    fits = getattr(Packing(Budget(4, 2, "critic.micro_batch_tokens")), cut)(batch)
    assert sum(fits.tokens) > 0
    with pytest.raises(BatchError) as raised:
        getattr(Packing(Budget(3, 2, "critic.micro_batch_tokens")), cut)(batch)
    expected = "sequence 1 has 8 tokens, over critic.micro_batch_tokens = 3 × 2 ranks that share a row"
    assert str(raised.value).startswith(expected)
    assert "raise critic.micro_batch_tokens" in str(raised.value)


def test_all_ranks_make_as_many_micro_batches() -> None:
    """Two ranks of one batch, of which one would need fewer: it makes more of what it has, and no empty one."""
    many, few = make_batch(30, seed=5), make_batch(6, seed=6)
    needed = [len(Packing(Budget(60)).micro_batches(batch)) for batch in (many, few)]
    assert needed[1] < needed[0] <= 5
    agreed = [Packing(Budget(60), rounds=lambda _: max(needed)).micro_batches(batch) for batch in (many, few)]
    assert [len(micros) for micros in agreed] == [micros.rounds for micros in agreed] == [max(needed)] * 2
    (one,) = Packing(Budget(60), rounds=lambda _: 3).micro_batches(answers_to([1], [[2]]))
    assert one.tokens_T.tolist() == [1], "one sequence makes one micro-batch; the rounds are three all the same"


def test_rounds_follow_the_rank_with_the_most_work() -> None:
    """One rank has a long sequence, the other, which would wait for it, fills its first round as far."""
    long, short = answers_to([1], [[2] * 50, [3] * 5, [4] * 5]), answers_to([1], [[each] * 10 for each in range(2, 8)])
    needed = [Packing(Budget(60), rounds=lambda _: 2).micro_batches(batch).tokens for batch in (long, short)]
    assert [max(tokens) for tokens in needed] == [50, 30]
    told: list[Sequence[float]] = []

    def heaviest(flops: Sequence[float]) -> Sequence[float]:
        told.append(flops)
        return [6 * 50.0, 6 * 30.0]

    micros = Packing(Budget(60), rounds=lambda _: 2, heaviest=heaviest).micro_batches(short)
    assert (list(told[0]), micros.tokens) == ([6 * 30.0, 6 * 30.0], [50, 10])

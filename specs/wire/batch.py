"""A batch of samples: flat columns, no padding.

A *rollout* is one attempt at a task; a *sample* is a path of tokens through it, one sequence for a trainer (most
rollouts are one sample); a *group* is the rollouts that are compared with each other. Suffixes name the dims: `_T` is
one value per token (all samples one after another), `_B` one per sample.

A group of two rollouts. The first has two turns: prompt 5 3, completion 8 2, a tool's reply 6 6, completion 4 1. The
second is done after one: completion 9 1. Its columns, when both are written:

    tokens_T           [5, 3, 8, 2, 6, 6, 4, 1 | 5, 3, 9, 1]
    loss_mask_T        [0, 0, 1, 1, 0, 0, 1, 1 | 0, 0, 1, 1]   1: the policy wrote it. Holes may be anywhere
    rollout_logprob_T  [0, 0, a, b, 0, 0, c, d | 0, 0, e, f]   a token's own: c = log p(4 | 5, 3, 8, 2, 6, 6)
    length_B           [8, 4]
    group_B            [0, 0]   which rollouts are compared; it says nothing of their tokens
    rollout_B          [0, 1]   which attempt a sample belongs to: statistics count a rollout once
    id_B               [0, 1]   the sample: its random numbers, and its place in the batch
    row_B              [7, 7]   the row of the data
    finished_B         [1, 1]   a stop token ended its last completion

What `generate` was given, for the first turn of both and then for the second turn of one:

    tokens_T           [5, 3 | 5, 3]   [5, 3, 8, 2, 6, 6]   any tokens; all of them have mask 0 in what comes back
    prefix_B           [0, 0]          [1]                  equal prompts, whose computation may be shared
    position_B         [0, 0]          [2]                  tokens drawn so far: random numbers continue, not again
    greedy_B                                            optional: samples that take the likeliest token at each place
    group_B, rollout_B, id_B, row_B    as above, in every turn

A batch only gains columns. Verbs declare the columns that they need and give (`specs/wire/messages.py`). What stands in
a `_T` column off the mask means nothing, and the first token of a sample is never on it: nothing predicts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specs.errors import BatchError

Column = NDArray[Any]


def require_columns(there: Iterable[str], needed: Iterable[str], verb: str) -> None:
    if missing := sorted({*needed}.difference(there)):
        raise BatchError(f"{verb} needs the columns {', '.join(missing)}, which the batch does not have")


class Batch:
    """Columns that agree in length. `length_B` is always there."""

    __slots__ = ("columns",)

    def __init__(self, columns: Mapping[str, Column]) -> None:
        if "length_B" not in columns:
            raise BatchError("a batch needs the column length_B")
        self.columns = dict(columns)
        sequences, tokens = len(columns["length_B"]), int(columns["length_B"].sum())
        for name, column in columns.items():
            want = tokens if name.endswith("_T") else sequences if name.endswith("_B") else None
            if want is None:
                raise BatchError(f"column {name} must end in _T (per token) or _B (per sequence)")
            if column.shape[:1] != (want,):
                raise BatchError(f"column {name} has shape {column.shape}; expected ({want},)")

    def __getitem__(self, name: str) -> Column:
        try:
            return self.columns[name]
        except KeyError:
            raise BatchError(f"the batch has no column {name}; it has {', '.join(sorted(self.columns))}") from None

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __len__(self) -> int:
        return len(self.columns["length_B"])

    @property
    def num_tokens(self) -> int:
        return int(self.columns["length_B"].sum())

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Return where each sequence starts; one more entry than sequences."""
        return np.concatenate([[0], np.cumsum(self.columns["length_B"])]).astype(np.int64)

    @property
    def sequence_T(self) -> Column:
        """Index of the sequence that each token is part of."""
        return np.repeat(np.arange(len(self)), self.columns["length_B"])

    @property
    def predicted_T(self) -> Column:
        """A mask of all tokens but the first of each sequence, which nothing predicts."""
        mask_T = np.ones(self.num_tokens, dtype=np.uint8)
        mask_T[self.offsets[:-1]] = 0
        return mask_T

    def with_columns(self, **columns: Column) -> Batch:
        """A new batch with more columns. Replacing one is an error: a batch only gains."""
        taken = sorted(set(columns) & set(self.columns))
        if taken:
            raise BatchError(f"the batch already has {', '.join(taken)}")
        return Batch({**self.columns, **columns})

    def only(self, names: Iterable[str]) -> Batch:
        """A view with just these columns (and `length_B`)."""
        return Batch({name: self[name] for name in dict.fromkeys((*names, "length_B"))})

    def require(self, names: Iterable[str], verb: str) -> None:
        require_columns(self.columns, names, verb)

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> Batch:
        """The sequences at `indices`, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        token_index = self.token_index(chosen)
        return Batch(
            {name: column[token_index if name.endswith("_T") else chosen] for name, column in self.columns.items()}
        )

    def token_index(self, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the tokens of the chosen sequences stand in the `_T` columns, sequence after sequence."""
        length_B = self.columns["length_B"][chosen].astype(np.int64)
        ends_B = np.cumsum(length_B)
        start_T = np.repeat(self.offsets[:-1][chosen] - (ends_B - length_B), length_B)
        return start_T + np.arange(int(length_B.sum()))

    def sum_by_sequence(self, name: str) -> NDArray[np.int64]:
        """Per sequence the sum of a `_T` column of whole numbers, such as a mask."""
        total = np.concatenate([[0], np.cumsum(self[name], dtype=np.int64)])
        offsets = self.offsets
        summed: NDArray[np.int64] = total[offsets[1:]] - total[offsets[:-1]]
        return summed

    def sequences(self, name: str) -> list[Column]:
        """A `_T` column split into one view per sequence."""
        return np.split(self[name], self.offsets[1:-1]) if len(self) else []

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Sequences of all batches, one after another; the batches must have the same columns."""
        if not batches:
            raise BatchError("nothing to concatenate")
        names = set(batches[0].columns)
        for batch in batches[1:]:
            if set(batch.columns) != names:
                raise BatchError(f"batches differ in columns: {sorted(names ^ set(batch.columns))}")
        return Batch({name: np.concatenate([batch.columns[name] for batch in batches]) for name in batches[0].columns})

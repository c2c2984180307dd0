"""Causal attention of a packed row as padded batches of sequences of like length.

Suffixes and letters: T tokens of the row, H query heads, KV key/value heads, D head dim, P rows after padding, S
segments, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from backends.packed.packed_attention import Reach, Scoring, additive_mask
from backends.packed.row_ops import Put, RowCopies, copy_rows, take_rows


class PackedLayout:
    """Causal attention inside each of several sequences that are packed in a row.

    The row is made of segments of `lengths`, one after another. A segment is a sequence by itself, or it continues the
    segment `parents[i]` (-1: none), so that completions of a prompt share the prompt's rows.

    Sequences of like length are gathered into a right-padded batch `[n, L]` and attended with the plain causal
    kernel: a padded row lies to the right of every real one, so no real token ever sees it and no mask is needed.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        parents: Sequence[int] | None = None,
        put: Put | None = None,
    ) -> None:
        """`put` brings arrays to the device, each by itself if unset."""
        put = put or (lambda array: torch.from_numpy(array).to(device))
        self.lengths = list(lengths)
        self.mask: Tensor | None = torch.zeros(1, 1, 1, 1, device=device)  # 4-D: passed through, so no T×T mask is made
        plan = _PadPlan(
            np.array(self.lengths), np.full(len(self.lengths), -1) if parents is None else np.array(parents)
        )
        self.groups = plan.groups
        self.identity = np.array_equal(plan.index_P, np.arange(len(plan.inverse_T)))
        self.copies = RowCopies(plan.index_P, len(plan.inverse_T), put, plan.real_P) if plan.shared else None
        self.index_P, self.inverse_T = put(plan.index_P), put(plan.inverse_T)
        self._masks: dict[tuple[int, Reach], Tensor] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: Scoring) -> Tensor:
        q_groups, k_groups, v_groups = (self._padded(x) for x in (query, key, value))
        outputs = []
        for q, k, v in zip(q_groups, k_groups, v_groups, strict=True):
            if how.function is None:
                out = causal_attention(q, k, v, how.scaling, how.reach).transpose(1, 2)
            else:
                out = how.function(q, k, v, self._mask(q.shape[2], how.reach, q))
            outputs.append(out.flatten(0, 1))
        out_P = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        out_T = out_P if self.identity else take_rows(out_P, self.inverse_T)
        return out_T.unsqueeze(0)

    def _mask(self, length: int, reach: Reach, like: Tensor) -> Tensor:
        """[1, 1, L, L] of 0 and -inf."""
        if (length, reach) not in self._masks:
            mask = additive_mask(_hidden(length, reach, like.device), like.dtype)
            self._masks[length, reach] = mask[None, None]
        return self._masks[length, reach]

    def _padded(self, x: Tensor) -> list[Tensor]:
        """[1, h, T, D] → per group [n, h, L, D]."""
        x_T = x[0].transpose(0, 1)
        if self.copies is not None:
            x_P = copy_rows(x_T, self.copies)
        else:
            x_P = x_T if self.identity else _Pad.apply(x_T, self.index_P, self.inverse_T)
        parts = x_P.split([count * length for count, length in self.groups])
        return [part.unflatten(0, group).transpose(1, 2) for part, group in zip(parts, self.groups, strict=True)]


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, reach: Reach) -> Tensor:
    """[n, H, L, D] with keys and values [n, KV, L, D] → [n, H, L, D]."""
    length = query.shape[2]
    band = None if reach.covers(length) else ~_hidden(length, reach, query.device)
    return masked_attention(query, key, value, band, scaling)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """[n, H, Q, D] with keys and values [n, KV, S, D] → [n, H, Q, D]; causal without a mask."""
    masked = mask is not None
    if query.shape[1] != key.shape[1] and wants_a_key_per_query_head(query.device, query.dtype, masked=masked):
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=not masked, scale=scaling, enable_gqa=gqa)


def _hidden(length: int, reach: Reach, device: torch.device) -> Tensor:
    """[L, L]: whether the token of a row does not see that of a column."""
    place = torch.arange(length, device=device, dtype=torch.int32)
    return reach.hides(place[:, None], place)


def wants_a_key_per_query_head(device: torch.device, dtype: torch.dtype, *, masked: bool) -> bool:
    """Whether sdpa has only its math kernel, which holds scores [n, H, L, L], for fewer key heads than query heads: on
    CUDA the flash kernel takes neither a mask nor fp32, and the memory-efficient one (torch 2.13) no such heads."""
    return device.type == "cuda" and (masked or dtype == torch.float32)


class _PadPlan:
    """groups: (count, length) of each padded batch. index_P: row of the packed tokens for each padded row; real_P: not
    only filling. inverse_T: a padded row for each packed token. shared: whether any token has several.

    Longest first, in groups of like length.
    """

    def __init__(self, length_S: NDArray[np.int64], parent_S: NDArray[np.int64]) -> None:
        assert (parent_S < np.arange(len(parent_S))).all(), "a segment comes after the one that it continues"
        start_S = np.cumsum(length_S) - length_S
        ends_B = np.setdiff1d(np.arange(len(length_S)), parent_S)  # the last segment of each sequence
        prompt_B = parent_S[ends_B]
        assert (parent_S[prompt_B[prompt_B >= 0]] < 0).all(), "a segment that is continued continues none"
        prefix_B = np.where(prompt_B < 0, 0, length_S[prompt_B])
        first_B = np.where(prompt_B < 0, start_S[ends_B], start_S[prompt_B])
        total_B = prefix_B + length_S[ends_B]
        order = np.argsort(-total_B, kind="stable")
        self.groups = groups_of_like_length(total_B[order].tolist())
        index, real, done = [], [], 0
        for count, longest in self.groups:
            chosen = order[done : done + count, None]
            done += count
            place = np.arange(longest)
            own = start_S[ends_B[chosen]] + place - prefix_B[chosen]
            row = np.where(place < prefix_B[chosen], first_B[chosen] + place, own)
            real.append((place < total_B[chosen]).ravel())
            index.append(np.where(place < total_B[chosen], row, first_B[chosen]).ravel())
        self.index_P, self.real_P = np.concatenate(index), np.concatenate(real)
        self.inverse_T = np.zeros(int(length_S.sum()), dtype=np.int64)
        self.inverse_T[self.index_P[self.real_P]] = np.flatnonzero(self.real_P)
        self.shared = len(np.unique(prompt_B[prompt_B >= 0])) < int((prompt_B >= 0).sum())


def groups_of_like_length(lengths: list[int], least_fill: float = 0.65) -> list[tuple[int, int]]:
    """Return (count, length of the longest) of each group; `lengths` fall.

    A sequence opens a new group when it would fill less than `least_fill` of its padded row. Measured on 2 cores with
    128 sequences: 0.65 beats 0.5 and 0.8 by 10-20 %, on even and on long-tailed lengths.
    """
    groups: list[tuple[int, int]] = []
    for length in lengths:
        if groups and length >= least_fill * groups[-1][1]:
            groups[-1] = (groups[-1][0] + 1, groups[-1][1])
        else:
            groups.append((1, length))
    return groups


class _Pad(torch.autograd.Function):
    """[T, …] → [P, …]. Padded rows repeat a real one (finite values); their gradient is zero, so it is not gathered."""

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, index_P: Tensor, inverse_T: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_T)
        return x_T.index_select(0, index_P)

    @staticmethod
    def backward(ctx: Any, grad_P: Tensor) -> tuple[Tensor, None, None]:
        (inverse_T,) = ctx.saved_tensors
        return grad_P.index_select(0, inverse_T), None, None

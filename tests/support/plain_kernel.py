"""Flash attention without a GPU: its kernel in plain torch, below transformers' own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash


class PlainKernel:
    """What flash_attn_varlen_func promises, slowly: causal attention inside each of the sequences whose ends are given.

    Records the lengths and windows that it was called with.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], int, tuple[int, int]]] = []

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> Tensor:
        """q [T, H, D], k and v [T, KV, D] → [T, H, D]."""
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert (causal, dropout_p) == (True, 0.0)
        assert isinstance(max_seqlen_q, int)
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        self.calls.append((cu_seqlens_q.tolist(), max_seqlen_q, window_size))
        heads = q.shape[1] // k.shape[1]
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        outputs = []
        for start, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
            queries, keys, values = (t[start:end].transpose(0, 1) for t in (q, k, v))
            scores = queries @ keys.repeat_interleave(heads, 0).transpose(1, 2) * scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            row = torch.arange(end - start)
            back = row[:, None] - row
            seen = (back >= 0) & ((back <= window_size[0]) if window_size[0] >= 0 else True)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            outputs.append((weights @ values.repeat_interleave(heads, 0)).transpose(0, 1))
        return torch.cat(outputs)


def put_plain_kernel(set_attribute: Callable[[Any, str, Any], None] = setattr) -> PlainKernel:
    """In place of the package's function. `set_attribute`: a monkeypatch's, which sets all of it back."""
    plain = PlainKernel()
    for name in [n for n in vars(flash) if n.startswith(("_flash_", "_pad_", "_unpad_", "_process_", "_loaded_"))]:
        set_attribute(flash, name, getattr(flash, name))  # as they were, when the test is over
    set_attribute(flash, "_loaded_implementation", None)
    functions = (None, plain.flash_attn_varlen_func, None, None, None)
    set_attribute(flash, "_lazy_imports", lambda *_, **__: functions)
    return plain

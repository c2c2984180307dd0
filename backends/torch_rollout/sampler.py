"""From logits to tokens: temperature, then top-k, then top-p; inverse CDF; the exact log-prob of what was drawn."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specs.wire.role_config import Sampling


def sample(logits: Tensor, uniform_B: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    logits [B, V] in any float dtype, uniform_B [B] float64 in [0, 1). Returns token_B (int64) and logprob_B (fp32):
    the log-prob under the distribution drawn from, after temperature and restriction. Greedy takes the likeliest token
    and reports its log-prob under softmax(logits): evaluation has no sampling distribution to be exact about.

    The CDF runs in vocabulary order, not in order of probability, so that rounding noise in the logits (which
    depends on the batch's shape) moves a draw only at the edge of an interval.
    """
    logits = logits.float()
    if sampling.greedy:
        token = logits.argmax(-1, keepdim=True)
        return token[:, 0], F.log_softmax(logits, -1).gather(-1, token)[:, 0]
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    logprob = F.log_softmax(restrict(logits, sampling.top_k, sampling.top_p), -1)
    cdf = logprob.exp().cumsum(-1, dtype=torch.float64)
    threshold = uniform_B[:, None] * cdf[:, -1:]
    token = torch.searchsorted(cdf, threshold, right=True).clamp_(max=cdf.shape[-1] - 1)
    return token[:, 0], logprob.gather(-1, token)[:, 0]


def restrict(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """-inf everywhere but at the `top_k` likeliest tokens (0: all), and of those at the smallest set that holds `top_p`
    of their probability (Holtzman et al. 2020). logits [B, V]. At least one token stays; ties: lower id."""
    vocab = logits.shape[-1]
    if top_k in (0, vocab) and top_p >= 1.0:
        return logits
    values, index = torch.sort(logits, dim=-1, descending=True, stable=True)
    if 0 < top_k < vocab:
        values, index = values[:, :top_k], index[:, :top_k]
    if top_p < 1.0:
        probability = values.softmax(-1)
        before = probability.cumsum(-1) - probability
        outside = before >= top_p
        outside[:, 0] = False
        values = values.masked_fill(outside, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(-1, index, values)

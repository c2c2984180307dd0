"""The clipped value loss of a critic, one value per loss token (N)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backends.token_metrics import ValueTokens, token_values
from specs.schema.algorithms.algorithm_tables import ValueLoss


@dataclass(frozen=True)
class ValueColumns:
    """Hold what the loss reads at each loss token besides the critic's own number."""

    weight_N: Tensor
    old_value_N: Tensor  # before the step's first update
    return_N: Tensor


def value_loss(value_N: Tensor, columns: ValueColumns, loss: ValueLoss) -> tuple[Tensor, Tensor, Tensor]:
    """Σ weight · ½·max((V - R)², (V_old + clip(V - V_old, ±c) - R)²), without `value_clip` Σ weight · ½(V - R)²
    (Schulman et al. 2017, in their code; Engstrom et al. 2020). Where the clip decides, a token has no gradient.

    Returns it (scalar, with gradient), the sums that the table declares, and its maxima, of which there are none.
    """
    plain_N = (value_N - columns.return_N).square()
    larger_N, clipped_N = plain_N, torch.zeros_like(plain_N, dtype=torch.bool)
    if loss.value_clip is not None:
        moved_N = (value_N - columns.old_value_N).clamp(-loss.value_clip, loss.value_clip)
        near_N = (columns.old_value_N + moved_N - columns.return_N).square()
        clipped_N = near_N > plain_N
        larger_N = torch.where(clipped_N, near_N, plain_N)
    weighted_N = 0.5 * columns.weight_N * larger_N
    tokens = ValueTokens(
        loss_N=weighted_N.detach(), value_N=value_N.detach(), return_N=columns.return_N, clipped_N=clipped_N.detach()
    )
    sums = [each_N.sum(dtype=torch.float64) for each_N in token_values(loss.summed(), tokens)]
    return weighted_N.sum(), torch.stack(sums), weighted_N.new_zeros(0)

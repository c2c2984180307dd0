"""The head that gives one number for each row, a critic's value or a reward model's score, and the value loss.

It computes in fp32 whatever the model computes in: bf16 has no room for small differences between values. As with
`lm_head.py`, the call goes through the head's own module, so that engines that gather parameters by its hooks see it.

N: rows (loss tokens), E: hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from backends.hf.score_layer import score_layer
from backends.token_metrics import ValueTokens, token_values
from backends.train.objective_losses import ObjectiveColumns
from specs.schema.algorithms.algorithm_tables import ValueLoss


@dataclass(frozen=True)
class ValueColumns:
    """Hold what the loss reads at each loss token besides the critic's own number."""

    weight_N: Tensor
    old_value_N: Tensor  # before the step's first update
    return_N: Tensor


@dataclass(frozen=True)
class ValueTask:
    """Return the head's values, [N], fp32."""


@dataclass(frozen=True)
class ValueLossTask:
    """The value loss: a `LossResult`."""

    columns: ValueColumns
    loss: ValueLoss


@dataclass(frozen=True)
class ScoreLossTask:
    """An objective of scores: a `LossResult`."""

    columns: ObjectiveColumns


ScoreTask = ValueTask | ValueLossTask | ScoreLossTask


class ScoreHead:
    """Installs itself as the forward of the model's score layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.linear: Any = score_layer(model)[1]
        self.linear.forward = self._forward  # type: ignore[method-assign, assignment]
        self._entered: Tensor | None = None

    def answer(self, hidden_NE: Tensor, task: ScoreTask | None) -> Any:
        """Answer the task; without one, return what enters the head, [N, E], fp32."""
        if task is None:
            self.linear(hidden_NE)
            return hidden_NE.float()
        return self.linear(hidden_NE, task)

    def by_own_forward(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return what enters the head in the model's own forward pass of some sequences, [B, S, E]; empty where it does
        not run."""
        self._entered = None
        self.model(**inputs)
        entered, self._entered = self._entered, None
        return torch.empty(1, 0) if entered is None else entered.float()

    def _forward(self, hidden_NE: Tensor, task: ScoreTask | None = None) -> Any:
        weight, bias = self.linear.weight, self.linear.bias
        if task is None:  # also the model's own forward pass
            self._entered = hidden_NE
            return F.linear(hidden_NE, weight, bias)
        value_N = F.linear(hidden_NE.float(), weight.float(), None if bias is None else bias.float())[:, 0]
        return answer_of(value_N, task)


def answer_of(value_N: Tensor, task: ScoreTask) -> Any:
    """Answer the task with the head's numbers."""
    if isinstance(task, ValueTask):
        return value_N
    if isinstance(task, ValueLossTask):
        return value_loss(value_N, task.columns, task.loss)
    columns, sums = task.columns.settled(value_N)
    by_value_N = torch.zeros_like(value_N) if columns.by_value_N is None else columns.by_value_N
    return (by_value_N * value_N).sum(), sums, value_N.new_zeros(0)


def value_loss(value_N: Tensor, columns: ValueColumns, loss: ValueLoss) -> tuple[Tensor, Tensor, Tensor]:
    """Σ weight · ½·max((V - R)², (V_old + clip(V - V_old, ±c) - R)²), without `value_clip` Σ weight · ½(V - R)²
    (Schulman et al. 2017, in their code; Engstrom et al. 2020). Where the clip decides, a token has no gradient.

    Returns it (scalar, with gradient), the sums that the table declares, and its maxima, of which there are none.
    """
    plain_N = (value_N - columns.return_N).square()
    larger_N, clipped_N = plain_N, torch.zeros_like(plain_N, dtype=torch.bool)
    if loss.value_clip is not None:
        moved_N = value_N - columns.old_value_N
        bounded_N = columns.old_value_N + moved_N.clamp(-loss.value_clip, loss.value_clip)
        near_N = (bounded_N - columns.return_N).square()
        clipped_N = (near_N > plain_N) & (moved_N.abs() > loss.value_clip)  # inside the band they differ by rounding
        larger_N = torch.where(clipped_N, near_N, plain_N)
    weighted_N = 0.5 * columns.weight_N * larger_N
    tokens = ValueTokens(
        loss_N=weighted_N.detach(), value_N=value_N.detach(), return_N=columns.return_N, clipped_N=clipped_N.detach()
    )
    sums = [each_N.sum(dtype=torch.float64) for each_N in token_values(loss.summed(), tokens)]
    return weighted_N.sum(), torch.stack(sums), weighted_N.new_zeros(0)

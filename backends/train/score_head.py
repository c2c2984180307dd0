"""The head that gives one number for each row: a critic's value, or a reward model's score.

It computes in fp32 whatever the model computes in: bf16 has no room for small differences between values. As with
`lm_head.py`, the call goes through the head's own module, so that engines that gather parameters by its hooks see it.

N: rows, E: hidden size.
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
from backends.train.value_loss import ValueColumns, value_loss
from specs.schema.algorithms.algorithm_tables import ValueLoss


@dataclass(frozen=True)
class ValueTask:
    """Return the head's values, [N], fp32."""


@dataclass(frozen=True)
class ValueLossTask:
    """The value loss: a `LossResult`."""

    columns: ValueColumns
    loss: ValueLoss


class ScoreHead:
    """Installs itself as the forward of the model's score layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.linear: Any = score_layer(model)[1]
        self.linear.forward = self._forward  # type: ignore[method-assign, assignment]
        self._entered: Tensor | None = None

    def answer(self, hidden_NE: Tensor, task: ValueTask | ValueLossTask | None) -> Any:
        """Answer the task; without one, return what enters the head, [N, E], fp32."""
        if task is None:
            self.linear(hidden_NE)
            return hidden_NE.float()
        return self.linear(hidden_NE, task)

    def by_own_forward(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return what enters the head in the model's own forward pass of one sequence, [T, E]; empty where it does not
        run."""
        self._entered = None
        self.model(**inputs)
        entered, self._entered = self._entered, None
        return torch.empty(0) if entered is None else entered[0].float()

    def _forward(self, hidden_NE: Tensor, task: ValueTask | ValueLossTask | None = None) -> Any:
        weight, bias = self.linear.weight, self.linear.bias
        if task is None:  # also the model's own forward pass
            self._entered = hidden_NE
            return F.linear(hidden_NE, weight, bias)
        value_N = F.linear(hidden_NE.float(), weight.float(), None if bias is None else bias.float())[:, 0]
        return value_N if isinstance(task, ValueTask) else value_loss(value_N, task.columns, task.loss)

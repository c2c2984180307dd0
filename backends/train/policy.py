"""The module that training runs: one call per micro-batch, one graph per call."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from backends.packed.packed_input import PackedInput
from backends.packed.row_ops import RowCopies, copy_rows
from backends.train.lm_head import Head, LogprobTask, LossTask
from backends.train.rms_norm import use_fast_norms


class Policy(nn.Module):
    """Backbone and head. This is the module that engines wrap: no part of the model may run outside its `forward`."""

    def __init__(self, model: PreTrainedModel, logits_chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.head = Head(model, logits_chunk_tokens)
        use_fast_norms(model)

    def forward(self, row: PackedInput, rows_N: RowCopies | None, task: LossTask | LogprobTask | None) -> Any:
        """The task at rows `rows_N` of a packed row: `LossResult` or log-probs [N]; without a task the logits [N, V];
        without rows the logits [T, V] of the model's own forward pass."""
        if rows_N is None:
            return self.model(**row.inputs).logits[0].float()
        hidden_TE = self.model.base_model(**row.inputs)[0][0]
        hidden_NE = copy_rows(hidden_TE, rows_N)
        if task is None:
            return self.head(hidden_NE)
        if isinstance(task, LogprobTask):
            return self.head.logprob(hidden_NE, task)
        return self.head.loss(hidden_NE, task)

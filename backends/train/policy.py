"""The module that training runs: one call per micro-batch, one graph per call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from backends.hf.score_layer import has_score_layer
from backends.packed.packed_input import PackedInput
from backends.packed.row_ops import RowCopies, copy_rows
from backends.train.lm_head import Head, LogprobTask, LossTask
from backends.train.rms_norm import use_fast_norms
from backends.train.score_head import ScoreHead, ValueLossTask, ValueTask

Task = LossTask | LogprobTask | ValueLossTask | ValueTask


class Policy(nn.Module):
    """Backbone and head. This is the module that engines wrap: no part of the model may run outside its `forward`."""

    def __init__(self, model: PreTrainedModel, table: Any, device: torch.device) -> None:
        """`table`: of any engine of this family, which all have `logits_chunk`."""
        super().__init__()
        self.model = model
        if has_score_layer(model):
            self.head: Any = ScoreHead(model)
        else:
            vocabulary = model.config.get_text_config().vocab_size
            self.head = Head(model, table.logits_chunk(vocabulary, on_gpu=device.type == "cuda"))
        use_fast_norms(model)

    def forward(self, row: PackedInput, rows_N: RowCopies | None, task: Task | None) -> Any:
        """The task at rows `rows_N` of a packed row: `LossResult`, log-probs or values [N]; without a task the logits
        [N, V]; without rows the logits [T, V] of the model's own forward pass. A score head gives in the place of
        logits what enters it, [N, E] and [T, E]."""
        if rows_N is None:
            return self.head.by_own_forward(row.inputs)
        hidden_TE = self.model.base_model(**row.inputs)[0][0]
        return self.head.answer(copy_rows(hidden_TE, rows_N), task)

"""The model of a trainer as its engine holds it, and the module that training runs: one graph per micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from backends.hf.matmul import use_fast_linears
from backends.hf.recompute import recompute_activations
from backends.hf.score_layer import backbone, has_score_layer
from backends.packed.packed_input import PackedInput
from backends.packed.row_ops import RowCopies, copy_rows
from backends.packed.state_layers import has_state_layers
from backends.train.activation_offload import ActivationOffload
from backends.train.hf_weights import aliases_of
from backends.train.liger import hold_kernels
from backends.train.lm_head import Head, LearningTask, LogprobTask
from backends.train.lora import Adapters
from backends.train.score_head import ScoreHead, ScoreTask
from specs.errors import ModelError
from specs.schema.engines.transformers_tables import OwnModules
from specs.schema.role_section import DType
from specs.wire.role_config import ModelConfig, TrainConfig

Make = Callable[[ModelConfig], PreTrainedModel]
Task = LearningTask | LogprobTask | ScoreTask


class Policy(nn.Module):
    """Backbone and head. This is the module that engines wrap: no part of the model may run outside its `forward`."""

    def __init__(self, model: PreTrainedModel, config: TrainConfig) -> None:
        super().__init__()
        self.model = model
        on_gpu = config.model.device != "cpu"
        table: Any = config.engine  # each engine of this family has a table with `logits_chunk`
        self.offload = ActivationOffload(torch.device(config.model.device)) if config.activation_offload else None
        if has_score_layer(model):
            self.head: Any = ScoreHead(model)
        else:
            self.head = Head(model, table.logits_chunk(model.config.get_text_config().vocab_size, on_gpu=on_gpu))
        asked = table.kernels if isinstance(table, OwnModules) else "torch"
        self.kernels = hold_kernels(model, asked, config.model.device)
        use_fast_linears(model, config.model.device)

    def forward(self, row: PackedInput, rows_N: RowCopies | None, task: Task | None) -> Any:
        """The task at rows `rows_N` of a packed row: `LossResult`, log-probs or values [N]; without a task the logits
        [N, V]; without rows the logits [B, S, V] of the model's own forward pass. A score head gives in the place
        of logits what enters it, [N, E] and [B, S, E]."""
        if rows_N is None:
            return self.head.by_own_forward(row.inputs)
        with nullcontext() if self.offload is None else self.offload.saving():
            hidden_TE = backbone(self.model)(**row.inputs)[0][0]
        return self.head.answer(copy_rows(hidden_TE, rows_N), task)


@dataclass(frozen=True)
class HeldModel:
    """`aliases`: those of the model before it got adapters, which is what the files on disk know."""

    model: PreTrainedModel
    aliases: Mapping[str, Sequence[str]]
    adapters: Adapters | None


def hold_model(config: TrainConfig, dtype: DType, make: Make) -> HeldModel:
    """Build with `make`, holding weights in `dtype`, and mark what learns. Raises ModelError."""
    computes = {"computes_in": config.model.dtype, "learns": config.optimizer is not None}
    model = make(config.model.model_copy(update={"dtype": dtype, **computes}))
    if config.sequence_parallel > 1 and has_state_layers(model):
        raise ModelError(
            f"{type(model).__name__} has layers that carry a state from token to token: ranks cannot share a row",
            hint=f"set {config.role}.sequence_parallel = 1",
        )
    if config.optimizer is None:
        model.requires_grad_(False)
    aliases = aliases_of(model)
    adapters = None
    if config.lora is not None:
        adapters = Adapters(model, config.lora, seed=config.model.seed, path=config.model.path)
    if config.gradient_checkpointing:
        recompute_activations(model, config.gradient_checkpointing)
    return HeldModel(model, aliases, adapters)

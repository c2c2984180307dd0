"""A rank's stage with its gradients and optimizer, and the schedule that runs micro-batches through all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn
from transformers import PreTrainedModel

from backends import activity
from backends.megatron.layouts import padded_vocabulary, part_of
from backends.megatron.model_group import ModelGroup
from backends.megatron.own_options import check_options, with_options
from backends.megatron.packed_stage import PackedRow, Stage, build_stage, transformer_config
from backends.megatron.sharded_weights import named_parameters, rank_slots
from backends.megatron.vocab_head import VocabPart
from backends.megatron.weight_map import ModelMap
from backends.packed.layout import PackedLayout
from backends.packed.packing import MicroBatch
from backends.packed.row_ops import RowCopies
from backends.packed.staging import Staging
from backends.train.lm_head import LossResult
from backends.weights.tensor_bytes import DTYPES
from specs.schema.engines.megatron_config import GRADIENTS, adam_settings
from specs.schema.engines.megatron_table import MegatronTable
from specs.wire.role_config import TrainConfig

Row = tuple[Tensor, PackedRow]  # token ids [1, T], and the row
RowAnswer = Callable[[Tensor, int], Any]  # hidden states [T, E] of a row, its number → what its head says
RowLoss = Callable[[Tensor, int], LossResult]


class MegatronModel:
    """A stage; its gradients are summed over the data ranks once, when `sum_gradients` is called."""

    def __init__(
        self, model: PreTrainedModel, model_map: ModelMap, config: TrainConfig, table: MegatronTable, group: ModelGroup
    ) -> None:
        self.group, self.table = group, table
        dtype = DTYPES[config.model.dtype]
        check_options(config)
        configs = [transformer_config(model, model_map, table, config, stage) for stage in group.own_stages]
        self.config = configs[0]
        positions = config.model.max_sequence_tokens
        self.chunks: list[Stage] = [
            build_stage(model, model_map, own, stage=stage, positions=positions)
            for own, stage in zip(configs, group.own_stages, strict=True)
        ]
        self._mark_weights(model_map)
        for stage in self.chunks:
            stage.train()  # recomputes activations then; there is no dropout
        chunk = table.logits_chunk(model_map.vocabulary, on_gpu=torch.cuda.is_available())
        rows = padded_vocabulary(model_map.vocabulary, group.tensor_ranks)
        columns = part_of(rows, group.tensor_rank, group.tensor_ranks)
        real = min(columns.stop, model_map.vocabulary) - columns.start
        self.vocabulary = VocabPart(group.tensor, columns.start, real, chunk)
        self.wrapped: list[Any] = list(self.chunks)
        self.optimizer: Any = None
        if config.optimizer is None:
            for stage in self.chunks:
                stage.requires_grad_(False)
            return
        ddp = with_options(DistributedDataParallelConfig, GRADIENTS, table.megatron)
        self.wrapped = [
            DistributedDataParallel(own, ddp, stage, disable_bucketing=stage is not self.chunks[0])
            for own, stage in zip(configs, self.chunks, strict=True)
        ]
        # A micro-batch that another follows sends nothing.
        no_sync = [wrapped.no_sync for wrapped in self.wrapped]
        self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        precision = {"bf16": dtype == torch.bfloat16, "params_dtype": dtype}
        adam = with_options(OptimizerConfig, {**adam_settings(config.optimizer), **precision}, table.megatron)
        self.optimizer = get_megatron_optimizer(adam, self.wrapped, use_gloo_process_groups=False)
        for decayed in self.optimizer.param_groups:  # what its scheduler would do; vectors decay by 0 times as much
            decayed["weight_decay"] = config.optimizer.weight_decay * decayed["wd_mult"]

    def _mark_weights(self, model_map: ModelMap) -> None:
        """Mark parameters as Megatron does where it draws weights itself: others than sharded ones count once in the
        norm, on the first tensor rank. Experts always have data ranks of their own: theirs are not those of the rest
        of the model even with one expert rank, where an expert is sharded across fewer ranks than that."""
        parameters: dict[str, Any] = named_parameters(self.chunks)
        for slot in rank_slots(model_map, self.group):
            parameters[slot.parameter].tensor_model_parallel = slot.shard_dim is not None
            if slot.rows:
                parameters[slot.parameter].allreduce = False

    @property
    def head(self) -> Stage:
        """The model's last layers and its head, on the last stage."""
        return self.chunks[-1]

    # ── micro-batches ─────────────────────────────────────────────────────────────────────────────

    def packed(self, micro: MicroBatch, staging: Staging) -> tuple[Row, RowCopies]:
        """A micro-batch as the stages take it, of this rank's part of the row, and how the rows whose targets count are
        taken from what comes out."""
        whole, context = self.divisible(micro), self.group.context
        own_T = context.own_rows(whole.num_tokens)
        row = PackedRow(
            qkv_format="packed",
            layout=PackedLayout(whole.lengths, self.group.device, whole.parents, staging.put),
            position_T=staging.put(whole.positions_T[own_T]),
            context=context,
        )
        copies = RowCopies(micro.hidden_N, len(own_T), staging.put)
        return (staging.put(whole.tokens_T[own_T])[None], row), copies

    def divisible(self, micro: MicroBatch) -> MicroBatch:
        """With a segment of its own where its row lacks tokens to be cut across context ranks, and by them across
        tensor ranks."""
        ranks = self.group.tensor_ranks if self.table.tensor_sequence_parallel else 1
        return micro.padded(-micro.num_tokens % (self.group.context.size * ranks))

    def rows_for(self, count: int) -> int:
        """Rows that the schedule takes where there are `count`: ranks with several groups of layers take turns in whole
        rounds."""
        return count if len(self.chunks) == 1 else -(-count // self.group.stages) * self.group.stages

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Row], answer: RowAnswer) -> list[Any]:
        """Results of `answer` on the last stage, row by row; nothing on the others."""
        if not rows:
            return []

        def results(hidden_TE: Tensor, number: int, **_: Any) -> Any:
            return answer(hidden_TE, number)

        return self._schedule(rows, results, forward_only=True, collect_non_loss_data=True)

    def learn(self, rows: Sequence[Row], row_loss: RowLoss) -> list[Any]:
        """Add each row's gradients; what `row_loss` says besides the loss, as of `evaluate`."""
        if not rows:
            return []

        def results(hidden_TE: Tensor, number: int) -> tuple[Tensor, Tensor, Any]:
            loss, *metrics = row_loss(hidden_TE, number)
            return loss, torch.ones((), dtype=torch.int), metrics  # Megatron counts tokens, which nothing here reads

        return self._schedule(rows, results, forward_only=False)

    def _schedule(self, rows: Sequence[Row], results: Callable[..., Any], **how: Any) -> list[Any]:
        def forward_step(numbered: Iterator[tuple[int, Row]], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            number, (token_ids, row) = next(numbered)
            hidden_T1E: Tensor = model(token_ids, None, None, packed_seq_params=row)
            if model is self.wrapped[-1]:
                activity.count("micro-batch")

            def of_last_stage(hidden_T1E: Tensor, **more: Any) -> Any:
                if self.table.tensor_sequence_parallel:  # the head's gradient is whole on every tensor rank
                    hidden_T1E = gather_from_sequence_parallel_region(hidden_T1E, tensor_parallel_output_grad=False)
                return results(hidden_T1E[:, 0], number, **more)

            return hidden_T1E, of_last_stage

        found: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(enumerate(rows)) for _ in self.wrapped],
            model=self.wrapped,
            num_microbatches=len(rows),
            seq_length=rows[0][0].shape[1],  # each row tells its own
            micro_batch_size=1,
            **how,
        )
        return found

    # ── learning ──────────────────────────────────────────────────────────────────────────────────

    def sum_gradients(self) -> float:
        """Over the data ranks, and of weights that several ranks hold; returns the norm of all. A collective."""
        finalize_model_grads(self.wrapped)
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def step(self, lr: float, clip: float | None) -> None:
        """Step AdamW with the gradients of `sum_gradients` times `clip`; data ranks exchange what they stepped."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            if clip is not None:
                for main in group["params"]:
                    if main.grad is not None:
                        main.grad.mul_(clip)
        self.optimizer.step_with_ready_grads()

    def zero_gradients(self) -> None:
        for wrapped in self.wrapped:
            wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

    @property
    def overlaps(self) -> bool:
        """Whether gradients are summed over the data ranks during the backward pass: all must have one."""
        return self.optimizer is not None and bool(self.wrapped[0].ddp_config.overlap_grad_reduce)

    def options(self, names: Iterable[str]) -> dict[str, Any]:
        """Values of options, read back from Megatron's own configurations."""
        held = [self.config]
        if self.optimizer is not None:
            held += [self.wrapped[0].ddp_config, *(each.config for each in self.optimizer.chained_optimizers)]
        return {name: next(getattr(each, name) for each in held if hasattr(each, name)) for name in names}

    def buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        """Memory of the weights that the forward pass reads, and of gradients."""
        weights = [parameter.data for stage in self.chunks for parameter in stage.parameters()]
        if self.optimizer is None:
            return weights, []
        found = [buffer for each in self.wrapped for buffer in (*each.buffers, *each.expert_parallel_buffers)]
        return weights, [each.grad_data for each in found]

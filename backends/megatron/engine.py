"""The `megatron` train engine: Megatron-core's GPT model on tensor, pipeline and data ranks.

What it computes is what `ddp` computes: losses divide by global counts and gradients are summed over the data ranks,
AdamW decays matrices alone, and a step whose gradient norm is not finite changes nothing. The Hugging Face model exists
without memory: it says the names, shapes and rotary frequencies that Megatron's parameters are filled and exported by.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from backends.hf.hf_model import build_without_memory, describe
from backends.hf.score_layer import score_names
from backends.megatron import vocab_head
from backends.megatron.megatron_start import has_fused_norms, import_megatron, start_megatron, stop_megatron
from backends.megatron.model_group import ModelGroup
from backends.megatron.sharded_weights import MOMENTS, Kind, ShardedWeights
from backends.megatron.weight_map import ModelMap
from backends.packed.layout import PackedLayout
from backends.packed.packing import MicroBatch, MicroBatches
from backends.packed.row_ops import copy_rows
from backends.packed.staging import Staging
from backends.protocol import OnMeta, Rank
from backends.train.adamw import set_steps
from backends.train.engine import NOTHING, HfTrainEngine, LossMetrics
from backends.train.hf_weights import stream_into
from backends.train.lm_head import LearningTask, LogprobTask
from backends.train.policy import Policy, Task, hold_model
from backends.train.role_group import most_of_any_rank
from backends.train.score_head import ScoreTask, answer_of
from backends.train.tensor_shards import Shard, TensorKind, whole
from backends.train.verify_packing import verify_own_packing
from backends.ulysses.sequence_group import SequenceGroup
from backends.weights.tensor_bytes import DTYPES, named_weights
from specs.schema.algorithms.algorithm import AnyLoss
from specs.schema.engines.megatron_table import MegatronTable, mesh_axes
from specs.schema.role_section import DType
from specs.wire.as_built import ModelBuilt
from specs.wire.batch import Batch
from specs.wire.bodies import LossScale
from specs.wire.role_config import ModelConfig, TrainConfig

if TYPE_CHECKING:  # it imports Megatron-core
    from backends.megatron.megatron_model import Row

_ATTENTION = f"{PackedLayout.__module__}.{PackedLayout.attend.__qualname__}"


class MegatronTrainEngine(HfTrainEngine):
    """A Llama or Qwen model, sharded across tensor ranks and pipeline stages."""

    def __init__(self, config: TrainConfig, rank: Rank) -> None:
        super().__init__(config, rank)
        config, table = self.config, config.engine
        assert isinstance(table, MegatronTable)
        self.table = table
        from backends.megatron.megatron_model import MegatronModel

        held = self._hold_model(_without_memory)
        self.policy = Policy(held.model, config)
        self.group = ModelGroup(self.device)
        self.sharers = self.group.model if self.group.model.size() > 1 else None
        fused = has_fused_norms(table, config.model.dtype)
        self.map = ModelMap.of(held.model, config.model.path, fused_norms=fused)
        self.core = MegatronModel(held.model, self.map, config, table, self.group)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in named_weights(held.model).items()}
        self.weights = ShardedWeights(self.core.chunks, self.core.optimizer, self.map, self.shapes, self.group)
        self.weights.make_moments()
        stream_into(config.model, held.aliases, self.weights.wanted(), score_names(held.model))
        verify_own_packing(
            self._logits,
            "Megatron's GPT model",
            vocabulary=self.map.vocabulary,
            dtype=DTYPES[config.model.dtype],
            scores=self.map.scores,
        )

    def _join_ranks(self) -> None:
        config = self.config
        assert isinstance(config.engine, MegatronTable)
        start_megatron(self.rank, config.model.device, config.engine, config.model.seed)

    @classmethod
    def _held_dtype(cls, config: TrainConfig) -> DType:
        """Megatron makes the fp32 masters by itself."""
        return config.model.dtype

    @classmethod
    def import_code(cls, config: TrainConfig) -> None:
        super().import_code(config)
        import_megatron(config.model.device)

    @classmethod
    def on_meta(cls, config: TrainConfig, rank: Rank) -> OnMeta:
        """Describe the model that its parameters are made of; Megatron-core checks options that the spec adds."""
        assert isinstance(config.engine, MegatronTable)
        held = hold_model(config, cls._held_dtype(config), _without_memory)
        ModelMap.of(held.model, config.model.path)
        if config.engine.megatron:
            import_megatron(config.model.device)
            from backends.megatron.own_options import check_options

            check_options(config)
        about = describe(held.model, config.model, checksum=False).model_copy(update={"attn_function": _ATTENTION})
        head = () if config.model.head == "lm" else ("new_head",)
        return OnMeta(about, not_seen=("mesh", "options", *head))

    def _built(self) -> ModelBuilt:
        group = self.group
        experts = (group.expert_ranks, group.expert_tensor.size())
        mesh = mesh_axes(group.replicas, group.stages, group.tensor_ranks, experts, group.context.size)
        wanted = self.config.engine.library_config(self.config.model.dtype, self.config.optimizer, str(self.device))
        return self._described(
            self._everywhere(list(self.shapes), computed=True),
            attn_function=_ATTENTION,
            mesh=mesh,
            options=self.core.options({**wanted["megatron"], "transformer_impl": None}),
        )

    # ── computing ─────────────────────────────────────────────────────────────────────────────────

    def _part(self, micro: MicroBatch) -> MicroBatch:
        return self.core.divisible(micro).part_of(self.group.context)

    def _rows(
        self, micros: Sequence[MicroBatch], count: int, task_of: Callable[[MicroBatch, Staging], Task | None]
    ) -> tuple[list[Row], Callable[[Tensor, int], Any]]:
        """Rows for the schedule, and what gives the head's answer from hidden states [T, E] and the number of a row.
        `count`: rows that the ranks make; what `micros` lack of it, and of what the schedule takes, computes nothing of
        value."""
        staging = Staging(self.device)
        every = [*micros, *[NOTHING] * (self.core.rows_for(count) - len(micros))]
        made = [self.core.packed(micro, staging) for micro in every]
        tasks = [task_of(micro, staging) for micro in every]
        staging.send()

        def answer(hidden_TE: Tensor, number: int) -> Any:
            return self._answer(copy_rows(hidden_TE, made[number][1]), tasks[number])

        return [row for row, _ in made], answer

    @torch.no_grad()
    def _head_column(
        self, micros: MicroBatches, columns: int, task_of: Callable[[MicroBatch, Staging], Task]
    ) -> NDArray[np.float32]:
        own = list(micros)
        found = self.core.evaluate(*self._rows(own, micros.rounds, task_of))
        column = torch.zeros(columns, device=self.device)
        for micro, value_N in zip(own, found, strict=False):  # the last stage alone has results
            column[torch.from_numpy(micro.column_N)] = value_N
        return self.group.from_last_stage(column).cpu().numpy()

    def _gradients_of(self, batch: Batch, micros: MicroBatches, loss: AnyLoss, scale: LossScale) -> Sequence[float]:
        # Gradients of nothing, where other ranks wait for them.
        count = max(micros.rounds, int(self.core.overlaps))
        rows, answer = self._rows(list(micros), count, self._loss_tasks(batch, loss, scale))
        if torch.is_grad_enabled():
            self.gradients_are_zero = self.gradients_are_zero and not rows
            results = self.core.learn(rows, answer)
        else:
            results = [found for _, *found in self.core.evaluate(rows, answer)]
        metrics = LossMetrics(loss, self.device)
        if self.group.tensor_rank == 0:  # of the last stage, which alone has results: the others say the same
            for sums, maxima in results[: len(micros)]:
                metrics.add(sums, maxima)
        return metrics.read()

    def _answer(self, hidden_NE: Tensor, task: Task | None) -> Any:
        """Return what the head computes, on the last stage; the same on all its tensor ranks. No task: logits, or, of a
        model that gives scores, what enters its head."""
        stage = self.core.head
        if isinstance(task, ScoreTask):
            value_N = functional.linear(hidden_NE.float(), stage.score.weight.float())[:, 0]
            return answer_of(value_N, task)
        if task is None and self.map.scores:
            return hidden_NE.float()
        weight_VE, part = stage.head_weight(), self.core.vocabulary
        if isinstance(task, LogprobTask):
            return vocab_head.logprobs(hidden_NE, weight_VE, task, part)
        if isinstance(task, LearningTask):
            return vocab_head.loss(hidden_NE, weight_VE, task, part)
        padded_NV = functional.linear(hidden_NE, weight_VE).float()
        return torch.cat(self.group.of_all_tensor_ranks(padded_NV), dim=1)[:, : self.map.vocabulary].contiguous()

    @torch.no_grad()
    def _logits(self, micro: MicroBatch) -> Tensor:
        """At `hidden_N` of a row, on every rank; of a model that gives scores, what enters its head."""
        rows = len(micro.hidden_N)
        part = self._part(replace(micro, column_N=np.arange(rows)))
        found = self.core.evaluate(*self._rows([part], 1, lambda *_: None))
        width = self.core.config.hidden_size if self.map.scores else self.map.vocabulary
        logits_NV = torch.zeros(rows, width, device=self.device)
        if found:
            logits_NV[torch.from_numpy(part.column_N)] = found[0]
        return self.group.from_last_stage(logits_NV)

    def _row_group(self) -> SequenceGroup:
        return self.group.context

    def _rounds(self, micro_batches: int) -> int:
        if not self.group.replicas_meet:
            return micro_batches
        return int(most_of_any_rank(micro_batches, self.device, self.group.data))

    # ── learning ──────────────────────────────────────────────────────────────────────────────────

    def _sum_gradients(self) -> float:
        return self.core.sum_gradients()

    def _step(self, lr: float, clip: float | None) -> None:
        self.core.step(lr, clip)

    def _zero_gradients(self) -> None:
        self.core.zero_gradients()

    # ── weights ───────────────────────────────────────────────────────────────────────────────────

    def _weight_kinds(self) -> Mapping[str, TensorKind]:
        return {name: (shape, self.weights.dtype) for name, shape in self.shapes.items()}

    def _full_weights(self, names: Collection[str], sent: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
        """Return the weights as the forward pass reads them: each is the cast of the master, to the bit, and costs no
        exchange of masters."""
        chosen = [name for name in self.shapes if name in names]
        computes = DTYPES[self.config.model.dtype]
        computed = self.weights.dtype == computes or all(sent.get(name) == computes for name in chosen)
        return self._everywhere(chosen, computed=computed)

    def _everywhere(self, names: Sequence[str], *, computed: bool) -> Iterator[tuple[str, Tensor]]:
        """Weights whole on every rank, one after another: from their stage to the others."""
        here = self.weights.names_here(names)
        mine = self.weights.whole(here, computed=computed)
        dtype = DTYPES[self.config.model.dtype] if computed else self.weights.dtype
        for name in names:
            stage = self.map.stage_of(name, self.group.stages_of_model) % self.group.stages
            if stage == self.group.stage:
                _, tensor = next(mine)
            else:
                tensor = torch.empty(self.shapes[name], dtype=dtype, device=self.device)
            yield name, self.group.from_stage(stage, tensor)

    def _weight_shards(self) -> Iterator[Shard]:
        return self.weights.wanted()

    def _moment_shards(self) -> Iterator[Shard]:
        for kind in MOMENTS if self.core.optimizer is not None else ():
            yield from self.weights.wanted(kind)

    def _written_weights(self) -> Iterator[Shard]:
        return self._owned("weight")

    def _written_moments(self) -> Iterator[Shard]:
        return (shard for kind in MOMENTS for shard in self._owned(kind))

    def _owned(self, kind: Kind) -> Iterator[Shard]:
        """Whole tensors of this stage; its ranks take turns in saving them, from host memory."""
        own = self.group.data.rank() * self.group.tensor_ranks + self.group.tensor_rank
        ranks = self.group.data.size() * self.group.tensor_ranks
        here = self.weights.names_here(list(self.shapes))
        for number, (name, tensor) in enumerate(self.weights.whole(here, kind)):
            if number % ranks == own:
                suffix = "" if kind == "weight" else f".{kind}"
                yield whole(f"{name}{suffix}", tensor.cpu().contiguous())

    def _learned(self) -> Sequence[str]:
        return list(self.shapes) if self.core.optimizer is not None else []

    def _loaded(self, optimizer_steps: int) -> None:
        for adamw in self.weights.adamw:
            set_steps(adamw, optimizer_steps)

    # ── memory ────────────────────────────────────────────────────────────────────────────────────

    def _memory(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        weights, gradients = self.core.buffers()
        return weights + self.weights.state_tensors(), gradients

    def close(self) -> None:
        stop_megatron()


def _without_memory(config: ModelConfig) -> PreTrainedModel:
    """Its attention is never called: Megatron's layers call `PackedLayout`."""
    return build_without_memory(config.model_copy(update={"attn_implementation": "sdpa"}))

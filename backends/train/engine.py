"""Base of all train engines for Hugging Face models: forward and loss, checkpoints and export.

An engine on top of it (`backends/ddp`, `backends/fsdp2`, `backends/zero`) says how parameters, gradients and optimizer
state are held: it wraps `policy`, runs the backward pass, steps, and names its memory as shards.

T: tokens of a micro-batch's row, N: its loss tokens, E: hidden size, V: vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backends import activity
from backends.hf.adapter_names import base_name, is_adapter
from backends.hf.hf_model import build_without_memory, decoder_size, describe, import_code
from backends.hf.score_layer import has_score_layer, score_names
from backends.packed.packed_input import PackedInput, can_share_prompts, packed_row
from backends.packed.packing import (
    Budget,
    MicroBatch,
    MicroBatches,
    Packing,
    by_token,
    loss_weight_T,
    pack,
    unit_counts,
    update_counts,
)
from backends.packed.row_ops import RowCopies
from backends.packed.staging import Staging
from backends.packed.state_layers import prove_gradients
from backends.protocol import GreedyCompletion, OnMeta, Rank, StepResult, TrainEngine, Weight, WeightSpec
from backends.token_metrics import TokenColumns
from backends.train import weight_export
from backends.train.adamw import MOMENTS
from backends.train.hf_weights import stream_into
from backends.train.lm_head import LogprobTask, LossResult, LossTask, ObjectiveTask
from backends.train.lora import Adapters
from backends.train.losses import sequence_columns
from backends.train.objective_losses import ObjectiveBatch
from backends.train.offload import Offloader, storages_of
from backends.train.policy import HeldModel, Make, Policy, Task, hold_model
from backends.train.rng import read_rng, write_rng
from backends.train.role_group import (
    heaviest_of_any_rank,
    join_group,
    leave_group,
    most_of_any_rank,
    pretended_group,
)
from backends.train.score_head import ScoreLossTask, ValueColumns, ValueLossTask, ValueTask
from backends.train.tensor_shards import Shard, ShardReader, TensorKind, write_shards
from backends.train.trainer_state import TrainerState, lr_at
from backends.train.verify_packing import row_logits, verify_packing
from backends.ulysses.sequence_group import ALONE, SequenceGroup, sequence_group
from backends.ulysses.shared_batch import share_batch, sum_of_ranks
from backends.weights.checksum import checksum_bytes, checksum_weights
from backends.weights.tensor_bytes import DTYPES, tensor_bytes
from specs.schema.algorithms.algorithm import AnyLoss, Loss
from specs.schema.algorithms.algorithm_tables import ValueLoss
from specs.schema.mesh import SEQUENCE
from specs.schema.objectives import Objective
from specs.schema.role_section import DType
from specs.schema.spec import WeightForm
from specs.wire.as_built import ModelBuilt
from specs.wire.batch import Batch
from specs.wire.bodies import LossScale
from specs.wire.role_config import TrainConfig

# Computed by a rank without work while other ranks still need its parameters; by each for itself.
NOTHING = MicroBatch(
    lengths=[2],
    parents=[-1],
    tokens_T=np.zeros(2, dtype=np.int64),
    positions_T=np.arange(2),
    hidden_N=np.zeros(1, dtype=np.int64),
    target_N=np.zeros(1, dtype=np.int64),
    column_N=np.zeros(1, dtype=np.int64),
)


class LossMetrics:
    """Sum the metrics of a loss over micro-batches, on the device."""

    def __init__(self, loss: AnyLoss, device: torch.device) -> None:
        self._sums = torch.zeros(len(loss.summed()), dtype=torch.float64, device=device)
        self._maxima = torch.full((len(loss.maxima()),), -torch.inf, device=device)

    def add(self, sums: Tensor, maxima: Tensor) -> None:
        self._sums += sums
        self._maxima = torch.maximum(self._maxima, maxima)

    def read(self) -> list[float]:
        """Sums, then maxima, of which those over no token are 0. The only copy from the device."""
        self._maxima.masked_fill_(self._maxima == -torch.inf, 0.0)
        read: list[float] = torch.cat([self._sums, self._maxima.double()]).tolist()
        return read


class HfTrainEngine(TrainEngine):
    """Any Hugging Face causal language model, or one of its family that gives values or scores. A subclass sets
    `policy` and implements the hooks below."""

    counts_progress = True
    policy: Policy
    adapters: Adapters | None = None

    def __init__(self, config: TrainConfig, rank: Rank) -> None:
        learns = {"learns": config.optimizer is not None}
        self.config = config.model_copy(update={"model": config.model.model_copy(update=learns)})
        self.rank = rank
        self.device = torch.device(config.model.device)
        self._join_ranks()
        self.sequences = sequence_group(rank, config.sequence_parallel)
        self.sharers = self.sequences.group  # ranks that compute the same samples; None: this one alone
        self.state = TrainerState()
        self.offloading = Offloader()
        self.gradients_are_zero = True

    @classmethod
    def build(cls, config: TrainConfig, rank: Rank) -> HfTrainEngine:
        torch.manual_seed(config.model.seed + rank.rank)  # for a user's own loss: nothing else draws from it
        return cls(config, rank)

    def _join_ranks(self) -> None:
        """Join the role's process group, where there is more than one rank."""
        join_group(self.rank, self.config.model.device)

    @classmethod
    @abstractmethod
    def _held_dtype(cls, config: TrainConfig) -> DType:
        """Precision in which this engine first holds the model's weights."""

    def _hold_model(self, make: Make) -> HeldModel:
        held = hold_model(self.config, self._held_dtype(self.config), make)
        self.adapters = held.adapters
        return held

    @classmethod
    def import_code(cls, config: TrainConfig) -> None:
        import_code(config.model)

    @classmethod
    def on_meta(cls, config: TrainConfig, rank: Rank) -> OnMeta:
        """Build as `__init__` does, up to where memory is needed."""
        held = hold_model(config, cls._held_dtype(config), build_without_memory)
        policy = Policy(held.model, config)
        on_meta = cls._wrapped_on_meta(policy, config, rank)
        if config.sequence_parallel > 1:
            with pretended_group(rank):
                group = sequence_group(rank, config.sequence_parallel)
                on_meta = replace(on_meta, model=_on_sequences(on_meta.model, group))
        found = {"activation_offload": config.activation_offload, **_kernels_of(policy)}
        on_meta = replace(on_meta, model=on_meta.model.model_copy(update=found))
        return on_meta if config.model.head == "lm" else replace(on_meta, not_seen=(*on_meta.not_seen, "new_head"))

    @classmethod
    def _wrapped_on_meta(cls, policy: Policy, config: TrainConfig, rank: Rank) -> OnMeta:
        """Wrap `policy`, whose parameters have no memory, as far as that goes, and say what it is."""
        return OnMeta(describe(policy.model, config.model, checksum=False))

    def built(self) -> ModelBuilt:
        about = _on_sequences(self._built(), self.sequences)
        offloaded = self.policy.offload is not None
        about = about.model_copy(update={"activation_offload": offloaded, **_kernels_of(self.policy)})
        if not has_score_layer(self.policy.model):
            return about
        weights = [weight for _, weight in self._full_weights(score_names(self.policy.model), {})]
        return about.model_copy(update={"new_head": not any(bool(weight.any()) for weight in weights)})

    @abstractmethod
    def _built(self) -> ModelBuilt:
        """Describe the model, its head aside. All ranks call it together."""

    def _described(self, weights: Iterable[tuple[str, Tensor]], **found: Any) -> ModelBuilt:
        """Describe a model that no rank holds whole, with what is `found` of it. `weights`: whole, one after another,
        as the forward pass reads them; all ranks iterate together."""
        digests = [(base_name(name), checksum_bytes(tensor_bytes(w))) for name, w in weights if not is_adapter(name)]
        found["weights_checksum"] = checksum_weights(digests)
        return describe(self.policy.model, self.config.model, checksum=False).model_copy(update=found)

    def _verify(self) -> None:
        """Prove that what was built computes what transformers' model does. All ranks call it together. Raises
        ModelError."""
        model, dtype = self.policy.model, DTYPES[self.config.model.dtype]
        self.policy.kernels.prove(model, self.device, dtype)
        verify_packing(self._run, model, self.device, dtype, self.sequences)
        if self.config.optimizer is not None:
            prove_gradients(model, self.device)

    def _read_weights(self, aliases: Mapping[str, Sequence[str]]) -> None:
        """Fill this rank's memory: the model's own weights from disk, adapters as they start. `aliases`: those of the
        model before it got adapters."""
        shards = list(self._weight_shards())
        own = (replace(shard, name=base_name(shard.name)) for shard in shards if not is_adapter(shard.name))
        stream_into(self.config.model, aliases, own, score_names(self.policy.model))
        if self.adapters is not None:
            self.adapters.fill(shard for shard in shards if is_adapter(shard.name))

    # ── what an engine says about itself ──────────────────────────────────────────────────────────

    # Whether a forward pass needs all ranks: each makes as many as any of them, and some compute nothing of value.
    in_step: ClassVar[bool] = False

    def _rounds(self, micro_batches: int) -> int:
        """Return the forward passes that this rank makes for its `micro_batches`."""
        return int(most_of_any_rank(micro_batches, self.device)) if self.in_step else micro_batches

    def _run(self, row: PackedInput, rows_N: RowCopies | None, task: Task | None) -> Any:
        """`policy`, through whatever the engine wraps around it."""
        return self.policy(row, rows_N, task)

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        """Add to the gradients. `last`: no micro-batch of this `forward_backward` follows."""
        loss.backward()

    @abstractmethod
    def _weight_kinds(self) -> Mapping[str, TensorKind]:
        """Global shape and dtype of every weight (Hugging Face name; a tied one under its first; master dtype)."""

    @abstractmethod
    def _full_weights(self, names: Collection[str], sent: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of `names` whole, in the order of `_weight_kinds`, one at a time; all ranks iterate
        together. That order is the model's own: a layer's adapter follows its weight. `sent`: to what some are cast
        later. An engine that gathers casts each rank's part, so that half as much travels: to the bit the same."""

    @abstractmethod
    def _weight_shards(self) -> Iterator[Shard]:
        """This rank's memory of every weight (the master where there is one)."""

    @abstractmethod
    def _moment_shards(self) -> Iterator[Shard]:
        """This rank's memory of Adam's moments: `<weight>.exp_avg` and `<weight>.exp_avg_sq`. Nothing for a role that
        does not learn. All of them exist before the first step."""

    @abstractmethod
    def _loaded(self, optimizer_steps: int) -> None:
        """The shards were filled from a checkpoint made after that many optimizer steps."""

    # ── computing ─────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _packing(self) -> Packing:
        """Make the micro-batches of the group's batch, as this rank computes them."""
        group, model = self.sequences, self.policy.model
        budget = Budget(self.config.micro_batch_tokens, group.size, f"{self.config.role}.micro_batch_tokens")
        heaviest = (lambda work: heaviest_of_any_rank(work, self.device)) if self.in_step else None
        return Packing(budget, can_share_prompts(model), decoder_size(model), self._rounds, self._part, heaviest)

    def _part(self, micro: MicroBatch) -> MicroBatch:
        """Return what this rank computes of a micro-batch."""
        return micro.part_of(self.sequences)

    def _rounds_of(
        self, micros: MicroBatches, task_of: Callable[[MicroBatch, Staging], Task]
    ) -> Iterator[tuple[MicroBatch, PackedInput, RowCopies, Task]]:
        """Yield each round's micro-batch, `NOTHING` where other ranks have more, and what `_run` takes of it. Each is
        made when it is asked for."""
        for number in range(micros.rounds):
            micro = micros[number] if number < len(micros) else NOTHING
            staging = Staging(self.device)
            row, rows_N = packed_row(self.policy.model, staging, micro, ALONE if micro is NOTHING else self.sequences)
            task = task_of(micro, staging)
            staging.send()
            yield micro, row, rows_N, task
            activity.count("micro-batch")

    def forward(self, batch: Batch, *, adapters: bool = True) -> NDArray[np.float32]:
        self._check_head(scores=False)
        assert adapters or self.adapters is not None, "this model has no adapters"
        with nullcontext() if adapters or self.adapters is None else self.adapters.off():
            shared = share_batch(batch, self.sharers, self.device)
            return self._logprobs(shared.batch)[shared.own_T]

    def _logprobs(self, batch: Batch) -> NDArray[np.float32]:
        def task(micro: MicroBatch, staging: Staging) -> LogprobTask:
            return LogprobTask(staging.put(micro.target_N), self.config.temperature)

        return self._head_column(self._packing.micro_batches(batch), batch.num_tokens, task)

    def values(self, batch: Batch) -> NDArray[np.float32]:
        self._check_head(scores=True)
        shared = share_batch(batch, self.sharers, self.device)
        micros = self._packing.micro_batches(shared.batch)
        return self._head_column(micros, shared.batch.num_tokens, lambda *_: ValueTask())[shared.own_T]

    def scores(self, batch: Batch) -> NDArray[np.float32]:
        self._check_head(scores=True)
        shared = share_batch(batch, self.sharers, self.device)
        micros = self._packing.last_token_micro_batches(shared.batch)
        return self._head_column(micros, len(shared.batch), lambda *_: ValueTask())[shared.own_B]

    @torch.no_grad()
    def _head_column(
        self, micros: MicroBatches, columns: int, task_of: Callable[[MicroBatch, Staging], Task]
    ) -> NDArray[np.float32]:
        """Return what the head computes at the rows of each micro-batch, in their columns; 0 in the others. Of the
        whole group."""
        column = np.zeros(columns, dtype=np.float32)
        for micro, row, rows_N, task in self._rounds_of(micros, task_of):
            with row.attending():
                found_N: Tensor = self._run(row, rows_N, task)
            if micro is not NOTHING:
                column[micro.column_N] = found_N.cpu().numpy()
        return sum_of_ranks(column, self.sequences.group, self.device)

    def _check_head(self, *, scores: bool) -> None:
        """Raise ModelError unless the head gives one number for each token (`scores`), or logits."""
        if has_score_layer(self.policy.model) != scores:
            raise self._no_scalar_head() if scores else self._no_lm_head()

    def forward_backward(self, batch: Batch, loss: AnyLoss, scale: LossScale) -> Mapping[str, float]:
        batch.require(loss.columns, "update")
        of_scores = isinstance(loss, Objective) and loss.of_scores
        self._check_head(scores=of_scores or isinstance(loss, ValueLoss))
        shared = share_batch(batch, self.sharers, self.device).batch
        packing = self._packing
        micros = packing.last_token_micro_batches(shared) if of_scores else packing.micro_batches(shared)
        read = self._gradients_of(shared, micros, loss, scale)
        ranks, own = (1, 0) if self.sharers is None else (self.sharers.size(), self.sharers.rank())
        return {
            **dict(zip((*loss.summed(), *loss.maxima()), read, strict=True)),
            **update_counts(batch, micros, ranks, first=own == 0),
            **(unit_counts(shared) if own == 0 else {}),
        }

    def evaluate(self, batch: Batch, loss: AnyLoss, scale: LossScale) -> Mapping[str, float]:
        with torch.no_grad():
            return self.forward_backward(batch, loss, scale)

    def _gradients_of(self, batch: Batch, micros: MicroBatches, loss: AnyLoss, scale: LossScale) -> Sequence[float]:
        """Sums and maxima over the loss tokens that this rank's rows predict; a maximum over none is 0. No gradients
        where torch keeps none."""
        learns = torch.is_grad_enabled()
        task_of = self._loss_tasks(batch, loss, scale)
        metrics = LossMetrics(loss, self.device)
        for number, (micro, row, rows_N, task) in enumerate(self._rounds_of(micros, task_of), start=1):
            self.gradients_are_zero = self.gradients_are_zero and not learns
            with row.attending():
                result: LossResult = self._run(row, rows_N, task)
                if learns:
                    self._backward(result[0], last=number == micros.rounds)
            if micro is not NOTHING:
                metrics.add(*result[1:])
        return metrics.read()

    def _loss_tasks(self, batch: Batch, loss: AnyLoss, scale: LossScale) -> Callable[[MicroBatch, Staging], Task]:
        """Return a function that makes the task of a micro-batch; that of `NOTHING` has a loss and gradients of zero.
        Where the loss needs numbers of whole sequences, make a pass without gradients first."""
        if isinstance(loss, Objective):
            return self._objective_tasks(ObjectiveBatch(batch, loss, scale, self._row_group()), loss)
        assert isinstance(loss, Loss | ValueLoss), loss
        weight_T = loss_weight_T(batch, loss.loss_aggregation, scale)
        found = sequence_columns(batch, loss, lambda: self._logprobs(batch)) if isinstance(loss, Loss) else {}
        of_sequence_T = {name: by_token(column_B, batch) for name, column_B in found.items()}
        zero_N = torch.zeros(1, device=self.device)

        def task_of(micro: MicroBatch, staging: Staging) -> Task:
            def values(column_T: NDArray[Any]) -> Tensor:
                return zero_N if micro is NOTHING else staging.put(column_T[micro.column_N].astype(np.float32))

            if isinstance(loss, ValueLoss):
                return ValueLossTask(
                    ValueColumns(values(weight_T), values(batch["value_T"]), values(batch["return_T"])), loss
                )
            assert isinstance(loss, Loss)
            columns = TokenColumns.of(batch, loss, weight_T, of_sequence_T, values)
            return LossTask(staging.put(micro.target_N), self.config.temperature, columns, loss)

        return task_of

    def _objective_tasks(self, rows: ObjectiveBatch, objective: Objective) -> Callable[[MicroBatch, Staging], Task]:
        def task_of(micro: MicroBatch, staging: Staging) -> Task:
            columns = rows.columns(micro, staging.put)
            if objective.of_scores:
                return ScoreLossTask(columns)
            return ObjectiveTask(staging.put(micro.target_N), self.config.temperature, columns)

        return task_of

    def _row_group(self) -> SequenceGroup:
        """The ranks that have a part of each row."""
        return self.sequences

    @torch.no_grad()
    def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[GreedyCompletion]:
        self._check_head(scores=False)
        completions = [GreedyCompletion([], []) for _ in prompts]
        limit = self.config.micro_batch_tokens * self.sequences.size  # no sequence is longer; each rank runs all
        for _ in range(new_tokens):
            sequences = [[*prompt, *written.tokens] for prompt, written in zip(prompts, completions, strict=True)]
            for chosen in pack([len(sequence) for sequence in sequences], limit):
                logits_BV = self._last_logits([sequences[i] for i in chosen])
                best, token = (part.tolist() for part in logits_BV.topk(2))
                for i, values, ids in zip(chosen, best, token, strict=True):
                    completions[i].tokens.append(ids[0])
                    completions[i].margins.append(values[0] - values[1])
        return completions

    def _last_logits(self, sequences: list[list[int]]) -> Tensor:
        """Logits of each sequence's last token."""
        lengths = [len(sequence) for sequence in sequences]
        tokens_T = np.concatenate(sequences).astype(np.int64)
        positions_T = np.concatenate([np.arange(length) for length in lengths])
        last_N = np.cumsum(lengths) - 1
        return self._logits(MicroBatch(lengths, [-1] * len(lengths), tokens_T, positions_T, last_N, last_N, last_N))

    def _logits(self, micro: MicroBatch) -> Tensor:
        """Logits at `hidden_N` of a row, which every rank computes by itself."""
        return row_logits(self._run, self.policy.model, self.device, micro)

    # ── learning ──────────────────────────────────────────────────────────────────────────────────

    def _learning_rate(self) -> float:
        """Learning rate of the next optimizer step."""
        assert self.config.optimizer is not None, "this role does not learn"
        return lr_at(self.state.schedule_steps, self.config.optimizer, self.config.total_optimizer_steps)

    @torch.no_grad()
    def optim_step(self) -> StepResult:
        lr = self._learning_rate()
        assert self.config.optimizer is not None
        norm, limit = self._sum_gradients(), self.config.optimizer.max_grad_norm
        finite = math.isfinite(norm)
        if finite:
            self._step(lr, limit / norm if limit and norm > limit else None)
            self.state.optimizer_steps += 1
        else:
            self.state.skipped_steps += 1
        self._zero_gradients()
        self.gradients_are_zero = True
        return StepResult(norm, lr, not finite)

    # Three parts of `optim_step`; an engine whose library does it all in one call overrides that instead.

    def _sum_gradients(self) -> float:
        """Sum gradients over ranks where that is not done yet; return the norm of all, the same on all ranks."""
        raise NotImplementedError

    def _step(self, lr: float, clip: float | None) -> None:
        """Multiply gradients by `clip`, where it is set, and step."""
        raise NotImplementedError

    def _zero_gradients(self) -> None:
        raise NotImplementedError

    # ── weights ───────────────────────────────────────────────────────────────────────────────────

    def export_weights(self, dtype: DType, form: WeightForm = "merged") -> Iterator[Weight]:
        kinds = self._exported(form)
        sent = {
            name: DTYPES[dtype]
            for name, (_, own) in kinds.items()
            if own.is_floating_point and own.itemsize > DTYPES[dtype].itemsize
            if self.adapters is None or not self.adapters.change(name, form)
        }
        full = self._full_weights(kinds, sent)
        if self.adapters is not None:
            full = self.adapters.merged(full) if form == "merged" else self.adapters.apart(full)
        return weight_export.stream(full, dtype, self._buffers)

    def weight_specs(self, dtype: DType, form: WeightForm = "merged") -> Sequence[WeightSpec]:
        kinds = self._exported(form)
        if self.adapters is not None:
            kinds = self.adapters.merged_kinds(kinds) if form == "merged" else self.adapters.apart_kinds(kinds)
        own = self._buffers
        return [weight_export.spec_of(name, kind, None if name in own else dtype) for name, kind in kinds.items()]

    @cached_property
    def _buffers(self) -> frozenset[str]:
        """Names of what every engine holds in a precision of its own, whatever the model computes in."""
        return frozenset(name for name, _ in self.policy.model.named_buffers())

    def _exported(self, form: WeightForm) -> Mapping[str, TensorKind]:
        """The weights that a stream of this form is made of."""
        assert form == "merged" or self.adapters is not None, "this model has no adapters"
        kinds = self._weight_kinds()
        return kinds if form != "adapters" else {name: kind for name, kind in kinds.items() if is_adapter(name)}

    # ── disk ──────────────────────────────────────────────────────────────────────────────────────

    def save(self, folder: Path) -> list[Path]:
        rank, ranks = self.rank.rank, self.rank.world_size
        written = [write_shards(folder, "model", rank, ranks, self._written_weights())]
        if self.config.optimizer is not None:
            written.append(write_shards(folder, "optimizer", rank, ranks, self._written_moments()))
        if rank == 0:
            written.append(self.state.write(folder))
            if self.adapters is not None:
                written.append(self.adapters.write(folder))
        return [*written, write_rng(folder, rank)]

    def load(self, folder: Path) -> None:
        saved = TrainerState.read(folder)
        if self.adapters is not None:
            self.adapters.check(folder)
        kinds = {name: kind for name, kind in self._weight_kinds().items() if self._is_saved(name)}
        ShardReader(folder, "model").load(self._saved_shards(), kinds)
        if self.config.optimizer is not None:
            moments = {
                f"{name}.{moment}": (kinds[name][0], torch.float32) for name in self._learned() for moment in MOMENTS
            }
            ShardReader(folder, "optimizer").load(self._moment_shards(), moments)
        self.state = saved
        self._loaded(saved.optimizer_steps)
        read_rng(folder, self.rank.rank)

    def start_schedule_at(self, optimizer_steps: int) -> None:
        self.state.start_schedule_at(optimizer_steps)

    def _saved_shards(self) -> Iterator[Shard]:
        return (shard for shard in self._weight_shards() if self._is_saved(shard.name))

    def _written_weights(self) -> Iterator[Shard]:
        """Yield the shards that this rank writes to a checkpoint. An engine whose ranks read what others read too says
        otherwise."""
        return self._saved_shards()

    def _written_moments(self) -> Iterator[Shard]:
        return self._moment_shards()

    def _is_saved(self, name: str) -> bool:
        """With adapters, a checkpoint keeps what learns: the rest of the model never changes."""
        return self.adapters is None or self.adapters.learns(name)

    @abstractmethod
    def _learned(self) -> Sequence[str]:
        """Names of the weights that the optimizer changes."""

    # ── memory ────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _memory(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return weights and optimizer state, and gradients: views of all the memory that `offload` moves."""

    def offload(self) -> None:
        """Gradients that are zero are dropped, and zero again when they come back."""
        if self.offloading.offloaded:
            return
        keep, gradients = self._memory()
        drop = gradients if self.gradients_are_zero else []
        self.offloading.offload(storages_of([*keep, *(gradients if not drop else [])]), storages_of(drop))

    def onload(self) -> None:
        self.offloading.onload()

    def close(self) -> None:
        leave_group()


def _on_sequences(about: ModelBuilt, group: SequenceGroup) -> ModelBuilt:
    """Add the axis of the mesh along which rows are sharded, where there is one."""
    if group.group is None:
        return about
    return about.model_copy(update={"mesh": {**about.mesh, SEQUENCE: group.group.size()}})


def _kernels_of(policy: Policy) -> dict[str, Any]:
    return {"kernels": policy.kernels.name, "replaced_modules": dict(policy.kernels.replaced)}

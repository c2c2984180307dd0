"""The `ddp` train engine: every rank holds the whole model, and gradients are summed once per optimizer step.

T: tokens of a micro-batch's row, N: its loss tokens, E: hidden size, P: elements of the flat buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from backends.attention import RowCopies, copy_rows
from backends.ddp import disk, weights
from backends.ddp.flat import FlatParameters, Parking
from backends.ddp.groups import join_group, leave_group
from backends.ddp.head import Head, LogprobEntropy, target_logprob
from backends.ddp.optimizer import FlatAdamW
from backends.ddp.row import Row, can_share_prompts, packed_row
from backends.ddp.verify import verify_packing
from backends.hf import DTYPES, build_model, describe, named_weights
from backends.losses import LOSS_SUMS, TokenColumns, grpo_loss
from backends.packing import MicroBatch, check_update, loss_tokens_B, loss_weight_T, micro_batches, pack
from backends.protocol import GreedyAnswer, LossScale, Rank, StepResult, TrainEngine, Weight, WeightSpec
from backends.schedule import lr_at
from backends.trainer_state import TrainerState
from specs.as_built import ModelBuilt
from specs.batch import Batch
from specs.role_config import TrainConfig
from specs.schema import DdpEngine, DType, Grpo


class DdpTrainEngine(TrainEngine):
    """Any Hugging Face causal language model, replicated on every rank."""

    def __init__(self, config: TrainConfig, rank: Rank) -> None:
        assert isinstance(config.engine, DdpEngine)
        self.config, self.rank = config, rank
        self.chunk = config.engine.logits_chunk_tokens
        learns = config.optimizer is not None
        # A model that learns is read in fp32 even when it computes in bf16: its master weights are exact.
        source = config.model.model_copy(update={"dtype": "fp32"}) if learns else config.model
        self.model = build_model(source, load_weights=True)
        self.flat = FlatParameters(self.model, DTYPES[config.model.dtype], learns=learns)
        if not learns:
            self.model.requires_grad_(False)
        if config.gradient_checkpointing:
            enable = getattr(self.model, "activation_checkpointing_enable", self.model.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
            self.model.train()  # checkpointing is off in eval mode; dropout is off by config
        self.head = Head(self.model)
        self.optimizer = None if config.optimizer is None else FlatAdamW(self.flat, config.optimizer)
        self.state = TrainerState()
        self.parking = Parking()
        self.gradients_are_zero = True
        verify_packing(self.model, self.head)

    @classmethod
    def build(cls, config: TrainConfig, rank: Rank) -> DdpTrainEngine:
        join_group(rank, config.model.device)
        return cls(config, rank)

    def built(self) -> ModelBuilt:
        return describe(self.model, self.config.model, checksum=True)

    # ── computing ─────────────────────────────────────────────────────────────────────────────────

    def _hidden(self, row: Row) -> Tensor:
        """Last hidden states of a packed row, [T, E]."""
        hidden_1TE: Tensor = self.model.base_model(**row.inputs)[0]
        return hidden_1TE[0]

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        return micro_batches(batch, self.config.micro_batch_tokens, share_prompts=can_share_prompts(self.model))

    def _row(self, micro: MicroBatch) -> Row:
        return packed_row(self.model, micro.tokens_T, micro.positions_T, micro.lengths, micro.parents)

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.model.device)

    def _chunks(self, count: int) -> Iterator[tuple[int, int]]:
        return ((start, min(start + self.chunk, count)) for start in range(0, count, self.chunk))

    @torch.no_grad()
    def forward(self, batch: Batch) -> NDArray[np.float32]:
        logprob_T = np.zeros(batch.num_tokens, dtype=np.float32)
        for micro in self._micro_batches(batch):
            row = self._row(micro)
            with row.attending():
                hidden_NE = self._hidden(row)[self._tensor(micro.hidden_N)]
            target_N = self._tensor(micro.target_N)
            parts = [
                target_logprob(self.head(hidden_NE[a:b]), target_N[a:b], self.config.temperature)
                for a, b in self._chunks(len(target_N))
            ]
            logprob_T[micro.column_N] = torch.cat(parts).cpu().numpy()
        return logprob_T

    def forward_backward(self, batch: Batch, algorithm: Grpo, scale: LossScale) -> Mapping[str, float]:
        check_update(batch, algorithm)
        weight_T = loss_weight_T(batch, algorithm.loss_aggregation, scale)
        sums = torch.zeros(len(LOSS_SUMS), dtype=torch.float64, device=self.model.device)
        gap_max = torch.zeros((), device=self.model.device)
        micros = self._micro_batches(batch)
        self.gradients_are_zero &= not micros
        for micro in micros:
            columns = self._columns(batch, micro, weight_T, algorithm)
            micro_sums, micro_gap = self._forward_backward(micro, columns, algorithm)
            sums += micro_sums
            gap_max = torch.maximum(gap_max, micro_gap)
        *summed, gap = torch.cat([sums, gap_max.double()[None]]).tolist()  # the only read from the device
        sequence_tokens = loss_tokens_B(batch)
        return {
            **dict(zip(LOSS_SUMS, summed, strict=True)),
            "tokens": float(sequence_tokens.sum()),
            "sequences": float((sequence_tokens > 0).sum()),
            "micro_batches": float(len(micros)),
            "logprob_gap_max": gap,
            "micro_batch_tokens_max": float(max((micro.num_tokens for micro in micros), default=0)),
        }

    def _columns(self, batch: Batch, micro: MicroBatch, weight_T: NDArray[np.float32], algorithm: Grpo) -> TokenColumns:
        def column(name: str) -> Tensor:
            return self._tensor(batch[name][micro.column_N].astype(np.float32))

        return TokenColumns(
            weight_N=self._tensor(weight_T[micro.column_N]),
            advantage_N=column("advantage_T"),
            rollout_logprob_N=column("rollout_logprob_T"),
            old_logprob_N=column("old_logprob_T") if "old_logprob_T" in batch else None,
            ref_logprob_N=column("ref_logprob_T") if algorithm.kl_coef > 0 else None,
        )

    def _forward_backward(self, micro: MicroBatch, columns: TokenColumns, algorithm: Grpo) -> tuple[Tensor, Tensor]:
        """One micro-batch: sums of LOSS_SUMS and the largest sampler gap. The loss is a sum over tokens, so each chunk
        of logits goes forward and backward by itself, and never are two chunks' logits alive."""
        row = self._row(micro)
        target_N = self._tensor(micro.target_N)
        sums = torch.zeros(len(LOSS_SUMS), dtype=torch.float64, device=target_N.device)
        gaps: list[Tensor] = []
        with row.attending():
            copies = RowCopies(micro.hidden_N, micro.num_tokens, self.model.device)
            hidden_NE = copy_rows(self._hidden(row), copies)
            grad_NE = torch.empty_like(hidden_NE)
            for a, b in self._chunks(len(target_N)):
                chunk_NE = hidden_NE[a:b].detach().requires_grad_()
                logprob_N, entropy_N = LogprobEntropy.apply(
                    self.head(chunk_NE), target_N[a:b], self.config.temperature, algorithm.entropy_coef != 0
                )
                loss, chunk_sums, gap = grpo_loss(logprob_N, entropy_N, columns.slice(a, b), algorithm)
                loss.backward()
                assert chunk_NE.grad is not None
                grad_NE[a:b] = chunk_NE.grad
                sums += chunk_sums
                gaps.append(gap)
            hidden_NE.backward(grad_NE)
        return sums, torch.stack(gaps).max()

    @torch.no_grad()
    def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[GreedyAnswer]:
        answers = [GreedyAnswer([], []) for _ in prompts]
        for _ in range(new_tokens):
            sequences = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)]
            for chosen in pack([len(sequence) for sequence in sequences], self.config.micro_batch_tokens):
                logits_BV = self._last_logits([sequences[i] for i in chosen])
                best, token = (part.tolist() for part in logits_BV.topk(2))
                for i, values, ids in zip(chosen, best, token, strict=True):
                    answers[i].tokens.append(ids[0])
                    answers[i].margins.append(values[0] - values[1])
        return answers

    def _last_logits(self, sequences: list[list[int]]) -> Tensor:
        lengths = [len(sequence) for sequence in sequences]
        positions_T = np.concatenate([np.arange(length) for length in lengths])
        row = packed_row(self.model, np.concatenate(sequences).astype(np.int64), positions_T, lengths)
        with row.attending():
            hidden_TE = self._hidden(row)
        return self.head(hidden_TE[self._tensor(np.cumsum(lengths) - 1)])

    # ── learning ──────────────────────────────────────────────────────────────────────────────────

    def optim_step(self) -> StepResult:
        assert self.optimizer is not None, "this role does not learn"
        assert self.config.optimizer is not None
        grad_P = self.flat.grad_P
        assert grad_P is not None
        if self.rank.world_size > 1:
            dist.all_reduce(grad_P)
        # In fp64: over millions of values the fp32 sum is off in the fourth digit.
        norm = float(torch.linalg.vector_norm(grad_P, dtype=torch.float64))
        lr = lr_at(self.state.optimizer_steps, self.config.optimizer, self.config.total_optimizer_steps)
        finite = math.isfinite(norm)
        if finite:
            limit = self.config.optimizer.max_grad_norm
            if limit and norm > limit:
                grad_P.mul_(limit / norm)
            self.optimizer.step(lr)
            self.flat.refresh()
            self.state.optimizer_steps += 1
        else:
            self.state.skipped_steps += 1
        grad_P.zero_()
        self.gradients_are_zero = True
        return StepResult(norm, lr, not finite)

    # ── weights ───────────────────────────────────────────────────────────────────────────────────

    def _best_weights(self) -> dict[str, Tensor]:
        """Every weight by name, fp32 master where there is one."""
        best = {name: tensor.detach() for name, tensor in named_weights(self.model).items()}
        for segment in self.flat.segments:
            best[segment.name] = self.flat.source(segment)
        return best

    def export_weights(self, dtype: DType) -> Iterator[Weight]:
        return weights.stream(iter(self._best_weights().items()), dtype)

    def weight_specs(self, dtype: DType) -> Sequence[WeightSpec]:
        return [weights.spec_of(name, tensor, dtype) for name, tensor in self._best_weights().items()]

    # ── memory ────────────────────────────────────────────────────────────────────────────────────

    def offload(self) -> None:
        if self.parking.parked:
            return
        keep = [self.flat.compute_P]
        if self.optimizer is not None:
            keep += self.optimizer.tensors()
            if self.flat.master_P is not None and self.flat.master_P is not self.flat.compute_P:
                keep.append(self.flat.master_P)
        grads = [] if self.flat.grad_P is None else [self.flat.grad_P]
        drop = grads if self.gradients_are_zero else []
        self.parking.park(keep + (grads if not drop else []), drop)

    def onload(self) -> None:
        self.parking.unpark()

    # ── disk ──────────────────────────────────────────────────────────────────────────────────────

    def save(self, folder: Path) -> None:
        if self.rank.rank == 0:
            disk.write_tensors(folder / "model.safetensors", self._best_weights())
            if self.optimizer is not None:
                disk.write_tensors(folder / "optimizer.safetensors", self.optimizer.named_state())
            self.state.write(folder)
        disk.write_rng(folder / f"rng.rank{self.rank.rank}.safetensors")

    def load(self, folder: Path) -> None:
        saved = TrainerState.read(folder)
        disk.read_into(folder / "model.safetensors", self._best_weights())
        self.flat.refresh()
        if self.optimizer is not None:
            disk.read_into(folder / "optimizer.safetensors", self.optimizer.named_state())
            self.optimizer.set_steps(saved.optimizer_steps)
        self.state = saved
        disk.read_rng(folder / f"rng.rank{self.rank.rank}.safetensors")

    def close(self) -> None:
        leave_group()

"""The fake train engine: the bigram model with exact gradients and AdamW, in numpy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from backends import activity
from backends.fake import bigram as bigram
from backends.fake.fake_losses import (
    FakeColumns,
    FakeTerms,
    fake_objective,
    fake_policy_loss,
    fake_sequence_columns,
    fake_value_loss,
)
from backends.packed.packing import (
    Budget,
    MicroBatch,
    Packing,
    by_token,
    check_update,
    loss_weight_T,
    update_counts,
)
from backends.protocol import GreedyCompletion, LossScale, OnMeta, Rank, StepResult, TrainEngine, Weight, WeightSpec
from backends.train.trainer_state import TrainerState, lr_at
from specs.errors import CheckpointError, ModelError
from specs.schema.algorithms.algorithm import AnyLoss, Loss
from specs.schema.algorithms.algorithm_tables import ValueLoss
from specs.schema.objectives import Objective
from specs.schema.role_section import DType
from specs.schema.spec import WeightForm
from specs.wire.as_built import ModelBuilt
from specs.wire.batch import Batch
from specs.wire.role_config import TrainConfig


class FakeTrainEngine(TrainEngine):
    """One process, no device: `offload` only remembers that it was called."""

    counts_progress = True

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.parameters = bigram.read_parameters(config.model, learns=config.optimizer is not None)
        self.grads = {name: np.zeros(value.shape) for name, value in self.parameters.items()}
        self.moments = {
            f"{name}.{kind}": np.zeros_like(value)
            for name, value in self.parameters.items()
            for kind in ("exp_avg", "exp_avg_sq")
        }
        self.state = TrainerState()
        self._packing = Packing(Budget(config.micro_batch_tokens, key=f"{config.role}.micro_batch_tokens"))

    @classmethod
    def build(cls, config: TrainConfig, rank: Rank) -> FakeTrainEngine:
        if rank.world_size > 1:
            raise ModelError(
                "the fake train engine runs in one process", hint="set processes = 1, or engine.kind = ddp"
            )
        return cls(config)

    @classmethod
    def on_meta(cls, config: TrainConfig, rank: Rank) -> OnMeta:
        shapes = bigram.shapes(bigram.read_vocab_size(config.model), config.model.head)
        unset = {name: np.empty(shape, dtype=np.float32) for name, shape in shapes.items()}
        learns = config.optimizer is not None
        not_seen = () if config.model.head == "lm" else ("new_head",)
        return OnMeta(bigram.describe(unset, config.model, learns=learns, checksum=False), not_seen)

    def built(self) -> ModelBuilt:
        learns = self.config.optimizer is not None
        return bigram.describe(self.parameters, self.config.model, learns=learns, checksum=True)

    # ── computing ─────────────────────────────────────────────────────────────────────────────────

    def _log_softmax(self, micro: MicroBatch) -> NDArray[np.float64]:
        return bigram.log_softmax(self.parameters, micro.tokens_T[micro.hidden_N], self.config.temperature)

    def forward(self, batch: Batch, *, adapters: bool = True) -> NDArray[np.float32]:
        if self.config.model.head != "lm":
            raise self._no_lm_head()
        logprob_T = np.zeros(batch.num_tokens, dtype=np.float32)
        for micro in self._packing.micro_batches(batch):
            logp_NV = self._log_softmax(micro)
            logprob_T[micro.column_N] = logp_NV[np.arange(len(logp_NV)), micro.target_N]
            activity.count("micro-batch")
        return logprob_T

    def values(self, batch: Batch) -> NDArray[np.float32]:
        value_V = self._value_V()
        value_T = np.zeros(batch.num_tokens, dtype=np.float32)
        for micro in self._packing.micro_batches(batch):
            value_T[micro.column_N] = value_V[micro.tokens_T[micro.hidden_N]]
            activity.count("micro-batch")
        return value_T

    def scores(self, batch: Batch) -> NDArray[np.float32]:
        value_V = self._value_V()
        score_B = np.zeros(len(batch), dtype=np.float32)
        for micro in self._packing.last_token_micro_batches(batch):
            score_B[micro.column_N] = value_V[micro.tokens_T[micro.hidden_N]]
            activity.count("micro-batch")
        return score_B

    def _value_V(self) -> NDArray[np.float32]:
        """The number that belongs to each token."""
        if self.config.model.head == "lm":
            raise self._no_scalar_head()
        value_V: NDArray[np.float32] = self.parameters[bigram.SCORE][0]
        return value_V

    def forward_backward(self, batch: Batch, loss: AnyLoss, scale: LossScale) -> Mapping[str, float]:
        if isinstance(loss, ValueLoss):
            return self._value_forward_backward(batch, loss, scale)
        if isinstance(loss, Objective):
            return self._objective_forward_backward(batch, loss, scale)
        assert isinstance(loss, Loss)
        if self.config.model.head != "lm":
            raise self._no_lm_head()
        check_update(batch, loss)
        weight_T = loss_weight_T(batch, loss.loss_aggregation, scale)
        of_sequence = fake_sequence_columns(batch, loss, lambda: self.forward(batch))
        of_sequence_T = {name: by_token(column_B, batch) for name, column_B in of_sequence.items()}
        micros = self._packing.micro_batches(batch)
        done = [self._forward_backward(batch, micro, weight_T, of_sequence_T, loss) for micro in micros]
        return {
            **{name: sum((terms.sums[name] for terms in done), 0.0) for name in loss.summed()},
            **{name: max((terms.maxima[name] for terms in done), default=0.0) for name in loss.maxima()},
            **update_counts(batch, micros),
        }

    def evaluate(self, batch: Batch, loss: AnyLoss, scale: LossScale) -> Mapping[str, float]:
        kept = {name: grad.copy() for name, grad in self.grads.items()}
        found = self.forward_backward(batch, loss, scale)
        self.grads = kept
        return found

    def _value_forward_backward(self, batch: Batch, loss: ValueLoss, scale: LossScale) -> Mapping[str, float]:
        check_update(batch, loss)
        value_V = self._value_V().astype(np.float64)
        weight_T = loss_weight_T(batch, loss.loss_aggregation, scale)
        sums = dict.fromkeys(loss.summed(), 0.0)
        micros = self._packing.micro_batches(batch)
        for micro in micros:
            columns = (column_T[micro.column_N] for column_T in (weight_T, batch["value_T"], batch["return_T"]))
            weight_N, old_N, return_N = (column_N.astype(np.float64) for column_N in columns)
            token_N = micro.tokens_T[micro.hidden_N]
            _, by_value_N, found = fake_value_loss(value_V[token_N], weight_N, old_N, return_N, loss)
            np.add.at(self.grads[bigram.SCORE][0], token_N, by_value_N)
            sums = {name: value + found[name] for name, value in sums.items()}
            activity.count("micro-batch")
        return {**sums, **update_counts(batch, micros)}

    def _forward_backward(
        self,
        batch: Batch,
        micro: MicroBatch,
        weight_T: NDArray[np.float32],
        of_sequence_T: Mapping[str, NDArray[np.float32]],
        loss: Loss,
    ) -> FakeTerms:
        def column(name: str) -> NDArray[np.float64]:
            return batch[name][micro.column_N].astype(np.float64)

        logp_NV = self._log_softmax(micro)
        p_NV = np.exp(logp_NV)
        rows = np.arange(len(logp_NV))
        entropy_N = -(p_NV * logp_NV).sum(axis=1)
        columns = FakeColumns(
            weight_N=weight_T[micro.column_N].astype(np.float64),
            advantage_N=column("advantage_T"),
            rollout_logprob_N=column("rollout_logprob_T"),
            old_logprob_N=column("old_logprob_T") if "old_logprob_T" in loss.columns else None,
            ref_logprob_N=column("ref_logprob_T") if "ref_logprob_T" in loss.columns else None,
            of_sequence={name: value_T[micro.column_N].astype(np.float64) for name, value_T in of_sequence_T.items()},
            correction_N=column("correction_T") if "correction_T" in loss.columns else None,
            covariant_N=column("covariant_T") if "covariant_T" in loss.columns else None,
        )
        terms = fake_policy_loss(logp_NV[rows, micro.target_N], entropy_N, columns, loss)
        grad_NV = -p_NV * terms.by_logprob_N[:, None]
        grad_NV -= p_NV * (logp_NV + entropy_N[:, None]) * terms.by_entropy_N[:, None]
        grad_NV[rows, micro.target_N] += terms.by_logprob_N
        self._add_gradient(micro, grad_NV)
        return terms

    def _add_gradient(self, micro: MicroBatch, grad_NV: NDArray[np.float64]) -> None:
        grad_NV /= self.config.temperature
        np.add.at(self.grads["bigram.weight"], micro.tokens_T[micro.hidden_N], grad_NV)
        self.grads["bias.weight"] += grad_NV.sum(axis=0)
        activity.count("micro-batch")

    def _objective_forward_backward(self, batch: Batch, objective: Objective, scale: LossScale) -> Mapping[str, float]:
        import torch

        from backends.train.objective_losses import ObjectiveBatch, unit_counts

        check_update(batch, objective)
        if objective.of_scores != (self.config.model.head != "lm"):
            raise self._no_scalar_head() if objective.of_scores else self._no_lm_head()
        rows, sums = ObjectiveBatch(batch, objective, scale), dict.fromkeys(objective.summed(), 0.0)
        packing = self._packing
        micros = packing.last_token_micro_batches(batch) if objective.of_scores else packing.micro_batches(batch)
        for micro in micros:
            columns, token_N = rows.columns(micro, torch.from_numpy), micro.tokens_T[micro.hidden_N]
            if objective.of_scores:
                by_value_N, found = fake_objective(self._value_V()[token_N].astype(np.float64), columns)
                np.add.at(self.grads[bigram.SCORE][0], token_N, by_value_N)
                activity.count("micro-batch")
            else:
                logp_NV, at = self._log_softmax(micro), (np.arange(len(token_N)), micro.target_N)
                p_NV = np.exp(logp_NV)
                correct_N = logp_NV.argmax(axis=1) == micro.target_N
                by_value_N, found = fake_objective(logp_NV[at], columns, -(p_NV * logp_NV).sum(axis=1), correct_N)
                grad_NV = -p_NV * by_value_N[:, None]
                grad_NV[at] += by_value_N
                self._add_gradient(micro, grad_NV)
            sums = {name: value + found[name] for name, value in sums.items()}
        return {**sums, **update_counts(batch, micros), **unit_counts(batch)}

    def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[GreedyCompletion]:
        if self.config.model.head != "lm":
            raise self._no_lm_head()
        completions = [GreedyCompletion([], []) for _ in prompts]
        for prompt, written in zip(prompts, completions, strict=True):
            last = prompt[-1]
            for _ in range(new_tokens):
                logits = self.parameters["bigram.weight"][last] + self.parameters["bias.weight"]
                runner_up, last = (int(token) for token in np.argsort(logits, kind="stable")[-2:])
                written.tokens.append(last)
                written.margins.append(float(logits[last] - logits[runner_up]))
        return completions

    # ── learning ──────────────────────────────────────────────────────────────────────────────────

    def optim_step(self) -> StepResult:
        optimizer = self.config.optimizer
        assert optimizer is not None, "this role does not learn"
        norm = math.sqrt(sum(float((grad**2).sum()) for grad in self.grads.values()))
        lr = lr_at(self.state.schedule_steps, optimizer, self.config.total_optimizer_steps)
        finite = math.isfinite(norm)
        if finite:
            self.state.optimizer_steps += 1
            limit = optimizer.max_grad_norm
            self._adamw(lr, limit / norm if limit and norm > limit else 1.0)
        else:
            self.state.skipped_steps += 1
        for grad in self.grads.values():
            grad[:] = 0.0
        return StepResult(norm, lr, not finite)

    def _adamw(self, lr: float, grad_scale: float) -> None:
        """Loshchilov & Hutter 2019, algorithm 2."""
        assert self.config.optimizer is not None
        (beta1, beta2), eps = self.config.optimizer.betas, self.config.optimizer.eps
        steps = self.state.optimizer_steps
        for name, value in self.parameters.items():
            grad = self.grads[name] * grad_scale
            first, second = self.moments[f"{name}.exp_avg"], self.moments[f"{name}.exp_avg_sq"]
            first[:] = beta1 * first + (1 - beta1) * grad
            second[:] = beta2 * second + (1 - beta2) * grad**2
            if value.ndim > 1:
                value *= np.float32(1 - lr * self.config.optimizer.weight_decay)
            scaled = first / (1 - beta1**steps)
            value -= lr * scaled / (np.sqrt(second / (1 - beta2**steps)) + eps)

    # ── weights, memory, disk ─────────────────────────────────────────────────────────────────────

    def export_weights(self, dtype: DType, form: WeightForm = "merged") -> Iterator[Weight]:
        for spec in self.weight_specs(dtype):
            yield bigram.BigramWeight(spec, self.parameters[spec.name])

    def weight_specs(self, dtype: DType, form: WeightForm = "merged") -> Sequence[WeightSpec]:
        assert form == "merged", "no linear layers, no adapters"
        return bigram.weight_specs(bigram.vocab_size_of(self.parameters), dtype, self.config.model.head)

    def offload(self) -> None:
        """Nothing to move: everything is in host memory."""

    def onload(self) -> None:
        """Nothing to move: everything is in host memory."""

    def save(self, folder: Path) -> list[Path]:
        model, optimizer = folder / "model.safetensors", folder / "optimizer.safetensors"
        save_file(self.parameters, model)
        save_file(self.moments, optimizer)
        return [model, optimizer, self.state.write(folder)]

    def load(self, folder: Path) -> None:
        state = TrainerState.read(folder)
        _read_into(folder / "model.safetensors", self.parameters)
        _read_into(folder / "optimizer.safetensors", self.moments)
        self.state = state

    def start_schedule_at(self, optimizer_steps: int) -> None:
        self.state.start_schedule_at(optimizer_steps)


def _read_into(path: Path, targets: dict[str, NDArray[np.float32]]) -> None:
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    if {name: value.shape for name, value in found.items()} != {name: value.shape for name, value in targets.items()}:
        raise CheckpointError(f"{path} belongs to another model")
    for name, value in targets.items():
        value[:] = found[name]

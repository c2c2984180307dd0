"""The fake train engine: the bigram model with exact gradients and AdamW, in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from backends import activity
from backends.fake import bigram
from backends.fake.fake_losses import Column, FakeTerms, fake_objective, fake_policy_loss, fake_value_loss
from backends.packed.packing import (
    Budget,
    MicroBatch,
    MicroBatches,
    Packing,
    by_token,
    loss_weight_T,
    unit_counts,
    update_counts,
)
from backends.protocol import GreedyCompletion, OnMeta, Rank, StepResult, TrainEngine, Weight, WeightSpec
from backends.token_metrics import TokenColumns
from backends.train.trainer_state import TrainerState, lr_at
from specs.errors import CheckpointError
from specs.schema.algorithms.algorithm import AnyLoss, Loss
from specs.schema.algorithms.algorithm_tables import ValueLoss
from specs.schema.objectives import Objective
from specs.schema.role_section import DType
from specs.schema.spec import WeightForm
from specs.wire.as_built import ModelBuilt
from specs.wire.batch import Batch
from specs.wire.bodies import LossScale
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
        assert rank.world_size == 1, "specs/schema/engines/fake_tables.py"
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

    def _check_head(self, *, scores: bool) -> None:
        """Raise ModelError unless the model gives one number for each token (`scores`), or logits."""
        if (self.config.model.head != "lm") != scores:
            raise self._no_scalar_head() if scores else self._no_lm_head()

    def forward(self, batch: Batch, *, adapters: bool = True) -> NDArray[np.float32]:
        self._check_head(scores=False)

        def logprobs(micro: MicroBatch) -> Column:
            return self._log_softmax(micro)[np.arange(len(micro.target_N)), micro.target_N]

        return _column(self._packing.micro_batches(batch), batch.num_tokens, logprobs)

    def values(self, batch: Batch) -> NDArray[np.float32]:
        self._check_head(scores=True)
        return _column(self._packing.micro_batches(batch), batch.num_tokens, self._values)

    def scores(self, batch: Batch) -> NDArray[np.float32]:
        self._check_head(scores=True)
        return _column(self._packing.last_token_micro_batches(batch), len(batch), self._values)

    def _values(self, micro: MicroBatch) -> Column:
        """Return the number that belongs to each token."""
        value_V = self.parameters[bigram.SCORE][0]
        return np.asarray(value_V[micro.tokens_T[micro.hidden_N]], dtype=np.float64)

    def forward_backward(self, batch: Batch, loss: AnyLoss, scale: LossScale) -> Mapping[str, float]:
        batch.require(loss.columns, "update")
        of_scores = isinstance(loss, Objective) and loss.of_scores
        self._check_head(scores=of_scores or isinstance(loss, ValueLoss))
        packing = self._packing
        micros = packing.last_token_micro_batches(batch) if of_scores else packing.micro_batches(batch)
        terms_of, done = self._loss_terms(batch, loss, scale), []
        for micro in micros:
            done.append(terms_of(micro))
            activity.count("micro-batch")
        return {
            **{name: sum((terms.sums[name] for terms in done), 0.0) for name in loss.summed()},
            **{name: max((terms.maxima[name] for terms in done), default=0.0) for name in loss.maxima()},
            **update_counts(batch, micros),
            **unit_counts(batch),
        }

    def evaluate(self, batch: Batch, loss: AnyLoss, scale: LossScale) -> Mapping[str, float]:
        kept = {name: grad.copy() for name, grad in self.grads.items()}
        found = self.forward_backward(batch, loss, scale)
        self.grads = kept
        return found

    def _loss_terms(self, batch: Batch, loss: AnyLoss, scale: LossScale) -> Callable[[MicroBatch], FakeTerms]:
        """Return a function that computes the loss of a micro-batch and adds its gradients."""
        if isinstance(loss, Objective):
            return self._objective_terms(batch, loss, scale)
        assert isinstance(loss, Loss | ValueLoss), loss
        weight_T = loss_weight_T(batch, loss.loss_aggregation, scale)
        of_sequence: Mapping[str, NDArray[np.float64]] = {}
        if isinstance(loss, Loss) and loss.sequence_columns:
            from backends.train.losses import sequence_columns  # it imports torch

            of_sequence = sequence_columns(batch, loss, lambda: self.forward(batch))
        of_sequence_T = {name: by_token(column_B, batch) for name, column_B in of_sequence.items()}

        def terms_of(micro: MicroBatch) -> FakeTerms:
            def values(column_T: NDArray[Any]) -> Column:
                return np.asarray(column_T[micro.column_N], dtype=np.float64)

            if isinstance(loss, ValueLoss):
                weight_N, old_N, return_N = map(values, (weight_T, batch["value_T"], batch["return_T"]))
                return self._learn_values(
                    micro, lambda value_N: fake_value_loss(value_N, weight_N, old_N, return_N, loss)
                )
            assert isinstance(loss, Loss)
            columns = TokenColumns.of(batch, loss, weight_T, of_sequence_T, values)
            return self._learn_tokens(
                micro, lambda logprob_N, entropy_N, _: fake_policy_loss(logprob_N, entropy_N, columns, loss)
            )

        return terms_of

    def _objective_terms(
        self, batch: Batch, objective: Objective, scale: LossScale
    ) -> Callable[[MicroBatch], FakeTerms]:
        import torch

        from backends.train.objective_losses import ObjectiveBatch

        rows = ObjectiveBatch(batch, objective, scale)

        def terms_of(micro: MicroBatch) -> FakeTerms:
            loss_of = partial(fake_objective, rows.columns(micro, torch.from_numpy))
            return self._learn_values(micro, loss_of) if objective.of_scores else self._learn_tokens(micro, loss_of)

        return terms_of

    def _learn_values(self, micro: MicroBatch, loss_of: Callable[[Column], FakeTerms]) -> FakeTerms:
        terms = loss_of(self._values(micro))
        np.add.at(self.grads[bigram.SCORE][0], micro.tokens_T[micro.hidden_N], terms.by_value_N)
        return terms

    def _learn_tokens(
        self, micro: MicroBatch, loss_of: Callable[[Column, Column, NDArray[np.bool_]], FakeTerms]
    ) -> FakeTerms:
        """`loss_of`: from log-probs, entropies, and which tokens are the likeliest."""
        logp_NV, target = self._log_softmax(micro), (np.arange(len(micro.target_N)), micro.target_N)
        p_NV = np.exp(logp_NV)
        entropy_N = -(p_NV * logp_NV).sum(axis=1)
        terms = loss_of(logp_NV[target], entropy_N, logp_NV.argmax(axis=1) == micro.target_N)
        grad_NV = -p_NV * terms.by_value_N[:, None]
        if terms.by_entropy_N is not None:
            grad_NV -= p_NV * (logp_NV + entropy_N[:, None]) * terms.by_entropy_N[:, None]
        grad_NV[target] += terms.by_value_N
        grad_NV /= self.config.temperature
        np.add.at(self.grads["bigram.weight"], micro.tokens_T[micro.hidden_N], grad_NV)
        self.grads["bias.weight"] += grad_NV.sum(axis=0)
        return terms

    def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[GreedyCompletion]:
        self._check_head(scores=False)
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


def _column(micros: MicroBatches, size: int, numbers: Callable[[MicroBatch], Column]) -> NDArray[np.float32]:
    """Return the `numbers` of each micro-batch in their places, 0 in the others."""
    column = np.zeros(size, dtype=np.float32)
    for micro in micros:
        column[micro.column_N] = numbers(micro)
        activity.count("micro-batch")
    return column


def _read_into(path: Path, targets: dict[str, NDArray[np.float32]]) -> None:
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    if {name: value.shape for name, value in found.items()} != {name: value.shape for name, value in targets.items()}:
        raise CheckpointError(f"{path} belongs to another model")
    for name, value in targets.items():
        value[:] = found[name]

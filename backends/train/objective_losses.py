"""Objectives of rows: losses of learned tokens, of sequences and of pairs, with their derivatives.

What a model says of a row are its *values*: the log-probs of the learned tokens or, of a reward model, the score at the
last token. A loss of tokens weighs each value; a loss of units reads their sums over sequences. `UNIT_LOSSES` has a
function for each table of the latter.

N: values of a micro-batch, M: its sequences, U: pairs, B: sequences of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from backends.packed.packing import MicroBatch, loss_weight_T
from backends.packed.row_ops import Put
from backends.token_metrics import ObjectiveTokens, UnitValues, token_values
from backends.ulysses.sequence_group import ALONE, SequenceGroup
from specs.errors import BatchError
from specs.schema.algorithms.algorithm import UNIT_REDUCTIONS
from specs.schema.objectives import (
    ApoZero,
    BradleyTerry,
    Dft,
    Dpo,
    Hinge,
    Ipo,
    Kto,
    Mixture,
    Nll,
    Objective,
    Orpo,
    Robust,
    SimPo,
    Sppo,
    TokenObjective,
)
from specs.wire.batch import Batch
from specs.wire.bodies import LossScale

# ── losses of units, by table ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Sequences:
    """Hold of some sequences the sum of their values, with gradient, and what it is compared with. fp64."""

    total: Tensor
    tokens: Tensor
    ref: Tensor  # sum of the reference's log-probs
    kl: Tensor
    margin: Tensor

    @property
    def ratio(self) -> Tensor:
        return self.total - self.ref

    @property
    def mean(self) -> Tensor:
        return self.total / self.tokens

    def at(self, place_U: Tensor) -> Sequences:
        return Sequences(*(getattr(self, item.name)[place_U] for item in fields(self)))


def _dpo(chosen: Sequences, rejected: Sequences, loss: Dpo) -> Tensor:
    logit = loss.beta * (chosen.ratio - rejected.ratio)
    return -(1 - loss.label_smoothing) * F.logsigmoid(logit) - loss.label_smoothing * F.logsigmoid(-logit)


def _robust(chosen: Sequences, rejected: Sequences, loss: Robust) -> Tensor:
    logit = loss.beta * (chosen.ratio - rejected.ratio)
    smoothed = -(1 - loss.label_smoothing) * F.logsigmoid(logit) + loss.label_smoothing * F.logsigmoid(-logit)
    return smoothed / (1 - 2 * loss.label_smoothing)


def _ipo(chosen: Sequences, rejected: Sequences, loss: Ipo) -> Tensor:
    return (chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens - 1 / (2 * loss.beta)).square()


def _hinge(chosen: Sequences, rejected: Sequences, loss: Hinge) -> Tensor:
    return torch.relu(1 - loss.beta * (chosen.ratio - rejected.ratio))


def _apo_zero(chosen: Sequences, rejected: Sequences, loss: ApoZero) -> Tensor:
    return 1 - torch.sigmoid(loss.beta * chosen.ratio) + torch.sigmoid(loss.beta * rejected.ratio)


def _sppo(chosen: Sequences, rejected: Sequences, loss: Sppo) -> Tensor:
    goal = 1 / (2 * loss.beta)
    return (chosen.ratio - goal).square() + (rejected.ratio + goal).square()


def _simpo(chosen: Sequences, rejected: Sequences, loss: SimPo) -> Tensor:
    return -F.logsigmoid(loss.beta * (chosen.mean - rejected.mean) - loss.gamma)


def _orpo(chosen: Sequences, rejected: Sequences, loss: Orpo) -> Tensor:
    """The odds ratio alone: the likelihood of chosen tokens is a loss of tokens (`token_weight_T`)."""
    log_odds = chosen.mean - rejected.mean - (log1mexp(chosen.mean) - log1mexp(rejected.mean))
    return -loss.beta * F.logsigmoid(log_odds)


def _kto(true: Sequences, false: Sequences, loss: Kto) -> Tensor:
    gain = 1 - torch.sigmoid(loss.beta * (true.ratio - true.kl))
    pain = 1 - torch.sigmoid(loss.beta * (false.kl - false.ratio))
    return torch.cat([loss.desirable_weight * gain, loss.undesirable_weight * pain])


def _bradley_terry(chosen: Sequences, rejected: Sequences, loss: BradleyTerry) -> Tensor:
    centre = loss.center_coef * (chosen.total + rejected.total).square()
    return centre - F.logsigmoid(chosen.total - rejected.total - chosen.margin)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of x < 0, and its derivative, without cancellation (Mächler 2012). An x that rounding has made 0
    is one just below it."""
    x = x.clamp(max=-1e-9)
    far, near = x.clamp(max=-math.log(2)), x.clamp(min=-math.log(2))
    return torch.where(x < -math.log(2), torch.log1p(-far.exp()), torch.log(-torch.expm1(near)))


# (chosen, rejected, table) → losses to be added up. Of single sequences: those labelled true, those labelled false.
UNIT_LOSSES: Mapping[type[Objective], Callable[[Sequences, Sequences, Any], Tensor]] = {
    Dpo: _dpo,
    Robust: _robust,
    Ipo: _ipo,
    Hinge: _hinge,
    ApoZero: _apo_zero,
    Sppo: _sppo,
    SimPo: _simpo,
    Orpo: _orpo,
    Kto: _kto,
    BradleyTerry: _bradley_terry,
}


def terms_of(objective: Objective) -> list[tuple[float, Objective]]:
    """The terms that are added up, with their weights."""
    if isinstance(objective, Mixture):
        return [(objective.weight * term.weight, term) for term in objective.mixture]
    return [(objective.weight, objective)]


def unit_loss(chosen: Sequences, rejected: Sequences, objective: Objective) -> Tensor:
    """The losses of units, added up."""
    total = chosen.total.new_zeros(())
    for weight, term in terms_of(objective):
        if not isinstance(term, TokenObjective):
            total = total + weight * UNIT_LOSSES[type(term)](chosen, rejected, term).sum()
    return total


def rewards(sequences: Sequences, objective: Objective) -> Tensor:
    """The implicit reward of each: of a mixture by its first term that has one. Of a reward model its score."""
    term: Any = next(term for _, term in terms_of(objective) if not isinstance(term, TokenObjective))
    if term.of_scores:
        return sequences.total
    reward: Tensor = term.beta * (sequences.ratio if term.needs_ref else sequences.mean)
    return reward


def token_weight_T(batch: Batch, objective: Objective, scale: LossScale) -> NDArray[np.float32]:
    """Weight of each token's own loss. Beside losses of pairs only chosen tokens have one, for `nll` and `orpo`."""
    if isinstance(objective, TokenObjective):
        return np.float32(objective.weight) * loss_weight_T(batch, objective.loss_aggregation, scale)
    chosen_T = (batch["loss_mask_T"] != 0) & np.repeat(batch["chosen_B"] != 0, batch["length_B"])
    chosen = Batch({"length_B": batch["length_B"], "loss_mask_T": chosen_T})
    scale = scale.model_copy(update={"num_loss_tokens": scale.num_chosen_tokens, "num_sequences": scale.num_units})
    weight_T = np.zeros(batch.num_tokens, dtype=np.float32)
    for weight, term in terms_of(objective):
        if isinstance(term, Nll | Orpo):
            aggregation = term.loss_aggregation if isinstance(term, Nll) else "token-mean"
            weight_T += np.float32(weight) * loss_weight_T(chosen, aggregation, scale)
    return weight_T


# ── a micro-batch ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class UnitColumns:
    """Hold what a loss of units reads of a micro-batch besides the model's values."""

    count_M: Tensor  # values that this rank has of each sequence, one after another; int64
    facts_4M: Tensor  # as the fields of `Sequences`; fp64
    chosen_U: Tensor  # places in M, those of a pair at the same index; int64
    rejected_U: Tensor
    num_units: int  # of the mini-batch
    group: SequenceGroup  # the ranks that compute this micro-batch; the first of them counts it


@dataclass(frozen=True)
class ObjectiveColumns:
    """Hold what an objective reads at each value. `units` None: nothing is made of sums over sequences. `by_value_N`:
    the derivative of the units' loss, once all values are known."""

    objective: Objective
    weight_N: Tensor
    units: UnitColumns | None = None
    by_value_N: Tensor | None = None

    def settled(self, value_N: Tensor) -> tuple[ObjectiveColumns, Tensor]:
        """Return these columns with the derivative of the units' loss by all values of the micro-batch, and the sums
        over units. All ranks of the group call it; the derivative is by a rank's own values."""
        units, zero = self.units, value_N.new_zeros((), dtype=torch.float64)
        names = dict.fromkeys(self.objective.summed(), zero)
        if units is None:
            return self, torch.stack([*names.values()])
        total_M = torch.segment_reduce(value_N.detach().double(), "sum", lengths=units.count_M, unsafe=True)
        if not units.group.alone:
            dist.all_reduce(total_M, group=units.group.group)
        with torch.enable_grad():
            sequences = Sequences(total_M.requires_grad_(), *units.facts_4M)
            chosen, rejected = sequences.at(units.chosen_U), sequences.at(units.rejected_U)
            loss = unit_loss(chosen, rejected, self.objective) / max(1, units.num_units)
            (by_total_M,) = torch.autograd.grad(loss, total_M)
        by_value_N = torch.repeat_interleave(by_total_M, units.count_M, output_size=len(value_N)).to(value_N.dtype)
        known = replace(self, units=None, by_value_N=by_value_N)
        if units.group.rank == 0:
            with torch.no_grad():
                values = UnitValues(rewards(chosen, self.objective), rewards(rejected, self.objective))
            of_units = [metric.source for metric in self.objective.metrics if metric.reduce in UNIT_REDUCTIONS]
            found = token_values(of_units, values)
            names |= {name: each.sum() for name, each in zip(of_units, found, strict=True)} | {"loss": loss.detach()}
        return known, torch.stack([names[name] for name in self.objective.summed()])

    def backward(
        self, logprob_N: Tensor, entropy_N: Tensor, correct_N: Tensor, a: int, b: int
    ) -> tuple[Tensor, Tensor]:
        """Return the derivative of the loss by log-probs a … b-1, which are given, and the sums over these tokens."""
        weight_N = self.weight_N[a:b]
        if isinstance(self.objective, Dft):
            weight_N = weight_N * logprob_N.exp()
        tokens = ObjectiveTokens(-weight_N * logprob_N, logprob_N, entropy_N, correct_N)
        of_tokens = {metric.source for metric in self.objective.metrics if metric.reduce not in UNIT_REDUCTIONS}
        zero = logprob_N.new_zeros((), dtype=torch.float64)
        names = [name for name in self.objective.summed() if name in of_tokens]
        found = {name: each.double().sum() for name, each in zip(names, token_values(names, tokens), strict=True)}
        sums = torch.stack([found.get(name, zero) for name in self.objective.summed()])
        return -weight_N if self.by_value_N is None else self.by_value_N[a:b] - weight_N, sums


class ObjectiveBatch:
    """Hold what an objective reads of a batch. `group`: the ranks that compute its rows together."""

    def __init__(self, batch: Batch, objective: Objective, scale: LossScale, group: SequenceGroup = ALONE) -> None:
        self._objective, self._scale, self._group = objective, scale, group
        self._weight_T = token_weight_T(batch, objective, scale)
        self._sequence = np.arange(len(batch)) if objective.of_scores else batch.sequence_T  # by `column_N`
        if objective.unit == "token":
            return
        tokens_B = batch.sum_by_sequence("loss_mask_T")
        self._unit_B, self._chosen_B = batch["unit_B"], batch["chosen_B"] != 0
        _check_units(self._unit_B, self._chosen_B, tokens_B, objective)
        self._facts_4B = np.zeros((4, len(batch)))
        self._facts_4B[0] = tokens_B
        if objective.needs_ref:
            ref_T = np.where(batch["loss_mask_T"] != 0, batch["ref_logprob_T"], 0.0)
            self._facts_4B[1] = np.bincount(batch.sequence_T, ref_T, len(batch))
        for at, name in ((2, "kl_B"), (3, "margin_B")):
            if name in objective.columns:
                self._facts_4B[at] = batch[name]

    def columns(self, micro: MicroBatch, put: Put) -> ObjectiveColumns:
        """Return the columns of a micro-batch; one without sequences weighs nothing."""
        if not len(micro.sequence_M):
            return ObjectiveColumns(self._objective, put(np.zeros(len(micro.hidden_N), dtype=np.float32)))
        if self._objective.of_scores:
            weight_N = np.zeros(len(micro.column_N), dtype=np.float32)
        else:
            weight_N = self._weight_T[micro.column_N]
        units = None if self._objective.unit == "token" else self._units(micro, put)
        return ObjectiveColumns(self._objective, put(weight_N), units)

    def _units(self, micro: MicroBatch, put: Put) -> UnitColumns:
        sequence_M = micro.sequence_M
        count_B = np.bincount(self._sequence[micro.column_N], minlength=len(self._unit_B))
        order = np.argsort(self._unit_B[sequence_M], kind="stable")
        chosen = self._chosen_B[sequence_M][order]
        return UnitColumns(
            count_M=put(count_B[sequence_M]),
            facts_4M=put(self._facts_4B[:, sequence_M]),
            chosen_U=put(order[chosen]),
            rejected_U=put(order[~chosen]),
            num_units=self._scale.num_units,
            group=self._group,
        )


def _check_units(
    unit_B: NDArray[np.int64], chosen_B: NDArray[np.bool_], tokens_B: NDArray[np.int64], objective: Objective
) -> None:
    """Raises BatchError for the first unit that the objective cannot compare."""
    units, which = np.unique(unit_B, return_inverse=True)
    chosen_U, rejected_U = (np.bincount(which, side, len(units)) for side in (chosen_B, ~chosen_B))
    if objective.unit == "pair" and len(wrong := np.flatnonzero((chosen_U != 1) | (rejected_U != 1))):
        has = f"{chosen_U[wrong[0]]:.0f} chosen and {rejected_U[wrong[0]]:.0f} rejected sequences"
        raise BatchError(f"unit {units[wrong[0]]} has {has} on this rank; {objective.kind} needs one of each")
    if len(empty := np.flatnonzero(tokens_B == 0)):
        raise BatchError(f"unit {unit_B[empty[0]]} has a sequence without a token to learn from")

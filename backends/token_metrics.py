"""Columns that losses read of the tokens of a chunk, and the metrics that they declare, by `LossMetric.source`.

It is written with operators that torch's tensors and numpy's arrays share, for every train engine. N: loss tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specs.schema.algorithms.algorithm import Loss
from specs.wire.batch import Batch

Array = Any  # torch.Tensor, or NDArray[np.float64] in the fake engine


@dataclass(frozen=True)
class TokenColumns:
    """Hold what a policy loss reads at each loss token besides the model's own numbers."""

    weight_N: Array
    advantage_N: Array
    rollout_logprob_N: Array
    old_logprob_N: Array | None  # where the loss's anchor is "trainer"
    ref_logprob_N: Array | None  # None: no KL term
    of_sequence: Mapping[str, Array] = field(default_factory=dict)  # the loss's sequence columns, at each token
    correction_N: Array | None = None  # None: every token's policy loss counts as it is
    covariant_N: Array | None = None  # 1 where the loss treats a token as one of high covariance, else 0

    @classmethod
    def of(
        cls,
        batch: Batch,
        loss: Loss,
        weight_T: Array,
        of_sequence_T: Mapping[str, Array],
        values: Callable[[Array], Array],
    ) -> TokenColumns:
        """Take those of some tokens from a batch: `values` picks them out of a column [T]."""

        def column(name: str) -> Array | None:
            return values(batch[name]) if name in loss.columns else None

        return cls(
            weight_N=values(weight_T),
            advantage_N=values(batch["advantage_T"]),
            rollout_logprob_N=values(batch["rollout_logprob_T"]),
            old_logprob_N=column("old_logprob_T"),
            ref_logprob_N=column("ref_logprob_T"),
            of_sequence={name: values(value_T) for name, value_T in of_sequence_T.items()},
            correction_N=column("correction_T"),
            covariant_N=column("covariant_T"),
        )

    def each(self, change: Callable[[Array], Array]) -> TokenColumns:
        """Return the same columns, each changed."""
        of_sequence = {name: change(column_N) for name, column_N in self.of_sequence.items()}
        held = {name: column for name, column in vars(self).items() if name != "of_sequence" and column is not None}
        return replace(self, **{name: change(column_N) for name, column_N in held.items()}, of_sequence=of_sequence)

    def slice(self, start: int, stop: int) -> TokenColumns:
        return self.each(lambda column_N: column_N[start:stop])


@dataclass(frozen=True)
class TokenValues:
    """Detached; each is [N]."""

    loss_N: Array  # weighted: their sum is the rank's share of the global loss
    entropy_N: Array  # of the model's distribution, nats
    kl_N: Array  # estimate of KL(actor ‖ ref), 0 without a reference
    log_ratio_N: Array  # log of the ratio that the loss uses, before clipping
    ratio_N: Array
    clipped_N: Array  # bool: the clip decided
    trainer_logprob_N: Array  # before the step's first update
    rollout_logprob_N: Array


@dataclass(frozen=True)
class ValueTokens:
    """Hold what metrics of a value loss read. Detached; each is [N]."""

    loss_N: Array  # weighted: their sum is the rank's share of the global loss
    value_N: Array
    return_N: Array
    clipped_N: Array  # bool: the clip decided


@dataclass(frozen=True)
class ObjectiveTokens:
    """Hold what metrics of an objective read of learned tokens. Detached; each is [N]."""

    loss_N: Array  # weighted, without the loss of units
    logprob_N: Array
    entropy_N: Array
    correct_N: Array  # bool: the token is the likeliest


@dataclass(frozen=True)
class UnitValues:
    """Hold the rewards of chosen and of rejected sequences; of pairs at the same index."""

    chosen_U: Array
    rejected_U: Array


SOURCES: Mapping[str, Callable[[Any], Array]] = {
    "loss": lambda token: token.loss_N,
    "entropy": lambda token: token.entropy_N,
    "kl": lambda token: token.kl_N,
    "clipped": lambda token: token.clipped_N,
    "logprob_gap": lambda token: abs(token.rollout_logprob_N - token.trainer_logprob_N),
    "logprob_gap_max": lambda token: abs(token.rollout_logprob_N - token.trainer_logprob_N),
    "approx_kl": lambda token: token.ratio_N - 1.0 - token.log_ratio_N,  # k3 of KL(anchor ‖ current), Schulman 2020
    "ratio": lambda token: token.ratio_N,
    "value": lambda token: token.value_N,
    "return": lambda token: token.return_N,
    "nll": lambda token: -token.logprob_N,
    "correct": lambda token: token.correct_N,
    "chosen_reward": lambda unit: unit.chosen_U,
    "rejected_reward": lambda unit: unit.rejected_U,
    "margin": lambda unit: unit.chosen_U - unit.rejected_U,
    "accuracy": lambda unit: 0.5 * (1.0 * (unit.chosen_U > unit.rejected_U) + (unit.chosen_U >= unit.rejected_U)),
}


def token_values(names: Iterable[str], tokens: Any) -> list[Array]:
    """Return the values [N] of each."""
    return [SOURCES[name](tokens) for name in names]

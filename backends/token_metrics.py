"""Per-token values of the metrics that losses declare, by `LossMetric.source`.

Functions of what is known of the tokens of a chunk, written with operators that torch's tensors and numpy's arrays
share: every train engine reports them. N: loss tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specs.errors import RlctlError
from specs.schema.algorithms.algorithm import AnyLoss

Array = Any  # torch.Tensor, or NDArray[np.float64] in the fake engine


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
    """Name → values [N]. Raises RlctlError for one that has no function."""
    names = list(names)
    if missing := [name for name in names if name not in SOURCES]:
        raise RlctlError(
            f"no function for the token metric {', '.join(missing)}",
            hint=f"add it to SOURCES in backends/token_metrics.py, which has {', '.join(SOURCES)}",
        )
    return [SOURCES[name](tokens) for name in names]


def no_function(loss: AnyLoss, table: Mapping[type[Any], Any], where: str) -> RlctlError:
    """The error of a loss that an engine cannot compute."""
    known = ", ".join(str(one.model_fields["kind"].default) for one in table)
    return RlctlError(f"no function for the loss {loss.model_dump()['kind']}", hint=f"{where} has {known}")

"""Nothing is learned from numbers that are NaN or infinite: one in a step ends the run before the optimizer step, and
the error names the sample that brought it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.loop.logprob_gap import worst_samples
from specs.errors import NotFiniteError
from specs.wire.batch import Batch

# What an update reads, token by token: whose number it is, and what to look at.
_LOGPROBS = "its weights or its activations overflow: look at its dtype, at actor.optimizer.lr and at the last steps"
CHECKED = {
    "rollout_logprob_T": ("the rollout's log-prob", f"{_LOGPROBS}, and at sync/probe_gap of the step before"),
    "old_logprob_T": ("the actor's log-prob", _LOGPROBS),
    "ref_logprob_T": ("the reference's log-prob", _LOGPROBS),
    "value_T": ("the critic's value", "its weights or activations overflow: look at its dtype and critic.optimizer.lr"),
    "advantage_T": ("the advantage", "look at the scores of its group: they are too far apart"),
    "correction_T": ("the off-policy weight", "look at rollout/logprob_gap of the last steps"),
    "return_T": ("the return", "look at the scores and the critic's values of this sample"),
}


_STOPPED = "The run stopped before it learned from these samples"


def check_batch(batch: Batch, reward_B: NDArray[np.float32], step: int) -> None:
    """Checks scores and loss tokens before anything is learned from them. Raises NotFiniteError."""
    for name, (what, hint) in CHECKED.items():
        if name in batch:
            bad_T = ~np.isfinite(batch[name]) & (batch["loss_mask_T"] > 0)
            if bad_T.any():
                raise _of_token(batch, name, bad_T, step, what, hint)
    bad_B = np.flatnonzero(~np.isfinite(reward_B))
    if len(bad_B):
        worst = bad_B[0]
        raise NotFiniteError(
            f"step {step}: the score of sample id {batch['id_B'][worst]} is {reward_B[worst]}{_more(len(bad_B))}. "
            f"{_STOPPED}",
            hint="look at reward.fallback and at what the reward role answers",
        )


def check_sums(reports: Iterable[Mapping[str, float]], step: int) -> str:
    """Describe what of the ranks' sums is not finite; return "" where all is."""
    bad = {name: value for report in reports for name, value in report.items() if not math.isfinite(value)}
    return f"step {step}: {', '.join(f'{name} is {value}' for name, value in bad.items())}" if bad else ""


def of_update(found: str, batch: Batch, trainer_logprob_T: NDArray[np.floating[Any]]) -> NotFiniteError:
    """The error of a mini-batch whose loss is not finite though all that it was computed from is. The sample to blame
    is the one whose log-probs are not finite now, or else moved most since they were sampled."""
    worst = worst_samples(batch, trainer_logprob_T)[0]
    return NotFiniteError(
        f"{found} in the update. Worst sample: id {batch['id_B'][worst.index]}, whose log-prob the actor moved by up "
        f"to {worst.largest:.3g} nats (loss token {worst.position}). {_STOPPED}",
        hint="the actor's weights or activations overflow: lower actor.optimizer.lr or the rewards, or continue "
        "from an earlier checkpoint",
    )


def of_value_update(found: str, batch: Batch) -> NotFiniteError:
    """Return the error of a critic's mini-batch. To blame is the sample whose return is furthest from its value."""
    error_T = np.abs(batch["return_T"].astype(np.float64) - batch["value_T"])
    token = int(np.argmax(np.where(batch["loss_mask_T"] > 0, error_T, 0.0)))
    sample = int(np.searchsorted(batch.offsets, token, side="right")) - 1
    return NotFiniteError(
        f"{found} in the critic's update. Worst sample: id {batch['id_B'][sample]}, where the return is up to "
        f"{error_T[token]:.3g} from the value. {_STOPPED}",
        hint="the critic's weights or activations overflow: lower critic.optimizer.lr or the rewards, or continue "
        "from an earlier checkpoint",
    )


def of_rows_update(found: str, batch: Batch, role: str) -> NotFiniteError:
    """Return the error of a step that learns from rows. Blames the reference where its log-probs are not
    finite, else the model that learns."""
    if "ref_logprob_T" in batch and not np.isfinite(batch["ref_logprob_T"][batch["loss_mask_T"] > 0]).all():
        what, hint = CHECKED["ref_logprob_T"]
        return NotFiniteError(f"{found} in the update, and so is {what}. {_STOPPED}", hint=hint)
    return NotFiniteError(
        f"{found} in the update. {_STOPPED}",
        hint=f"the model's weights or activations overflow: lower {role}.optimizer.lr, or continue from an earlier "
        "checkpoint",
    )


def _of_token(batch: Batch, name: str, bad_T: NDArray[np.bool_], step: int, what: str, hint: str) -> NotFiniteError:
    token = int(np.flatnonzero(bad_T)[0])
    sample = int(np.searchsorted(batch.offsets, token, side="right")) - 1
    position = int((batch["loss_mask_T"][batch.offsets[sample] : token] > 0).sum())
    samples = len(np.unique(np.searchsorted(batch.offsets, np.flatnonzero(bad_T), side="right")))
    return NotFiniteError(
        f"step {step}: {what} of sample id {batch['id_B'][sample]} is {batch[name][token]} at loss token {position}"
        f"{_more(samples)}. {_STOPPED}",
        hint=hint,
    )


def _more(samples: int) -> str:
    return f" (so it is in {samples} samples)" if samples > 1 else ""

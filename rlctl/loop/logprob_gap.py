"""How far sampler and trainer may disagree about the tokens that were sampled, before anything is learned from them.

The gap of a token is |log-prob of the sampler - of the trainer before the update|. Its mean has a budget in the spec:
over `rollout.warn_logprob_gap` the run says so once, over `rollout.max_logprob_gap` it stops, and leaves the batch in
`RUN/gap_step_NNNNNN.safetensors`, which `scripts/rescore.py` scores again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specs.errors import LogprobGapError
from specs.json_file import replace_file
from specs.schema.metric import Metric
from specs.schema.recipes import RlSpec
from specs.schema.roles import ACTOR, ROLLOUT
from specs.wire.batch import Batch

KEPT_COLUMNS = ("tokens_T", "loss_mask_T", "rollout_logprob_T", "id_B", "row_B", "group_B", "rollout_B")
HEADER = "rlctl_gap"  # key of the JSON in the file's metadata

_HINT = (
    "look for what makes the two compute differently: stale weights (sync/probe_gap of the step before), precision "
    "(rollout.dtype, actor.dtype), sampling that the trainer does not repeat (rollout.temperature, rollout.top_p, "
    "rollout.top_k), attention (rollout.attn_implementation). {rescore}; if the gap is meant, raise "
    "rollout.max_logprob_gap"
)

# Nats by which a step of learning may move the mean log-prob of the sampled tokens before it is said, or stops the run.
_LEARNED_A_STEP_WARN, _LEARNED_A_STEP_STOP = 0.5, 1.0


def gap_limits(spec: RlSpec) -> tuple[float | None, float | None]:
    """Return the mean gaps between sampler and trainer above which to warn and to stop; None: never.

    With `top_p` the sampler's log-probs are those of a set with at least that much probability, so that they lie up to
    -ln(top_p) above the trainer's. `top_k` has no such bound. Where sampling runs ahead, the gap also holds what the
    actor has learned since.
    """
    rollout = spec.rollout
    warn_at, limit = rollout.warn_logprob_gap, rollout.max_logprob_gap
    if rollout.top_k == 0:
        cut = -math.log(rollout.top_p)
        exact = spec.dtype(ROLLOUT) == spec.dtype(ACTOR) == "fp32"
        warn_at = warn_at or cut + (1e-4 if exact else 0.03) + _LEARNED_A_STEP_WARN * rollout.max_staleness
        limit = limit or cut + (1e-2 if exact else 0.3) + _LEARNED_A_STEP_STOP * rollout.max_staleness
    return warn_at, limit


@dataclass(frozen=True)
class Gap:
    """The gap over sampled tokens, in nats."""

    mean: float
    largest: float

    @staticmethod
    def of_batch(batch: Batch, trainer_logprob_T: NDArray[np.floating[Any]]) -> Gap:
        gap_T = np.abs(batch["rollout_logprob_T"].astype(np.float64) - trainer_logprob_T)
        gap_N = gap_T[batch["loss_mask_T"] > 0]
        return Gap(float(gap_N.mean()), float(gap_N.max())) if len(gap_N) else Gap(0.0, 0.0)

    @staticmethod
    def of_sums(ranks: Iterable[Mapping[str, float]]) -> Gap:
        """From what the ranks' `forward_backward` returned for the step's only mini-batch."""
        ranks = list(ranks)
        tokens = sum(sums["tokens"] for sums in ranks)
        total = sum(sums["logprob_gap"] for sums in ranks)
        return Gap(total / max(tokens, 1.0), float(np.max([sums["logprob_gap_max"] for sums in ranks])))


@dataclass(frozen=True)
class SampleGap:
    """One sample: its place in the batch, its mean and largest gap, and at which of its loss tokens that is, counted
    from 0: what lies between completions does not count."""

    index: int
    mean: float
    largest: float
    position: int


METRICS: tuple[Metric, ...] = (
    Metric(
        name="rollout/logprob_gap_warnings",
        unit="steps",
        meaning="Of this attempt so far, with a gap over `rollout.warn_logprob_gap`.",
        when="steps in which the actor learns",
    ),
)


class GapLimits:
    """Watches the gap of every step. `folder` is where a batch that breaks it is kept; `about` goes with it."""

    def __init__(
        self,
        warn_at: float | None,
        limit: float | None,
        folder: Path,
        about: Mapping[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        self.warn_at, self.limit, self.folder, self.about = warn_at, limit, folder, dict(about)
        self._warn = warn
        self._steps_over = 0

    def broken_by(self, gap: Gap) -> bool:
        """Return whether the run must not learn from these samples. A gap that is not a number always breaks it."""
        return self.limit is not None and not gap.mean <= self.limit

    def note(self, metrics: Mapping[str, Any], step: int) -> dict[str, int]:
        """Warn, once in a run, of a step that is over the first threshold; the count of such steps, as a metric.
        Nothing where the actor did not learn."""
        if "rollout/logprob_gap" not in metrics:
            return {}
        mean, largest = metrics["rollout/logprob_gap"], metrics["rollout/logprob_gap_max"]
        if self.warn_at is not None and not mean <= self.warn_at:
            self._steps_over += 1
            if self._steps_over == 1:
                self._warn(
                    f"step {step}: sampler and trainer differ by {mean:.3g} nats on the sampled tokens (mean; max "
                    f"{largest:.3g}), over rollout.warn_logprob_gap = {self.warn_at:.3g}. Said once; "
                    "rollout/logprob_gap_warnings counts on"
                )
        return {"rollout/logprob_gap_warnings": self._steps_over}

    def stop(self, gap: Gap, batch: Batch, trainer_logprob_T: NDArray[np.float32], step: int) -> LogprobGapError:
        """The error that ends the run. Keeps the batch first, with the log-probs of both."""
        path = self.folder / f"gap_step_{step:06d}.safetensors"
        written = ""
        try:
            write_batch(path, batch, trainer_logprob_T, {**self.about, "step": step, "mean": gap.mean})
        except OSError as error:
            written = f"the batch could not be kept: {error}"
        worst = worst_samples(batch, trainer_logprob_T)[0]
        return LogprobGapError(
            f"step {step}: sampler and trainer disagree about the sampled tokens: mean |Δ log-prob| {gap.mean:.3g}, "
            f"max {gap.largest:.3g}; allowed is a mean of rollout.max_logprob_gap = {self.limit:.3g}. Worst sample: "
            f"id {batch['id_B'][worst.index]} (mean {worst.mean:.3g}, max {worst.largest:.3g} at loss "
            f"token {worst.position}). The run stopped before it learned from this batch",
            hint=_HINT.format(rescore=written or f"`python scripts/rescore.py {path}` scores the batch again"),
        )


def worst_samples(batch: Batch, trainer_logprob_T: NDArray[np.floating[Any]]) -> list[SampleGap]:
    """Every sample with loss tokens, the widest mean gap first."""
    gap_T = np.abs(batch["rollout_logprob_T"].astype(np.float64) - trainer_logprob_T)
    gap_T[np.isnan(gap_T)] = np.inf
    found = []
    offsets = batch.offsets
    for index in range(len(batch)):
        part = slice(offsets[index], offsets[index + 1])
        gap_N = gap_T[part][batch["loss_mask_T"][part] > 0]
        if len(gap_N):
            found.append(SampleGap(index, float(gap_N.mean()), float(gap_N.max()), int(gap_N.argmax())))
    return sorted(found, key=lambda sample: -sample.mean)


def write_batch(path: Path, batch: Batch, trainer_logprob_T: NDArray[np.float32], about: Mapping[str, Any]) -> None:
    """Columns and both log-probs as safetensors; `about` as JSON in its header. Whole, or not there."""
    from safetensors.numpy import save

    columns = {**batch.only(KEPT_COLUMNS).columns, "trainer_logprob_T": trainer_logprob_T}
    blob = save({name: np.ascontiguousarray(column) for name, column in columns.items()}, {HEADER: json.dumps(about)})
    replace_file(path, blob)

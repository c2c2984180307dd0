"""One step's line in `metrics.jsonl`: every metric says here how it is reduced.

Engines report sums over their tokens and maxima; those of all ranks and updates are joined, then divided once. What a
loss reports, and how that is reduced, is declared beside its table (`specs/schema/algorithms/algorithm_tables.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlctl.loop.advantages import silent_group_share
from rlctl.loop.rollouts import Rollouts
from specs.schema.algorithms.algorithm import Loss, LossMetric
from specs.wire.bodies import Stepped

if TYPE_CHECKING:
    from rlctl.loop.sampling import Scored
    from rlctl.loop.sync import SyncReport
    from specs.wire.batch import Batch


@dataclass(frozen=True)
class RankReport:
    """What one rank says of one mini-batch: sums and maxima over its loss tokens, and its optimizer step."""

    sums: Mapping[str, float]
    stepped: Stepped


RankReports = Sequence[Sequence[RankReport]]  # [optimizer step][rank]


def collect(
    step: int,
    batch: Batch,
    scored: Scored,
    loss: Loss,
    updates: RankReports,
    gaps: RankReports,
    synced: SyncReport | None,
    times: Mapping[str, float],
) -> dict[str, Any]:
    """The step's metrics, ready to be written. Each rollout counts once, with the tokens of all its samples. `gaps`:
    those of `updates` whose sampler gap counts. `synced` None: the rollout keeps the weights that it has. `times`: what
    the clock says of the step."""
    rollouts = Rollouts.of(batch["rollout_B"])
    tokens_R = rollouts.sums(batch.sum_by_sequence("loss_mask_T"))
    reward_R, thrown = scored.by_rollout(batch["rollout_B"]), scored.thrown
    silent = silent_group_share(scored.reward_B, batch["group_B"].astype(np.int64))
    if thrown is not None:  # what the policy gets, not what it learns from
        reward_R = np.concatenate([reward_R, np.array(thrown.reward_R, dtype=np.float32)])
        groups = len(np.unique(batch["group_B"]))
        silent = (silent * groups + thrown.groups) / (groups + thrown.groups)
    return {
        "step": step,
        "reward/mean": float(reward_R.mean(dtype=np.float64)),
        "reward/std": float(reward_R.std(dtype=np.float64)),
        "reward/silent_groups": silent,
        **{f"reward/{name}": value for name, value in scored.terms.items()},
        **(thrown.metrics() if thrown else {}),
        **{f"reward/failed_{cause}": count for cause, count in scored.failures.items()},
        **{f"reward/{name}": value for name, value in scored.counts.items()},
        **update_metrics(loss, updates, gaps),
        "rollout/length_mean": float(tokens_R.mean()),
        "rollout/length_max": int(tokens_R.max()),
        "rollout/finished": float(rollouts.all(batch["finished_B"] != 0).mean()),
        "rollout/tokens": int(tokens_R.sum()),
        **(synced.metrics() if synced else {}),
        **times,
        "perf/tokens_per_s": batch.num_tokens / times["time/step_s"],
    }


def idle_s(busy: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Seconds between `start` and `end` (monotonic clock) in which no rank was at work: the driver and the channel."""
    idle, reached = 0.0, start
    for begin, finish in sorted(busy):
        idle += max(0.0, min(begin, end) - reached)
        reached = max(reached, finish)
    return idle + max(0.0, end - reached)


def update_metrics(loss: Loss, updates: RankReports, gaps: RankReports) -> dict[str, Any]:
    """What the loss declares, and how the updates went. Gradient norms are a mean over optimizer steps."""
    reports = [report for ranks in updates for report in ranks]
    first = [ranks[0] for ranks in updates]
    norms = [report.stepped.grad_norm for report in first if math.isfinite(report.stepped.grad_norm)]
    declared = {metric.name: _reduced(metric, gaps if metric.before_learning else updates) for metric in loss.metrics}
    return {
        **declared,
        **({"actor/grad_norm": float(np.mean(norms))} if norms else {}),
        "actor/lr": first[-1].stepped.lr,
        "actor/skipped_updates": sum(report.stepped.skipped for report in first),
        "perf/micro_batches": int(sum(report.sums["micro_batches"] for report in reports)),
        "perf/micro_batch_tokens_max": int(max(report.sums["micro_batch_tokens_max"] for report in reports)),
        "mem/actor_peak_GiB": max(report.stepped.peak_GiB for report in reports),
    }


def _reduced(metric: LossMetric, updates: RankReports) -> float:
    """One number of what all ranks reported of these updates."""
    reports = [report.sums for ranks in updates for report in ranks]
    values = [report[metric.source] for report in reports]
    if metric.reduce == "token_max":
        return float(np.max(values))
    if metric.reduce == "update_mean":
        return float(sum(values, 0.0) / len(updates))
    return float(sum(values, 0.0) / max(sum(report["tokens"] for report in reports), 1.0))

"""One step's line in `metrics.jsonl`: every metric says here how it is reduced.

Engines report sums over their tokens and maxima; those of all ranks and updates are joined, then divided once. What a
loss reports, and how that is reduced, is declared beside its table (`specs/schema/algorithms/algorithm_tables.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from rlctl.loop.rollouts import GradedGroups, Rollouts
from specs.schema.algorithms.algorithm import UNIT_REDUCTIONS, AnyLoss, Loss, LossMetric
from specs.schema.environment import STOP_REASONS, UNSCORED
from specs.schema.metric import Metric, metrics
from specs.schema.roles import RoleName
from specs.wire.bodies import Stepped

if TYPE_CHECKING:
    from rlctl.loop.sampling import Scored
    from rlctl.loop.sync import SyncReport
    from specs.wire.batch import Batch


METRICS: tuple[Metric, ...] = (
    *metrics(
        "",
        {
            "step": "Number of the step, from 1 on; 0 is the evaluation before the first.",
            "reward/mean": "Mean score of the step's graded completions, each term times its weight.",
            "reward/std": "Standard deviation of the same scores.",
            "perf/micro_batches": "Micro-batches of all ranks in the step's updates.",
            "perf/micro_batch_tokens_max [tokens]": "The largest of them.",
            "perf/tokens_per_s [tokens/s]": "Tokens of prompts and completions, by `time/step_s`.",
            "rollout/length_mean [tokens]": "Mean length of the completions that the step keeps.",
            "rollout/length_max [tokens]": "The longest of them.",
            "rollout/finished [share]": "Completions that ended by themselves, before any limit.",
            "rollout/repeated [share]": "Completions that repeat, token by token, an earlier one of their group.",
            "rollout/tokens [tokens]": "Of all completions that the step keeps.",
        },
    ),
    Metric(
        name="reward/silent_groups",
        unit="share",
        meaning="Groups whose graded completions all score the same: of the reward they teach nothing.",
        when="the advantage learns nothing from equal scores of a group",
    ),
    Metric(
        name="reward/lone_groups",
        unit="groups",
        meaning="With too few graded completions to compare any: their advantages are 0.",
        when="the algorithm compares the completions of a group",
    ),
    Metric(
        name="<role>/grad_norm",
        meaning="Norm of the gradient before it is clipped, mean over the step's optimizer steps.",
        when="steps in which the role learns, where one was finite",
    ),
    *metrics(
        "steps in which the role learns",
        {
            "<role>/lr": "Learning rate of the step's last optimizer step.",
            "<role>/skipped_updates [optimizer steps]": "Left out because the gradient was not finite.",
            "mem/<role>_peak_GiB [GiB]": "The most that a rank held in an optimizer step: device, or host on the CPU.",
        },
    ),
    Metric(
        name="perf/imbalance",
        unit="ratio",
        meaning="FLOPs of the rank with most work by the average of all: how much longer the others wait.",
        when="a role that learns has several ranks, and its engine counts FLOPs",
    ),
)


@dataclass(frozen=True)
class RankReport:
    """A rank's report of one mini-batch: sums and maxima over its loss tokens, and its optimizer step."""

    sums: Mapping[str, float]
    stepped: Stepped


_NO_STEP = Stepped(grad_norm=0.0, lr=0.0, skipped=False, peak_GiB=0.0)
RankReports = Sequence[Sequence[RankReport]]  # [optimizer step][rank]
Updates = dict[RoleName, list[list[RankReport]]]  # of each role that learned in a step


def collect(
    step: int,
    batch: Batch,
    scored: Scored,
    losses: Mapping[RoleName, AnyLoss],
    updates: Mapping[RoleName, RankReports],
    synced: SyncReport | None,
    times: Mapping[str, float],
    min_group: int = 1,
    equal_is_silent: bool = True,
) -> dict[str, Any]:
    """The step's metrics, ready to be written. Each rollout counts once, with the tokens of all its samples. `losses`:
    of each role that is in `updates`. `synced` None: the rollout keeps the weights that it has. `times`: what
    the clock says of the step. `min_group`, `equal_is_silent`: of the advantage."""
    rollouts = Rollouts.of(batch["rollout_B"])
    tokens_R = rollouts.sums(batch.sum_by_sequence("loss_mask_T"))
    reward_R, thrown = scored.by_rollout(batch["rollout_B"]), scored.thrown
    graded = GradedGroups.of(batch["group_B"], batch["rollout_B"], scored.reward_B, scored.scored_B)
    groups, silent = len(graded.group_G), float(np.mean(~graded.differ_G))
    if thrown is not None:  # what the policy gets, not what it learns from
        silent = (silent * groups + thrown.groups) / (groups + thrown.groups)
    return {
        "step": step,
        "reward/mean": float(reward_R.mean(dtype=np.float64)),
        "reward/std": float(reward_R.std(dtype=np.float64)),
        **({"reward/silent_groups": silent} if equal_is_silent else {}),
        **({"reward/lone_groups": int((graded.rollouts_G < min_group).sum())} if min_group > 1 else {}),
        **{f"reward/{name}": value for name, value in scored.mean_terms(batch["rollout_B"]).items()},
        **(thrown.metrics() if thrown else {}),
        **(scored.greedy.metrics() if scored.greedy else {}),
        **{f"reward/failed_{cause}": count for cause, count in scored.failures.items()},
        **{f"reward/{name}": value for name, value in scored.counts.items()},
        **of_updates(losses, updates),
        "rollout/length_mean": float(tokens_R.mean()),
        "rollout/length_max": int(tokens_R.max()),
        "rollout/finished": float(rollouts.all(batch["finished_B"] != 0).mean()),
        "rollout/repeated": _repeated(batch),
        "rollout/tokens": int(tokens_R.sum()),
        **episode_metrics(batch),
        **(synced.metrics() if synced else {}),
        **times,
        "perf/tokens_per_s": batch.num_tokens / times["time/step_s"],
    }


def episode_metrics(batch: Batch) -> dict[str, float]:
    """Return what is counted of episodes, each once; nothing of samples without an environment."""
    if "stop_B" not in batch:
        return {}
    first_R = Rollouts.of(batch["rollout_B"]).first_R
    stop_R = batch["stop_B"][first_R]
    shares = np.bincount(stop_R, minlength=len(STOP_REASONS)) / len(first_R)
    return {
        "episode/turns_mean": float(batch["turns_B"][first_R].mean()),
        "episode/tool_calls_mean": float(batch["tool_calls_B"][first_R].mean()),
        "episode/tool_errors": int(batch["tool_errors_B"][first_R].sum()),
        "episode/parse_errors": int(batch["parse_errors_B"][first_R].sum()),
        "episode/lost": int(np.isin(stop_R, UNSCORED).sum()),
        **{f"episode/stop_{reason}": float(share) for reason, share in zip(STOP_REASONS, shares, strict=True)},
        "time/environment_s": float(batch["environment_s_B"][first_R].sum()),
    }


def of_updates(losses: Mapping[RoleName, AnyLoss], updates: Mapping[RoleName, RankReports]) -> dict[str, Any]:
    """Return what the losses of roles that learned declare, and what all ranks computed together."""
    return {
        **{key: value for role in updates for key, value in update_metrics(role, losses[role], updates[role]).items()},
        **_imbalance(updates.values()),
        **_work([report for reports in updates.values() for ranks in reports for report in ranks]),
    }


def of_loss(loss: AnyLoss, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return what a loss declares, of the ranks' reports of one batch that nothing learned from."""
    reports = [RankReport(of_rank, _NO_STEP) for of_rank in sums]
    return _declared((metric, [reports]) for metric in loss.metrics)


def _repeated(batch: Batch) -> float:
    """Return the share of rollouts in which nothing else was written than in an earlier one of their group."""
    tokens_T = batch["tokens_T"][batch["loss_mask_T"] > 0]
    whole, ends_B = tokens_T.tobytes(), np.cumsum(batch.sum_by_sequence("loss_mask_T")) * tokens_T.itemsize
    pieces = (whole[begin:end] for begin, end in pairwise([0, *ends_B.tolist()]))
    written: dict[tuple[int, int], bytes] = {}  # by group and rollout
    for group, rollout, piece in zip(batch["group_B"].tolist(), batch["rollout_B"].tolist(), pieces, strict=True):
        written[group, rollout] = written.get((group, rollout), b"") + piece
    return 1.0 - len({(group, text) for (group, _), text in written.items()}) / len(written)


def idle_s(busy: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Seconds between `start` and `end` (monotonic clock) in which no rank was at work: the driver and the channel."""
    idle, reached = 0.0, start
    for begin, finish in sorted(busy):
        idle += max(0.0, min(begin, end) - reached)
        reached = max(reached, finish)
    return idle + max(0.0, end - reached)


def update_metrics(role: RoleName, loss: AnyLoss, updates: RankReports) -> dict[str, Any]:
    """Return what the loss declares, and how the updates went. Gradient norms are a mean over optimizer steps."""
    prefix = f"{role}/"
    # Against the sampler the gap of later updates also holds what this step has learned.
    gaps = updates[:1] if isinstance(loss, Loss) and loss.anchor == "sampler" else updates
    first = [ranks[0] for ranks in updates]
    norms = [report.stepped.grad_norm for report in first if math.isfinite(report.stepped.grad_norm)]
    declared = _declared((metric, gaps if metric.before_learning else updates) for metric in loss.metrics)
    return {
        **declared,
        **({f"{prefix}grad_norm": float(np.mean(norms))} if norms else {}),
        f"{prefix}lr": first[-1].stepped.lr,
        f"{prefix}skipped_updates": sum(report.stepped.skipped for report in first),
        f"mem/{role}_peak_GiB": max(report.stepped.peak_GiB for ranks in updates for report in ranks),
    }


def _imbalance(updates: Iterable[RankReports]) -> dict[str, float]:
    """FLOPs of the rank with most work by the average of all, over the optimizer steps of the role where that is most:
    how much longer the others wait. Left out where no role has several ranks that count them."""
    found = []
    for of_role in updates:
        flops = np.array([[report.sums.get("flops", 0.0) for report in ranks] for ranks in of_role])
        if flops.shape[1] > 1 and flops.sum() > 0:
            found.append(float(flops.max(1).sum() / flops.mean(1).sum()))
    return {"perf/imbalance": max(found)} if found else {}


def _work(reports: Sequence[RankReport]) -> dict[str, int]:
    """Return what all ranks computed together."""
    return {
        "perf/micro_batches": int(sum(report.sums["micro_batches"] for report in reports)),
        "perf/micro_batch_tokens_max": int(
            max((report.sums["micro_batch_tokens_max"] for report in reports), default=0)
        ),
    }


def _declared(metrics: Iterable[tuple[LossMetric, RankReports]]) -> dict[str, float]:
    return {metric.name: value for metric, updates in metrics if (value := _reduced(metric, updates)) is not None}


def _reduced(metric: LossMetric, updates: RankReports) -> float | None:
    """Return one number of what all ranks reported of these updates; None for a mean over sequences of which there are
    none, such as those labelled false."""
    reports = [report.sums for ranks in updates for report in ranks]
    values = [report[metric.source] for report in reports]
    if metric.reduce == "token_max":
        return float(np.max(values))
    if metric.reduce == "update_mean":
        return float(sum(values, 0.0) / len(updates))
    count = UNIT_REDUCTIONS.get(metric.reduce, "tokens")
    total = sum(report.get(count, 0.0) for report in reports)
    return float(sum(values, 0.0) / max(total, 1.0)) if total or metric.reduce not in UNIT_REDUCTIONS else None

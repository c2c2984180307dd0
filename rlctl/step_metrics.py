"""One step's line in `metrics.jsonl`: every metric says here how it is reduced.

Engines report sums over their tokens; sums of all ranks and updates are added, then divided once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlctl.advantages import silent_group_share
from rlctl.gap_budget import Gap

if TYPE_CHECKING:
    from rlctl.sampling import Scored
    from rlctl.sync import SyncReport
    from specs.batch import Batch

RankReports = Sequence[Sequence[Mapping[str, Any]]]  # [optimizer step][rank]

# metric → the sum it comes from; each is divided by the number of loss tokens
PER_TOKEN = {
    "actor/entropy": "entropy",
    "actor/kl": "kl",
    "actor/clip_fraction": "clipped",
    "actor/approx_kl": "approx_kl",
    "actor/ratio": "ratio",
}
SUMMED = ("loss", "tokens", "micro_batches", *PER_TOKEN.values())


@dataclass
class Clock:
    """Seconds by phase of one step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def collect(
    step: int,
    batch: Batch,
    scored: Scored,
    updates: RankReports,
    gaps: RankReports,
    synced: SyncReport | None,
    seconds: Mapping[str, float],
    total_s: float,
) -> dict[str, Any]:
    """The step's metrics, ready to be written. `gaps`: those of `updates` whose sampler gap counts. `synced` None: the
    rollout keeps the weights that it has."""
    tokens_B = batch.sum_by_sequence("loss_mask_T")
    valid_B = scored.scored_B
    reward_B = scored.reward_B[valid_B] if valid_B.any() else scored.reward_B
    rollout_s, reward_s = seconds["rollout"], seconds.get("reward", 0.0)
    return {
        "step": step,
        "reward/mean": float(reward_B.mean()),
        "reward/std": float(reward_B.std()),
        "reward/silent_groups": silent_group_share(scored.reward_B, batch["group_B"].astype(np.int64)),
        **{f"reward/{name}": value for name, value in scored.terms.items()},
        **{f"reward/failed_{cause}": count for cause, count in scored.failures.items()},
        **update_metrics(updates, gaps),
        "rollout/length_mean": float(tokens_B.mean()),
        "rollout/length_max": int(tokens_B.max()),
        "rollout/finished": float(batch["finished_B"].astype(np.float64).mean()),
        "rollout/tokens": int(tokens_B.sum()),
        **(synced.metrics() if synced else {}),
        "time/step_s": total_s,
        "time/rollout_s": rollout_s - reward_s,
        "time/reward_s": reward_s,
        "time/update_s": seconds["update"],
        "time/sync_s": seconds.get("sync", 0.0),
        "perf/tokens_per_s": batch.num_tokens / total_s,
    }


def idle_s(busy: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Seconds between `start` and `end` (monotonic clock) in which no rank was at work: the driver and the channel."""
    idle, reached = 0.0, start
    for begin, finish in sorted(busy):
        idle += max(0.0, min(begin, end) - reached)
        reached = max(reached, finish)
    return idle + max(0.0, end - reached)


def update_metrics(updates: RankReports, gaps: RankReports) -> dict[str, Any]:
    """Loss and gradient norm are means over optimizer steps; token metrics are over all tokens of all of them."""
    sums = dict.fromkeys(SUMMED, 0.0)
    widest = 0.0
    gap = Gap.of_sums(report["sums"] for ranks in gaps for report in ranks)
    for ranks in updates:
        for report in ranks:
            for name in SUMMED:
                sums[name] += report["sums"][name]
            widest = max(widest, report["sums"]["micro_batch_tokens_max"])
    tokens = max(sums["tokens"], 1.0)
    first = [ranks[0] for ranks in updates]
    return {
        "actor/loss": sums["loss"] / len(updates),
        "actor/grad_norm": float(np.mean([report["grad_norm"] for report in first])),
        "actor/lr": first[-1]["lr"],
        "actor/skipped_updates": sum(bool(report["skipped"]) for report in first),
        **{metric: sums[name] / tokens for metric, name in PER_TOKEN.items()},
        "rollout/logprob_gap": gap.mean,
        "rollout/logprob_gap_max": gap.largest,
        "perf/micro_batches": int(sums["micro_batches"]),
        "perf/micro_batch_tokens_max": int(widest),
        "mem/actor_peak_GiB": max(report["peak_GiB"] for ranks in updates for report in ranks),
    }

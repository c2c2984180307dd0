"""Compute an evaluation's metrics: the mean of everything, and pass@k.

pass@k is the chance that one of k completions of a prompt passes. It is estimated from n ≥ k completions of which c
passed, without bias: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating large language models trained on code").
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlctl.loop.rollouts import Rollouts, first_valid
from rlctl.loop.step_metrics import episode_metrics
from specs.schema.metric import Metric, metrics

if TYPE_CHECKING:
    from rlctl.loop.sampling import Drawn
    from specs.schema.eval_sets import PassThreshold

METRICS: tuple[Metric, ...] = (
    *metrics(
        "steps with an evaluation",
        {
            "eval/<set>/reward_mean": "Mean score of the set's graded completions, each term times its weight.",
            "eval/<set>/reward_stderr": "Its standard error over the prompts; 0 of a single prompt.",
            "eval/<set>/finished [share]": "Completions that ended by themselves.",
            "eval/<set>/length_mean [tokens]": "Mean length of the completions.",
            "eval/<set>/failed": "Completions that could not be graded.",
        },
    ),
    Metric(
        name="eval/<set>/pass@<k>",
        unit="share",
        meaning="Chance that one of k completions of a prompt passes, mean over the prompts.",
        when="steps with an evaluation, where the set says what passes",
    ),
)


def evaluated(drawn: Drawn, passes: PassThreshold | None) -> dict[str, float]:
    """Metrics below `eval/<name>/`: the mean reward, its standard error over the prompts and the mean of each term, how
    many prompts are solved, how many completions end by themselves, how many could not be graded."""
    batch, scored = drawn.batch, drawn.scored
    rollouts = Rollouts.of(batch["rollout_B"])
    graded_R = first_valid(batch["rollout_B"], scored.scored_B)
    graded_R = graded_R if len(graded_R) else rollouts.first_R  # with the fallback, where none could be graded
    reward_R, group_R = scored.reward_B[graded_R].astype(np.float64), batch["group_B"][graded_R]
    solved = pass_at_k(drawn, passes, rollouts.first_R) if passes is not None else {}
    return {
        "reward_mean": float(reward_R.mean()),
        "reward_stderr": standard_error(reward_R, group_R),
        **scored.mean_terms(batch["rollout_B"]),
        **solved,
        "finished": float(rollouts.all(batch["finished_B"] != 0).mean()),
        "length_mean": float(rollouts.sums(batch.sum_by_sequence("loss_mask_T")).mean()),
        "failed": sum(scored.failures.values()),
        **scored.counts,
        **{name.rpartition("/")[2]: value for name, value in episode_metrics(batch).items()},
    }


def pass_at_k(drawn: Drawn, passes: PassThreshold, first_R: NDArray[np.int64]) -> dict[str, float]:
    """`pass@<k>` for k = 1, 2, 4, … and all, the mean over prompts of the estimates."""
    passed_R = passed(drawn, passes)[first_R]
    _, of_R = np.unique(drawn.batch["group_B"][first_R], return_inverse=True)
    count_P, passed_P = np.bincount(of_R).tolist(), np.bincount(of_R, weights=passed_R).astype(int).tolist()
    pairs = list(zip(count_P, passed_P, strict=True))
    return {f"pass@{k}": sum(chance_of_one(n, c, k) for n, c in pairs) / len(pairs) for k in ks(min(count_P))}


def passed(drawn: Drawn, passes: PassThreshold) -> NDArray[np.bool_]:
    """Which samples pass; one that could not be graded does not."""
    scored = drawn.scored
    score_B = scored.reward_B if passes.term is None else scored.term_B[f"term_{passes.term}_B"]
    found: NDArray[np.bool_] = scored.scored_B & (score_B.astype(np.float64) >= np.float32(passes.score))
    return found


def ks(samples: int) -> list[int]:
    """Powers of two below the number of samples, and that number."""
    return [2**power for power in range((samples - 1).bit_length())] + [samples]


def chance_of_one(n: int, c: int, k: int) -> float:
    """Chance that at least one of k completions passes, drawn without replacement from n of which c passed."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def standard_error(value_R: NDArray[Any], group_R: NDArray[Any]) -> float:
    """Standard error of the mean, over prompts: completions of one prompt are not independent. 0 for one prompt."""
    _, of_R = np.unique(group_R, return_inverse=True)
    mean_P = np.bincount(of_R, weights=value_R) / np.bincount(of_R)
    return float(mean_P.std(ddof=1) / math.sqrt(len(mean_P))) if len(mean_P) > 1 else 0.0

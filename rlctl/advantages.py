"""Advantages: pure numpy, on the driver. One function per algorithm; the paper is in its docstring."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specs.batch import Batch

GROUP_EPS = 1e-6


def grpo_advantages(
    reward_B: NDArray[np.float32],
    group_B: NDArray[np.int64],
    valid_B: NDArray[np.bool_],
    scale: Literal["std", "none"],
) -> NDArray[np.float32]:
    """Each score relative to its group's mean; divided by (unbiased std + 1e-6) for `std` (Shao et al. 2024, §4.1),
    not divided for `none` (Liu et al. 2025, Dr.GRPO).

    Samples with `valid_B` false (their judging failed) are left out of their group's statistics and get advantage 0.
    A group with fewer than two valid samples carries no comparison: its advantages are 0.
    """
    advantage_B = np.zeros(len(reward_B), dtype=np.float64)
    _, inverse_B = np.unique(group_B, return_inverse=True)
    groups = int(inverse_B.max()) + 1 if len(inverse_B) else 0
    weight_B = valid_B.astype(np.float64)
    reward64_B = np.where(valid_B, reward_B.astype(np.float64), 0.0)

    count_G = np.bincount(inverse_B, weight_B, groups)
    mean_G = np.bincount(inverse_B, reward64_B, groups) / np.maximum(count_G, 1)
    centered_B = (reward64_B - mean_G[inverse_B]) * weight_B
    if scale == "none":
        divisor_G = np.ones(groups)
    else:
        variance_G = np.bincount(inverse_B, centered_B**2, groups) / np.maximum(count_G - 1, 1)
        divisor_G = np.sqrt(variance_G) + GROUP_EPS
    comparable_B = (count_G >= 2)[inverse_B]
    advantage_B[comparable_B] = (centered_B / divisor_G[inverse_B])[comparable_B]
    return advantage_B.astype(np.float32)


def per_token(value_B: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
    """A sequence's value at each of its loss tokens, 0 elsewhere."""
    mask_T = batch["loss_mask_T"].astype(np.float32)
    return np.repeat(value_B, batch["length_B"]).astype(np.float32) * mask_T


def silent_group_share(reward_B: NDArray[np.float32], group_B: NDArray[np.int64]) -> float:
    """Share of groups whose scores are all equal: they carry no signal."""
    _, inverse_B = np.unique(group_B, return_inverse=True)
    groups = int(inverse_B.max()) + 1 if len(inverse_B) else 0
    if not groups:
        return 0.0
    low_G, high_G = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low_G, inverse_B, reward_B)
    np.maximum.at(high_G, inverse_B, reward_B)
    return float(np.mean(low_G == high_G))

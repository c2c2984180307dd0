"""Learning rate as a function of the optimizer step."""

from __future__ import annotations

import math

from specs.schema.role_section import Optimizer


def lr_at(step: int, optimizer: Optimizer, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (the first is 0) of `total_steps`.

    The warm-up climbs linearly and reaches `lr` in its last step. From the step after it, linear and cosine fall from
    `lr` towards `lr * min_lr_ratio`, which they would reach in step `total_steps`; past the end it stays there.
    A step that is skipped for a non-finite gradient is not counted: the next one has the same learning rate.
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.lr
    decay_steps = max(1, total_steps - optimizer.warmup_steps)
    progress = min(1.0, (step - optimizer.warmup_steps) / decay_steps)
    share = 1.0 - progress if optimizer.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optimizer.lr * (optimizer.min_lr_ratio + (1.0 - optimizer.min_lr_ratio) * share)

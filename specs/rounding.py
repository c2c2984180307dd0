"""How far apart two right computations of the same log-probs may lie.

Numbers of a dtype lie the further apart the larger they are: in bf16 0.125 between 16 and 32, where the logits of large
models are. A limit in plain nats is too strict for those, or too lax for small ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

EPSILON = {"fp32": 2.0**-23, "bf16": 2.0**-7}  # neighbouring numbers around x lie up to x times this apart


@dataclass(frozen=True)
class Tolerance:
    """Allowed difference of log-probs: `spacings` between numbers of `dtype` at the largest logit, but never less than
    `nats`."""

    nats: float
    spacings: float = 0.0
    dtype: str = "fp32"

    def at(self, size: float) -> float:
        """In nats, where logits (or log-probs, which are of their size) reach `size`."""
        scaled = self.spacings * EPSILON[self.dtype] * size
        return scaled if math.isfinite(scaled) and scaled > self.nats else self.nats

"""Functions of NVIDIA's library that Triton's interpreter lacks, in Triton. Needs triton."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def rsqrt(x: Any) -> Any:
    return 1.0 / tl.sqrt(x)


@triton.jit
def tanh(x: Any) -> Any:
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0

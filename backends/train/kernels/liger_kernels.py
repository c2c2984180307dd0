"""Kernels of the package liger-kernel (Hsu et al. 2024): Triton, for GPUs. Its loss is not used: the head of training
(`backends/train/lm_head.py`) never makes all logits, and gives log-probs and entropy besides.

Its own patches of whole models are not used either: they put names into transformers' modules, for all models of the
process, and take every activation for SiLU.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from backends.train.kernels.module_formulas import Gate, NormForm
from specs.errors import ModelError


class LigerKernels:
    """Imported when it is made, which takes seconds. Raises ModelError."""

    def __init__(self) -> None:
        try:
            from liger_kernel import ops
        except ImportError as error:
            hint = 'install it in the role\'s interpreter (pip install liger-kernel), or write kernels = "torch"'
            raise ModelError(f"the package liger-kernel cannot be imported: {error}", hint=hint) from error
        self._ops: Any = ops

    def rms_norm(self, x: Tensor, weight_E: Tensor, eps: float, form: NormForm) -> Tensor:
        casts = "llama" if form.rounds_first else "gemma"
        # Not in place: a gradient that it overwrites may be that of a residual too.
        out: Tensor = self._ops.LigerRMSNormFunction.apply(x, weight_E, eps, form.offset, casts, False)
        return out

    def gated(self, gate: Tensor, up: Tensor, activation: Gate) -> Tensor:
        kernel = self._ops.LigerSiLUMulFunction if activation == "silu" else self._ops.LigerGELUMulFunction
        out: Tensor = kernel.apply(gate, up)
        return out

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        turned: tuple[Tensor, Tensor] = self._ops.LigerRopeFunction.apply(q, k, cos, sin)
        return turned

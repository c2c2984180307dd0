"""The language-model head: logits of chosen rows, in fp32, and what training needs of them.

N: rows (loss tokens), E: hidden size, V: vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


class Head:
    """Hidden states [N, E] → logits [N, V] in fp32, as the model's own forward pass computes them."""

    def __init__(self, model: PreTrainedModel) -> None:
        text = model.config.get_text_config()
        self.linear = model.get_output_embeddings()
        self.scale = float(getattr(text, "logit_scale", None) or 1.0)  # Cohere
        self.scale /= float(getattr(text, "logits_scaling", None) or 1.0)  # Granite
        self.softcap = getattr(text, "final_logit_softcapping", None)  # Gemma 2 and later

    def __call__(self, hidden_NE: Tensor) -> Tensor:
        logits_NV = self.linear(hidden_NE).float()
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.softcap is not None:
            logits_NV = torch.tanh(logits_NV / self.softcap) * self.softcap
        return logits_NV


def target_logprob(logits_NV: Tensor, target_N: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at the targets, [N]. The same arithmetic as `LogprobEntropy`."""
    logp_NV = torch.log_softmax(logits_NV if temperature == 1.0 else logits_NV / temperature, dim=-1)
    return logp_NV.gather(1, target_N[:, None]).squeeze(1)


class LogprobEntropy(torch.autograd.Function):
    """(logits [N, V] fp32, target [N], temperature, entropy_has_grad) → log-prob [N], entropy [N] (nats).

    Written out because autograd would keep three more tensors of N·V. Backward runs once and uses up what it saved.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, target_N: Tensor, temperature: float, entropy_has_grad: bool
    ) -> tuple[Tensor, Tensor]:
        logp_NV = torch.log_softmax(logits_NV if temperature == 1.0 else logits_NV / temperature, dim=-1)
        logprob_N = logp_NV.gather(1, target_N[:, None]).squeeze(1)
        p_NV = logp_NV.exp()
        entropy_N = -torch.linalg.vecdot(p_NV, logp_NV)
        ctx.save_for_backward(p_NV, target_N, entropy_N, logp_NV if entropy_has_grad else None)
        ctx.temperature = temperature
        if not entropy_has_grad:
            ctx.mark_non_differentiable(entropy_N)
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprob_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor, None, None, None]:
        p_NV, target_N, entropy_N, logp_NV = ctx.saved_tensors
        # d logprob / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
        factor_NV = -grad_logprob_N[:, None]
        if logp_NV is not None:
            factor_NV = factor_NV - grad_entropy_N[:, None] * (logp_NV + entropy_N[:, None])
        grad_NV = p_NV.mul_(factor_NV)
        grad_NV.scatter_add_(1, target_N[:, None], grad_logprob_N[:, None])
        return grad_NV if ctx.temperature == 1.0 else grad_NV.div_(ctx.temperature), None, None, None

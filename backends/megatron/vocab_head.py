"""The language-model head, cut along the vocabulary: log-probs and policy losses without the logits of a whole row.

Each tensor rank has some rows of the weight. Logits exist for one chunk of rows at a time; of each chunk the ranks
exchange three numbers per row, and every rank computes the loss itself. Forward and backward of a chunk go together, as
in `backends/train/lm_head.py`.

N: rows (loss tokens), E: hidden size, V: this rank's part of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from backends.train.lm_head import (
    LearningTask,
    LogprobTask,
    LossResult,
    ObjectiveTask,
    add_product,
    backward_of_rows,
    chunks_of,
)


@dataclass(frozen=True)
class VocabPart:
    """A tensor rank's part of the vocabulary: ids `start` … `start + real - 1`; further rows are padding."""

    group: Any
    start: int
    real: int
    chunk: int

    def sum(self, partial: Tensor) -> Tensor:
        """Over the tensor ranks, in place."""
        dist.all_reduce(partial, group=self.group)
        return partial

    def likeliest(self, above_NV: Tensor) -> Tensor:
        """Return the first of the ids with a row's largest logit, above which its logits are given."""
        largest_N, local_N = above_NV.max(-1)
        id_N = torch.where(largest_N == 0, self.start + local_N, torch.iinfo(local_N.dtype).max)
        dist.all_reduce(id_N, op=dist.ReduceOp.MIN, group=self.group)
        return id_N

    def logits(self, hidden_NE: Tensor, weight_VE: Tensor) -> Tensor:
        """Return this rank's logits, without padding, in fp32."""
        return F.linear(hidden_NE, weight_VE[: self.real]).float()


@dataclass(frozen=True)
class Softmax:
    """The softmax of whole rows, as far as they lie in this rank. `above_NV`: logits / temperature, less the row's
    largest."""

    above_NV: Tensor
    log_N: Tensor  # of the sum of their exponentials, over all ranks
    logprob_N: Tensor
    entropy_N: Tensor
    inside_N: Tensor  # whether the target is this rank's
    local_N: Tensor  # its column here; 0 where it is another's

    @classmethod
    def of(cls, logits_NV: Tensor, target_N: Tensor, temperature: float, part: VocabPart) -> Softmax:
        """`logits_NV` is overwritten."""
        if temperature != 1.0:
            logits_NV.div_(temperature)
        largest_N = logits_NV.amax(-1)
        dist.all_reduce(largest_N, op=dist.ReduceOp.MAX, group=part.group)
        above_NV = logits_NV.sub_(largest_N[:, None])
        exp_NV = above_NV.exp()
        inside_N = (target_N >= part.start) & (target_N < part.start + part.real)
        local_N = torch.where(inside_N, target_N - part.start, 0)
        own_N = above_NV.gather(1, local_N[:, None]).squeeze(1) * inside_N
        total_N, weighted_N, target_above_N = part.sum(
            torch.stack([exp_NV.sum(-1), torch.linalg.vecdot(exp_NV, above_NV), own_N])
        )
        log_N = total_N.log()
        return cls(above_NV, log_N, target_above_N - log_N, log_N - weighted_N / total_N, inside_N, local_N)


def logprobs(hidden_NE: Tensor, weight_VE: Tensor, task: LogprobTask | LearningTask, part: VocabPart) -> Tensor:
    """log softmax(logits / temperature) at the targets, [N], on every rank, without gradient."""
    found = [
        Softmax.of(part.logits(hidden_NE[a:b], weight_VE), task.target_N[a:b], task.temperature, part).logprob_N
        for a, b in chunks_of(len(hidden_NE), part.chunk)
    ]
    return torch.cat(found) if found else hidden_NE.new_zeros(0, dtype=torch.float32)


def loss(hidden_NE: Tensor, weight_VE: Tensor, task: LearningTask, part: VocabPart) -> LossResult:
    """The policy loss at the targets. The gradient by `hidden_NE` is whole on every rank."""
    result: LossResult = _VocabLoss.apply(hidden_NE, weight_VE, task, part)  # type: ignore[no-untyped-call]
    return result


class _VocabLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NE: Tensor, weight_VE: Tensor, task: LearningTask, part: VocabPart) -> LossResult:
        grad_NE = torch.empty_like(hidden_NE)
        grad_VE = torch.zeros_like(weight_VE, dtype=torch.float32)
        loss = torch.zeros((), device=hidden_NE.device)
        sums = torch.zeros(len(task.loss.summed()), dtype=torch.float64, device=hidden_NE.device)
        maxima = torch.full((len(task.loss.maxima()),), -torch.inf, device=hidden_NE.device)
        chunks = chunks_of(len(hidden_NE), part.chunk)
        if isinstance(task, ObjectiveTask) and task.columns.units is not None and len(chunks) != 1:
            task, sums = task.settled(logprobs(hidden_NE, weight_VE, task, part))
        for a, b in chunks:
            chunk_NE = hidden_NE[a:b]
            logits_NV = part.logits(chunk_NE, weight_VE)
            chunk_loss, chunk_sums, chunk_maxima, grad_NV = _chunk_loss(logits_NV, task, a, b, part)
            del logits_NV  # overwritten
            grad_NV = grad_NV.to(weight_VE.dtype)
            if ctx.needs_input_grad[0]:
                grad_NE[a:b] = part.sum(grad_NV @ weight_VE[: part.real])
                add_product(grad_VE[: part.real], grad_NV, chunk_NE)
            loss += chunk_loss
            sums += chunk_sums
            maxima = torch.maximum(maxima, chunk_maxima)
            del grad_NV  # before the next chunk's logits
        ctx.grads = grad_NE, grad_VE.to(weight_VE.dtype)
        ctx.mark_non_differentiable(sums, maxima)
        return loss, sums, maxima

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        return *(grad.mul_(grad_loss) for grad in grads), None, None


def _chunk_loss(
    logits_NV: Tensor, task: LearningTask, a: int, b: int, part: VocabPart
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do the same as `_chunk_loss` of `backends/train/lm_head.py`, with the gradient by this rank's logits."""
    found = Softmax.of(logits_NV, task.target_N[a:b], task.temperature, part)
    correct_N = part.likeliest(found.above_NV) == task.target_N[a:b] if "correct" in task.loss.summed() else None
    logp_NV = found.above_NV.sub_(found.log_N[:, None])
    rows = task.backward(found.logprob_N, found.entropy_N, correct_N, a, b)
    loss, sums, maxima, grad_logprob_N, grad_NV = backward_of_rows(rows, found.entropy_N, logp_NV.exp(), logp_NV)
    grad_NV.scatter_add_(1, found.local_N[:, None], (grad_logprob_N * found.inside_N)[:, None])
    return loss, sums, maxima, grad_NV if task.temperature == 1.0 else grad_NV.div_(task.temperature)

"""The language-model head during training: it never makes the logits of a whole row.

Logits exist for one chunk of chosen rows at a time, in fp32; how many rows that is follows from the vocabulary, so that
peaks do not grow with it. For the loss, each chunk goes forward and backward at once and only the gradients of hidden
states and head weight are kept (as fused linear cross-entropy does, Hsu et al. 2024),
so one forward pass makes one graph, in which every parameter is used where its module is called. Engines that gather
parameters by module hooks (FSDP2, ZeRO-3) rely on that.

N: rows (loss tokens), E: hidden size, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from backends.hf.matmul import fast_matmuls
from backends.memory import NEVER_FROM_THE_HEAP, hand_back
from backends.token_metrics import TokenColumns
from backends.train.losses import policy_loss
from backends.train.objective_losses import ObjectiveColumns
from specs.schema.algorithms.algorithm import Loss
from specs.schema.objectives import Objective


@dataclass(frozen=True)
class LogprobTask:
    """Log-probs of the targets under softmax(logits / temperature)."""

    target_N: Tensor
    temperature: float


@dataclass(frozen=True)
class LossTask:
    """The policy loss at the targets."""

    target_N: Tensor
    temperature: float
    columns: TokenColumns
    loss: Loss

    @property
    def learns_entropy(self) -> bool:
        return bool(self.loss.entropy_coef)

    def backward(self, logprob_N: Tensor, entropy_N: Tensor, _: Tensor | None, a: int, b: int) -> RowsLoss:
        with torch.enable_grad():
            logprob_N.requires_grad_()
            entropy_N.requires_grad_()
            loss, sums, maxima = policy_loss(logprob_N, entropy_N, self.columns.slice(a, b), self.loss)
            by_logprob_N, by_entropy_N = torch.autograd.grad(loss, (logprob_N, entropy_N), allow_unused=True)
        return loss.detach(), sums, maxima, by_logprob_N, by_entropy_N


@dataclass(frozen=True)
class ObjectiveTask:
    """An objective at the targets."""

    target_N: Tensor
    temperature: float
    columns: ObjectiveColumns

    learns_entropy: ClassVar[bool] = False

    @property
    def loss(self) -> Objective:
        return self.columns.objective

    def settled(self, logprob_N: Tensor) -> tuple[ObjectiveTask, Tensor]:
        """Do the same as that of `ObjectiveColumns`, with all log-probs of the micro-batch."""
        columns, sums = self.columns.settled(logprob_N)
        return replace(self, columns=columns), sums

    def backward(self, logprob_N: Tensor, entropy_N: Tensor, correct_N: Tensor | None, a: int, b: int) -> RowsLoss:
        columns, of_units = self.columns.settled(logprob_N)  # these are all where it is not yet
        assert correct_N is not None, "every objective declares it"
        by_logprob_N, sums = columns.backward(logprob_N, entropy_N, correct_N, a, b)
        return logprob_N.new_zeros(()), sums + of_units, logprob_N.new_zeros(0), by_logprob_N, None


# Loss (scalar, with gradient), sums (fp64) and maxima that the loss declares. A plain tuple: engines' hooks look for
# tensors in it.
LossResult = tuple[Tensor, Tensor, Tensor]
# The same of some rows, and the derivatives by their log-probs and by their entropies, None where these do not count.
RowsLoss = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


LearningTask = LossTask | ObjectiveTask


class Head:
    """Installs itself as the forward of the model's output layer.

    `answer` gives what a task asks, or logits in fp32 as the model's own forward pass computes them.
    The call goes through the module, hooks and all.
    """

    def __init__(self, model: PreTrainedModel, chunk: int) -> None:
        text = model.config.get_text_config()
        self.model = model
        self.linear: nn.Linear = model.get_output_embeddings()
        self.chunk = chunk
        # Of an engine whose backward pass starts from the loss itself (a factor of 1) and adds to gradients in fp32:
        # the head's is then added during the forward pass, and never exists twice.
        self.adds_gradient = False
        self.scale = float(getattr(text, "logit_scale", None) or 1.0)  # Cohere
        self.scale *= float(getattr(text, "lm_head_multiplier", None) or 1.0)  # Falcon-H1
        self.scale /= float(getattr(text, "logits_scaling", None) or 1.0)  # Granite
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)  # Gemma 2 and later
        self.linear.forward = self._forward

    def answer(self, hidden_NE: Tensor, task: LogprobTask | LearningTask | None) -> Any:
        """Answer the task; without one return the logits [N, V]."""
        if task is None:
            return self.logits(self.linear(hidden_NE))
        logits_bytes = min(self.chunk, len(hidden_NE)) * self.model.config.get_text_config().vocab_size * 4
        on_heap = hidden_NE.device.type != "cpu" or logits_bytes <= NEVER_FROM_THE_HEAP
        if isinstance(task, LogprobTask) and not on_heap:
            hand_back("cpu")  # what the layers left free, which the logits cannot use
        return self.linear(hidden_NE, task)

    def by_own_forward(self, inputs: Mapping[str, Any]) -> Tensor:
        """Logits [B, S, V] of the model's own forward pass of some sequences."""
        logits: Tensor = self.model(**inputs).logits.float()
        return logits

    def _forward(self, hidden_NE: Tensor, task: LogprobTask | LearningTask | None = None) -> Any:
        weight: Tensor = self.linear.weight
        bias: Tensor | None = self.linear.bias
        if task is None:  # also the model's own forward pass
            return F.linear(hidden_NE, weight, bias)
        with fast_matmuls(hidden_NE[: self.chunk], weight):
            if isinstance(task, LearningTask):
                if not torch.is_grad_enabled():  # else the function believes that they need gradients
                    weight, bias = weight.detach(), None if bias is None else bias.detach()
                return _HeadLoss.apply(hidden_NE, weight, bias, self, task)
            return self.logprobs(hidden_NE, weight, bias, task)

    def logprobs(
        self, hidden_NE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, task: LogprobTask | LearningTask
    ) -> Tensor:
        parts = [
            target_logprob(
                self.logits(F.linear(hidden_NE[a:b], weight_VE, bias_V)), task.target_N[a:b], task.temperature
            )
            for a, b in chunks_of(len(hidden_NE), self.chunk)
        ]
        return torch.cat(parts) if parts else hidden_NE.new_zeros(0, dtype=torch.float32)

    def logits(self, linear_NV: Tensor) -> Tensor:
        """Logits in fp32 from the output of the linear layer."""
        logits_NV = linear_NV.float()
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.softcap is not None:
            logits_NV = torch.tanh(logits_NV / self.softcap) * self.softcap
        return logits_NV

    def logits_backward(self, grad_NV: Tensor, capped_NV: Tensor | None) -> Tensor:
        """From the gradient of `logits` to that of the linear layer's output. In place, also in the logits, which only
        a soft cap needs."""
        if capped_NV is not None and self.softcap is not None:
            grad_NV *= 1.0 - capped_NV.div_(self.softcap).square_()
        return grad_NV if self.scale == 1.0 else grad_NV.mul_(self.scale)


def chunks_of(rows: int, size: int) -> list[tuple[int, int]]:
    """Return first row and end of each chunk."""
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def target_logprob(logits_NV: Tensor, target_N: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at the targets, [N]. The same arithmetic as `_HeadLoss`."""
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    return torch.log_softmax(logits_NV, dim=-1).gather(1, target_N[:, None]).squeeze(1)


_BLOCK = 2**22  # elements of a product on its way into a sum of another dtype


def add_product(sum_VE: Tensor, grad_NV: Tensor, hidden_NE: Tensor) -> None:
    """Add grad.T @ hidden, in fp32."""
    if sum_VE.dtype == grad_NV.dtype:
        sum_VE.addmm_(grad_NV.T, hidden_NE)
        return
    if sum_VE.device.type == "cuda":  # cuBLAS adds what it accumulates in fp32 before anything is rounded
        torch.addmm(sum_VE, grad_NV.T, hidden_NE, out_dtype=sum_VE.dtype, out=sum_VE)
        return
    rows = max(1, _BLOCK // hidden_NE.shape[1])
    for part_VE, part_NV in zip(sum_VE.split(rows), grad_NV.split(rows, dim=1), strict=True):
        part_VE += part_NV.T @ hidden_NE


class _HeadLoss(torch.autograd.Function):
    """(hidden [N, E], weight [V, E], bias [V] or None, head, task) → LossResult.

    The gradients are computed on the way forward, chunk by chunk; backward hands them out.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, head: Head, task: LearningTask
    ) -> LossResult:
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        chunks = chunks_of(len(hidden_NE), head.chunk)
        grad_NE = torch.empty_like(hidden_NE)
        added = head.linear.weight.grad if needs_weight and head.adds_gradient else None
        # Sums over chunks are made in fp32, whatever the weight's own dtype.
        sum_VE = added
        if added is None and needs_weight and len(chunks) != 1:  # of no chunk it is zero
            sum_VE = torch.zeros_like(weight_VE, dtype=torch.float32)
        grad_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias and bias_V is not None else None
        loss = torch.zeros((), device=hidden_NE.device)
        sums = torch.zeros(len(task.loss.summed()), dtype=torch.float64, device=hidden_NE.device)
        maxima = torch.full((len(task.loss.maxima()),), -torch.inf, device=hidden_NE.device)
        grad_VE: Tensor | None = None
        if isinstance(task, ObjectiveTask) and task.columns.units is not None and len(chunks) != 1:
            task, sums = task.settled(head.logprobs(hidden_NE, weight_VE, bias_V, task))
        for a, b in chunks:
            chunk_NE = hidden_NE[a:b]
            logits_NV = head.logits(F.linear(chunk_NE, weight_VE, bias_V))
            capped_NV = None if head.softcap is None else logits_NV.clone()
            chunk_loss, chunk_sums, chunk_maxima, grad_NV = _chunk_loss(logits_NV, task, a, b)
            del logits_NV  # overwritten
            grad_NV = head.logits_backward(grad_NV, capped_NV).to(weight_VE.dtype)
            if needs_hidden:
                torch.mm(grad_NV, weight_VE, out=grad_NE[a:b])
            if sum_VE is not None:
                add_product(sum_VE, grad_NV, chunk_NE)
            elif needs_weight:
                grad_VE = grad_NV.T @ chunk_NE
            if grad_V is not None:
                grad_V += grad_NV.sum(0, dtype=torch.float32)
            loss += chunk_loss
            sums += chunk_sums
            maxima = torch.maximum(maxima, chunk_maxima)
            del grad_NV, capped_NV  # before the next chunk's logits
        if sum_VE is not None and added is None:
            grad_VE = sum_VE.to(weight_VE.dtype)
        ctx.grads = (grad_NE, grad_VE, None if grad_V is None or bias_V is None else grad_V.to(bias_V.dtype))
        ctx.mark_non_differentiable(sums, maxima)
        return loss, sums, maxima

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None  # it runs once and uses up what was kept
        return *(None if grad is None else grad.mul_(grad_loss) for grad in grads), None, None


def _chunk_loss(logits_NV: Tensor, task: LearningTask, a: int, b: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, sums and maxima of a chunk, and the gradient of the loss by its logits, in whose memory it lies.

    With p = softmax(logits / temperature): d logprob / d logits = (onehot - p) / temperature,
    d entropy / d logits = -p (log p + entropy) / temperature.
    """
    temperature, target_N = task.temperature, task.target_N[a:b, None]
    logp_NV = torch.log_softmax(logits_NV if temperature == 1.0 else logits_NV.div_(temperature), dim=-1)
    correct_N = logp_NV.argmax(-1) == target_N[:, 0] if "correct" in task.loss.summed() else None
    p_NV = torch.exp(logp_NV, out=logits_NV)
    logprob_N = logp_NV.gather(1, target_N).squeeze(1)
    # Log-probs are needed further only where the entropy itself is learned.
    product_NV = p_NV * logp_NV if task.learns_entropy else logp_NV.mul_(p_NV)
    entropy_N = -product_NV.sum(-1)
    del product_NV
    found = task.backward(logprob_N, entropy_N, correct_N, a, b)
    loss, sums, maxima, grad_logprob_N, grad_NV = backward_of_rows(found, entropy_N, p_NV, logp_NV)
    grad_NV.scatter_add_(1, target_N, grad_logprob_N[:, None])
    return loss, sums, maxima, grad_NV if temperature == 1.0 else grad_NV.div_(temperature)


def backward_of_rows(
    found: RowsLoss, entropy_N: Tensor, p_NV: Tensor, logp_NV: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return loss, sums and maxima of some rows, the loss's gradient by their log-probs, and that by their logits at
    temperature 1, but for what is added at the targets. It lies in the memory of `p_NV`; `logp_NV` is used up."""
    loss, sums, maxima, grad_logprob_N, grad_entropy_N = found
    if grad_entropy_N is None:
        grad_NV = p_NV.mul_(-grad_logprob_N[:, None])
    else:
        factor_NV = logp_NV.add_(entropy_N.detach()[:, None]).mul_(-grad_entropy_N[:, None])
        grad_NV = p_NV.mul_(factor_NV.sub_(grad_logprob_N[:, None]))
    return loss, sums, maxima, grad_logprob_N, grad_NV

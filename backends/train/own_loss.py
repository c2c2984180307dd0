"""A user's own token loss: a Python function named by its path, called by every train engine."""

from __future__ import annotations

import torch
from torch import Tensor

from specs.own_function import LOSS, OwnFunctionError, call


def own_loss(path: str, logprob_N: Tensor, anchor_N: Tensor, advantage_N: Tensor) -> Tensor:
    """The user's loss of each token, from its log-prob (with gradient), that of the ratio's anchor, and its advantage.
    A value may depend on its own token alone: how many there are in a call follows from micro-batches and chunks.
    Raises OwnFunctionError where it is not one number with a gradient for each token."""
    # Copies: the anchor may be the log-probs themselves, and the metrics read all three.
    loss_N = call(path, logprob_N.clone(), anchor_N.clone(), advantage_N.clone())
    hint = f"return a torch tensor with one number for each token: {LOSS}"
    if not isinstance(loss_N, Tensor):
        raise OwnFunctionError(f"{path}: it returned {type(loss_N).__name__}, no tensor", hint=hint)
    if loss_N.shape != logprob_N.shape:
        message = f"{path}: it returned shape {tuple(loss_N.shape)} for {len(logprob_N)} tokens"
        raise OwnFunctionError(message, hint=hint)
    if torch.is_grad_enabled() and logprob_N.requires_grad and not loss_N.requires_grad:
        message = f"{path}: its result has no gradient: nothing would be learned"
        raise OwnFunctionError(message, hint="compute it from logprob by torch's functions, without detach()")
    return loss_N


def try_loss(path: str) -> None:
    """Call it on tokens with ratios on both sides of 1 and advantages of each sign. Raises OwnFunctionError, also where
    a loss or gradient is not finite, or a loss is another when its token is alone."""
    loss_N = _loss(path, 6)
    again_N = _loss(path, 6)
    alone_N = _loss(path, 1)
    steady = torch.equal(loss_N, again_N)
    if steady and not torch.allclose(loss_N[:1], alone_N, rtol=1e-4, atol=1e-6):
        message = f"{path}: the loss of a token is {alone_N[0]:.6g} alone and {loss_N[0]:.6g} beside five others"
        raise OwnFunctionError(message, hint="micro-batches split samples anywhere: use the token's own numbers alone")


def _loss(path: str, count: int) -> Tensor:
    """Return the losses of the first so many tokens. Raises OwnFunctionError."""
    logprob_N = torch.linspace(-2.0, -0.1, 6)[:count].requires_grad_()
    anchor_N = logprob_N.detach() + torch.tensor([0.5, 0.0, -0.5, 0.0, 0.1, -0.1])[:count]
    loss_N = own_loss(path, logprob_N, anchor_N, torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0, -2.0])[:count])
    (grad_N,) = torch.autograd.grad(loss_N.sum(), logprob_N, allow_unused=True)
    if grad_N is None:
        raise OwnFunctionError(f"{path}: its gradient does not reach logprob", hint="compute the loss from it")
    for what, value_N in (("loss", loss_N), ("gradient", grad_N)):
        if not torch.isfinite(value_N).all():
            message = f"{path}: its {what} is not finite: {value_N.tolist()}"
            raise OwnFunctionError(message, hint="it must be finite for every ratio and advantage")
    return loss_N.detach()

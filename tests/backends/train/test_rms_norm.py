"""The RMSNorm of training against the one of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from backends.train.rms_norm import use_fast_norms


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen2RMSNorm])
@pytest.mark.parametrize("shape", [(7, 12), (1, 5, 12), (1, 3, 4, 12)])
def test_values_and_gradients(kind: type[torch.nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, upstream = torch.randn(shape) * 3, torch.randn(shape)
    stock, ours = kind(12, eps=1e-2), kind(12, eps=1e-2)
    with torch.no_grad():
        stock.weight.uniform_(-2, 2)
    ours.load_state_dict(stock.state_dict())
    use_fast_norms(ours)
    assert ours.forward.__func__ is not kind.forward
    results = []
    for norm in (stock, ours):
        leaf = x.clone().requires_grad_()
        out = norm(leaf)
        out.backward(upstream)
        results.append((out.detach(), leaf.grad, norm.weight.grad))
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strides", [(12, 60, 1), (12, 0, 1)], ids=["transposed", "expanded"])
def test_gradients_in_any_layout(strides: tuple[int, ...]) -> None:
    """What the norms of queries and keys give is transposed, and so comes its gradient."""
    torch.manual_seed(0)
    x, upstream = torch.randn(5, 3, 12), torch.randn(180).as_strided((5, 3, 12), strides)
    assert not upstream.is_contiguous()
    stock, ours = Qwen3RMSNorm(12), Qwen3RMSNorm(12)
    use_fast_norms(ours)
    grads = []
    for norm in (stock, ours):
        leaf = x.clone().requires_grad_()
        norm(leaf).backward(upstream)
        grads.append((leaf.grad, norm.weight.grad))
    for theirs, mine in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)

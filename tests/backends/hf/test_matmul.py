"""Products by oneDNN against those of torch's own choice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backends.hf import matmul
from backends.hf.matmul import add_linear, fast_matmuls, linear, use_fast_linears


@pytest.fixture(autouse=True)
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor where it is the faster one, for products of any size."""
    if not matmul.MKLDNN.is_available() or not matmul._is_exact():
        pytest.skip("oneDNN computes with a lower precision here, or is not there")
    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(matmul, "LEAST", 1)
    monkeypatch.setattr(matmul, "LEAST_ONCE", 1)


def allowed() -> str:
    """What torch may do with fp32 products at this moment."""
    found: str = matmul.MKLDNN.matmul.fp32_precision
    return found


@pytest.mark.parametrize("shape", [(70, 48), (64, 48), (5, 48), (1, 70, 48), (2, 35, 48)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "learns"])
def test_values_and_gradients(shape: tuple[int, ...], biased: bool, frozen: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 96, bias=biased).requires_grad_(not frozen)
    x, upstream = torch.randn(shape), torch.randn(*shape[:-1], 96)
    results: list[list[Tensor | None]] = []
    for by in (F.linear, linear):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        out = by(leaf, layer.weight, layer.bias).mul_(2)  # as some models do
        out.backward(upstream)
        results.append([out.detach(), leaf.grad, *(each.grad for each in layer.parameters())])
    for theirs, mine in zip(*results, strict=True):
        assert (theirs is None) == (mine is None)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


def test_one_row_alone() -> None:
    x, weight = torch.randn(48), torch.randn(96, 48)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_a_transposed_gradient() -> None:
    """As that of what attention turns round."""
    torch.manual_seed(0)
    layer, x, upstream = nn.Linear(48, 96), torch.randn(70, 48), torch.randn(96, 70).T
    grads = []
    for by in (F.linear, linear):
        layer.zero_grad()
        by(x, layer.weight, layer.bias).backward(upstream)
        grads.append(layer.weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-4)


def test_sums_over_many_tokens_are_as_near_to_the_truth() -> None:
    torch.manual_seed(0)
    layer, x, upstream = nn.Linear(64, 64, bias=False), torch.randn(20_003, 64), torch.randn(20_003, 64)
    gaps = []
    for by in (F.linear, linear):
        layer.zero_grad()
        by(x, layer.weight).backward(upstream)
        assert layer.weight.grad is not None
        gaps.append((layer.weight.grad - upstream.double().T @ x.double()).abs().max())
    assert gaps[1] < 4 * gaps[0]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows", [1, 16, 70])
@torch.no_grad()
def test_a_sum_that_a_layer_is_added_to(rows: int, biased: bool) -> None:
    torch.manual_seed(0)
    total, x, layer = torch.randn(rows, 96), torch.randn(rows, 48), nn.Linear(48, 96, bias=biased)
    torch.testing.assert_close(add_linear(total, x, layer), total + layer(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("rows", "by_onednn"), [(1, 0), (15, 0), (16, 16), (100, 96), (1440, 1408), (16_500, 16_384)])
def test_few_shapes_are_compiled(rows: int, by_onednn: int) -> None:
    assert matmul._round(rows) == by_onednn


def test_torch_may_use_onednn_only_in_the_products_themselves() -> None:
    seen = []
    layer = nn.Linear(48, 96)
    use_fast_linears(layer, "cpu")
    out = layer(torch.randn(70, 48, requires_grad=True))
    out.register_hook(lambda grad: seen.append(allowed()))
    (out * 2).sum().backward()
    assert [*seen, allowed()] == ["none", "none"]
    with fast_matmuls(out, layer.weight):
        assert allowed() == "bf16"
    assert allowed() == "none"


def test_a_layer_with_a_forward_of_its_own_keeps_it() -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    layer.forward = own = lambda x: x  # type: ignore[method-assign, assignment]
    use_fast_linears(nn.Sequential(layer, other), "cuda")
    assert "forward" not in vars(other)
    use_fast_linears(nn.Sequential(layer, other), "cpu")
    assert layer.forward is own
    assert "forward" in vars(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_are_left_to_torch(dtype: torch.dtype) -> None:
    x, weight = torch.randn(8, 8, dtype=dtype), torch.randn(8, 8, dtype=dtype)
    with fast_matmuls(x, weight):
        assert allowed() == "none"
    assert torch.equal(linear(x, weight), F.linear(x, weight))

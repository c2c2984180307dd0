"""Moving tensors off the device: what is kept on the host, and that it comes back to the bit."""

from __future__ import annotations

import pytest
import torch
from gpu import on_cpu_and_gpu

from backends.train import offload
from backends.train.offload import Offloader


class OffloadsAll(Offloader):
    """On the CPU too."""

    def _stays(self, tensor: torch.Tensor) -> bool:
        return False


@pytest.mark.parametrize("device", on_cpu_and_gpu())
def test_in_pieces_and_back(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_LEAST_PIECE", 8)
    tensors = [
        torch.randn(1237, device=device),
        torch.randn(3, 5, device=device).bfloat16(),
        torch.ones(1, device=device),
    ]
    views, before = [each.view(-1)[:1] for each in tensors], [each.clone() for each in tensors]
    offloading = OffloadsAll()
    offloading.offload(tensors, [])
    assert [each.untyped_storage().nbytes() for each in tensors] == [0, 0, 0]
    offloading.onload()
    for tensor, view, expected in zip(tensors, views, before, strict=True):
        assert torch.equal(tensor, expected)
        assert view.data_ptr() == tensor.data_ptr()

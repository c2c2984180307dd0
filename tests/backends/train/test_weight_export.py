"""Weights on their way block by block: any cut gives the same bytes, and what computes is what travels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from backends.train.weight_export import TensorWeight, spec_of
from backends.weights.checksum import checksum_bytes


def cut(whole_U: NDArray[np.uint8], block_bytes: int) -> Iterator[NDArray[np.uint8]]:
    return (whole_U[start : start + block_bytes] for start in range(0, len(whole_U), block_bytes))


@pytest.mark.parametrize(("own", "sent"), [("float32", "fp32"), ("float32", "bf16"), ("bfloat16", "bf16")])
@pytest.mark.parametrize("block_bytes", [64, 4096, 1 << 20])
def test_blocks_carry_the_tensor_in_wire_dtype(own: str, sent: str, block_bytes: int) -> None:
    tensor = torch.randn(37, 41, generator=torch.Generator().manual_seed(0)).to(getattr(torch, own))
    wire = {"fp32": torch.float32, "bf16": torch.bfloat16}[sent]
    weight = TensorWeight(spec_of("w", ((37, 41), tensor.dtype), sent), tensor, wire)  # type: ignore[arg-type]
    whole_U = np.zeros(weight.spec.nbytes, dtype=np.uint8)
    want_U = tensor.to(wire).flatten().view(torch.uint8).numpy()
    assert weight.copy_in_blocks(cut(whole_U, block_bytes)) == checksum_bytes(want_U)
    np.testing.assert_array_equal(whole_U, want_U)

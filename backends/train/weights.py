"""Weights on their way out: one at a time, cast to the wire dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backends.checksum import checksum_bytes
from backends.hf import DTYPES, tensor_bytes, wire_dtype
from backends.protocol import Weight, WeightSpec
from specs.schema import DType


def spec_of(name: str, kind: tuple[tuple[int, ...], torch.dtype], dtype: DType) -> WeightSpec:
    """The wire's view of a tensor of this shape and dtype: floating ones travel as `dtype`, others as they are."""
    shape, own = kind
    sent = DTYPES[dtype] if own.is_floating_point else own
    return WeightSpec(name, wire_dtype(sent), tuple(shape), math.prod(shape) * sent.itemsize)


class TensorWeight(Weight):
    """A weight backed by a tensor of the engine (a view where no cast is needed)."""

    def __init__(self, spec: WeightSpec, tensor: Tensor) -> None:
        self.spec = spec
        self._tensor = tensor

    def checksum(self) -> str:
        return checksum_bytes(tensor_bytes(self._tensor))

    def copy_to(self, buffer: NDArray[np.uint8]) -> None:
        assert buffer.nbytes == self.spec.nbytes, (self.spec.name, buffer.nbytes, self.spec.nbytes)
        if self.spec.nbytes:
            source = self._tensor.contiguous().flatten().view(torch.uint8)
            torch.from_numpy(buffer.view(np.uint8).reshape(-1)).copy_(source)


def stream(tensors: Iterator[tuple[str, Tensor]], dtype: DType) -> Iterator[Weight]:
    """Weights, lazily: the cast copy of one lives only until the next is asked for."""
    for name, tensor in tensors:
        spec = spec_of(name, (tuple(tensor.shape), tensor.dtype), dtype)
        cast = tensor.detach().to(DTYPES[dtype]) if tensor.is_floating_point() else tensor.detach()
        yield TensorWeight(spec, cast)

"""Weights on their way out: one at a time, cast to the wire dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backends.checksum import CHUNK_BYTES, Digest, checksum_bytes, copy_with_checksum
from backends.hf import DTYPES, tensor_bytes, wire_dtype
from backends.protocol import Buffer, Weight, WeightSpec
from specs.schema import DType


def spec_of(name: str, kind: tuple[tuple[int, ...], torch.dtype], dtype: DType) -> WeightSpec:
    """The wire's view of a tensor of this shape and dtype: floating ones travel as `dtype`, others as they are."""
    shape, own = kind
    sent = DTYPES[dtype] if own.is_floating_point else own
    return WeightSpec(name, wire_dtype(sent), tuple(shape), math.prod(shape) * sent.itemsize)


class TensorWeight(Weight):
    """A weight backed by a tensor of the engine, which is cast to `sent` on its way."""

    def __init__(self, spec: WeightSpec, tensor: Tensor, sent: torch.dtype) -> None:
        self.spec = spec
        self._tensor, self._sent = tensor, sent

    def checksum(self) -> str:
        return checksum_bytes(tensor_bytes(self._tensor.to(self._sent)))

    def copy_to(self, buffer: Buffer) -> str:
        assert buffer.nbytes == self.spec.nbytes, (self.spec.name, buffer.nbytes, self.spec.nbytes)
        if isinstance(buffer, Tensor):
            buffer.copy_(self._tensor.to(self._sent).contiguous().flatten().view(torch.uint8))
            return self.checksum()
        target_U = buffer.view(np.uint8).reshape(-1)
        if self._tensor.device.type == "cpu" and self._tensor.dtype != self._sent:
            return self._cast_to(target_U)
        source_U = tensor_bytes(self._tensor.to(self._sent))
        return copy_with_checksum(source_U, target_U, of=source_U)

    def _cast_to(self, target_U: NDArray[np.uint8]) -> str:
        """Cast, hash and copy chunk by chunk in the cache: no cast copy of the whole weight is ever made."""
        own_E = self._tensor.contiguous().flatten()
        cast_E, cast_U = _scratch(self._sent)
        digest, itemsize = Digest(), self._sent.itemsize
        for first in range(0, len(own_E), len(cast_E)):
            piece = own_E[first : first + len(cast_E)]
            whole = len(piece) == len(cast_E)
            (cast_E if whole else cast_E[: len(piece)]).copy_(piece)
            chunk_U = cast_U if whole else cast_U[: len(piece) * itemsize]
            digest.update(chunk_U)
            target_U[first * itemsize : first * itemsize + len(chunk_U)] = chunk_U
        return digest.hexdigest()


@cache
def _scratch(dtype: torch.dtype) -> tuple[Tensor, NDArray[np.uint8]]:
    """A chunk in the cast's dtype, and the same memory as bytes. Kept: to fault in its pages for every weight anew
    would take as long as the cast."""
    scratch_E = torch.empty(CHUNK_BYTES // dtype.itemsize, dtype=dtype)
    return scratch_E, tensor_bytes(scratch_E)


def stream(tensors: Iterator[tuple[str, Tensor]], dtype: DType) -> Iterator[Weight]:
    """Weights, lazily: whatever is made of one lives only until the next is asked for."""
    for name, tensor in tensors:
        spec = spec_of(name, (tuple(tensor.shape), tensor.dtype), dtype)
        yield TensorWeight(spec, tensor.detach(), DTYPES[dtype] if tensor.is_floating_point() else tensor.dtype)

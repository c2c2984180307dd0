"""Weights on their way out: one at a time, cast to the wire dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from backends.checksum import CHUNK_BYTES, checksum_bytes, copy_with_checksum
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
        own_E, per_chunk = self._tensor.contiguous().flatten(), CHUNK_BYTES // self._sent.itemsize
        digest, end = xxhash.xxh3_64(), 0
        cast_E = torch.empty(min(per_chunk, len(own_E)), dtype=self._sent)
        for first in range(0, len(own_E), per_chunk):
            piece = own_E[first : first + per_chunk]
            chunk_U = tensor_bytes(cast_E[: len(piece)].copy_(piece))
            digest.update(chunk_U)
            target_U[end : end + len(chunk_U)] = chunk_U
            end += len(chunk_U)
        return digest.hexdigest()


def stream(tensors: Iterator[tuple[str, Tensor]], dtype: DType) -> Iterator[Weight]:
    """Weights, lazily: whatever is made of one lives only until the next is asked for."""
    for name, tensor in tensors:
        spec = spec_of(name, (tuple(tensor.shape), tensor.dtype), dtype)
        yield TensorWeight(spec, tensor.detach(), DTYPES[dtype] if tensor.is_floating_point() else tensor.dtype)

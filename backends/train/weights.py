"""Weights on their way out: one at a time, cast to the wire dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backends.checksum import Digest, blocks_of, checksum_bytes
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
        return self.copy_in_blocks(blocks_of(target_U))

    def copy_in_blocks(self, blocks: Iterable[NDArray[np.uint8]]) -> str:
        """Each block is hashed while the cache holds it: the bytes of the engine's own tensor, or, where they are cast,
        what the cast has just left in the block. No cast copy of the whole weight is made on the CPU."""
        digest, start = Digest(), 0
        cast = self._tensor.device.type == "cpu" and self._tensor.dtype != self._sent
        own_E = self._tensor.contiguous().flatten() if cast else None
        own_U = None if cast else tensor_bytes(self._tensor.to(self._sent))
        for block_U in blocks:
            stop = start + len(block_U)
            if own_E is not None:
                first, last = start // self._sent.itemsize, stop // self._sent.itemsize
                with one_thread():
                    torch.from_numpy(block_U).view(self._sent).copy_(own_E[first:last])
                digest.update(block_U)
            else:
                block_U[:] = own_U[start:stop]
                digest.update(own_U[start:stop])
            start = stop
        assert start == self.spec.nbytes, (self.spec.name, start, self.spec.nbytes)
        return digest.hexdigest()


@contextmanager
def one_thread() -> Iterator[None]:
    """What torch computes meanwhile, it computes in the calling thread. Both ends of a road work at once: threads that
    share out a block of half a megabyte wait for the other end's core longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def stream(tensors: Iterator[tuple[str, Tensor]], dtype: DType) -> Iterator[Weight]:
    """Weights, lazily: whatever is made of one lives only until the next is asked for."""
    for name, tensor in tensors:
        spec = spec_of(name, (tuple(tensor.shape), tensor.dtype), dtype)
        yield TensorWeight(spec, tensor.detach(), DTYPES[dtype] if tensor.is_floating_point() else tensor.dtype)

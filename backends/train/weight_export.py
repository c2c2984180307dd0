"""Streams weights for export: one at a time, cast to the wire dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backends.protocol import Buffer, Weight, WeightSpec
from backends.weights.checksum import Digest, blocks_of, checksum_bytes
from backends.weights.tensor_bytes import DTYPES, tensor_bytes, wire_dtype
from backends.weights.word_sum import word_sums
from specs.schema.spec import DType


@cache
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
        as_it_is = tensor.dtype == sent and tensor.is_cpu and tensor.is_contiguous()
        self._own_U = tensor.view(-1).view(torch.uint8).numpy() if as_it_is else None

    def checksum(self) -> str:
        return checksum_bytes(tensor_bytes(self._tensor.to(self._sent)))

    def copy_to(self, buffer: Buffer) -> str:
        assert buffer.nbytes == self.spec.nbytes, (self.spec.name, buffer.nbytes, self.spec.nbytes)
        if isinstance(buffer, Tensor):
            own = self._tensor.to(self._sent).contiguous()
            buffer.copy_(own.view(-1).view(torch.uint8))
            return word_sums([own])[0]
        target_U = buffer.view(np.uint8).reshape(-1)
        return self.copy_in_blocks(blocks_of(target_U))

    def copy_in_blocks(self, blocks: Iterable[NDArray[np.uint8]]) -> str:
        """Each block is hashed while the cache holds it: the bytes of the engine's own tensor, or, where they are cast,
        what the cast has just left in the block. No cast copy of the whole weight is made on the CPU."""
        if self._own_U is not None:
            return self._copy(self._own_U, blocks)
        if self._tensor.is_cpu and self._tensor.dtype != self._sent:
            return self._cast(blocks)
        return self._copy(tensor_bytes(self._tensor.to(self._sent)), blocks)

    def _copy(self, own_U: NDArray[np.uint8], blocks: Iterable[NDArray[np.uint8]]) -> str:
        digest, start = Digest(), 0
        for block_U in blocks:
            piece_U = own_U[start : start + len(block_U)]
            block_U[:] = piece_U
            digest.update(piece_U)
            start += len(block_U)
        assert start == self.spec.nbytes, (self.spec.name, start, self.spec.nbytes)
        return digest.hexdigest()

    def _cast(self, blocks: Iterable[NDArray[np.uint8]]) -> str:
        own_E, digest, start = self._tensor.contiguous().flatten(), Digest(), 0
        for block_U in blocks:
            target_E = torch.from_numpy(block_U).view(self._sent)
            with one_thread():
                target_E.copy_(own_E[start : start + len(target_E)])
            digest.update(block_U)
            start += len(target_E)
        assert start == len(own_E), (self.spec.name, start, len(own_E))
        return digest.hexdigest()


@contextmanager
def one_thread() -> Iterator[None]:
    """What torch computes meanwhile, it computes in the calling thread. Both ends of a transport work at once: threads
    that share out a block of half a megabyte wait for the other end's core longer than they work."""
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

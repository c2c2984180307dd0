"""Streams weights for export: one at a time, cast to the wire dtype."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backends.protocol import Buffer, Weight, WeightSpec
from backends.train.tensor_shards import TensorKind
from backends.weights.checksum import Digest, blocks_of
from backends.weights.host_pieces import pieces_of
from backends.weights.tensor_bytes import DTYPES, torch_dtype, wire_dtype
from backends.weights.word_sum import word_sums
from specs.schema.role_section import DType

_NOTHING_U: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)


@cache
def spec_of(name: str, kind: TensorKind, dtype: DType | None) -> WeightSpec:
    """The wire's view of a tensor of this shape and dtype: floating ones travel as `dtype`, others as they are."""
    shape, own = kind
    sent = DTYPES[dtype] if dtype is not None and own.is_floating_point else own
    return WeightSpec(name, wire_dtype(sent), tuple(shape), math.prod(shape) * sent.itemsize)


class TensorWeight(Weight):
    """A weight backed by a tensor of the engine, which is cast to `sent` on its way."""

    def __init__(self, spec: WeightSpec, tensor: Tensor, sent: torch.dtype) -> None:
        self.spec = spec
        self._tensor, self._sent = tensor, sent
        self._cast_in_blocks = tensor.dtype != sent and tensor.is_cpu
        as_it_is = tensor.dtype == sent and tensor.is_cpu and tensor.is_contiguous()
        self._own_U = next(pieces_of(tensor)) if as_it_is else None

    def _whole(self) -> Tensor:
        """In wire dtype, where the engine's tensor lies."""
        return self._tensor.to(self._sent).contiguous()

    def copy_to(self, buffer: Buffer) -> str:
        assert buffer.nbytes == self.spec.nbytes, (self.spec.name, buffer.nbytes, self.spec.nbytes)
        if isinstance(buffer, Tensor):
            own = self._whole()
            buffer.copy_(own.view(-1).view(torch.uint8))
            return word_sums([own])[0]
        target_U = buffer.view(np.uint8).reshape(-1)
        return self.copy_in_blocks(blocks_of(target_U))

    def copy_in_blocks(self, blocks: Iterable[NDArray[np.uint8]]) -> str:
        """Each block is hashed while the cache holds it: the bytes of the engine's own tensor, or, where they are cast,
        what the cast has just left in the block. No cast copy of the whole weight is made on the CPU."""
        return self._cast(blocks) if self._cast_in_blocks else self._copy(blocks)

    def _copy(self, blocks: Iterable[NDArray[np.uint8]]) -> str:
        """From a device piece by piece: the next is on its way while this one is hashed."""
        pieces = pieces_of(self._whole()) if self._own_U is None else iter([self._own_U])
        digest, done, rest_U = Digest(), 0, _NOTHING_U  # the rest of the piece that is here
        for block_U in blocks:
            filled = 0
            while filled < len(block_U):
                if not len(rest_U):
                    rest_U = next(pieces)
                part_U = rest_U[: len(block_U) - filled]
                block_U[filled : filled + len(part_U)] = part_U
                digest.update(part_U)
                filled, rest_U = filled + len(part_U), rest_U[len(part_U) :]
            done += filled
        assert done == self.spec.nbytes, (self.spec.name, done, self.spec.nbytes)
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
    """Let torch compute in the calling thread alone meanwhile. Both ends of a transport work at once: threads
    that share out a block of half a megabyte wait for the other end's core longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def stream(tensors: Iterator[tuple[str, Tensor]], dtype: DType, buffers: Collection[str]) -> Iterator[Weight]:
    """Weights, lazily: whatever is made of one lives only until the next is asked for. `buffers` travel as they are."""
    for name, tensor in tensors:
        spec = spec_of(name, (tuple(tensor.shape), tensor.dtype), None if name in buffers else dtype)
        yield TensorWeight(spec, tensor.detach(), torch_dtype(spec.dtype))

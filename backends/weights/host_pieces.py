"""Bytes between a device and the host, piece by piece, through two pinned buffers: while the CPU hashes or copies one
piece, the device copies the next.

Memory that is not pinned is copied through a small buffer of the driver's own, and nobody works meanwhile. On the CPU
there is nothing to copy, unless `staged`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backends.weights.checksum import Digest

PIECE_BYTES = 4 * 2**20  # of each buffer: long enough for the bus, and the CPU's cache holds it until it is hashed


class _Lane:
    """A pinned buffer, and a stream's copies to and from it."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self.stream, self._done = stream, None if stream is None else torch.cuda.Event()
        self.buffer_U = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def start(self, target_U: Tensor, source_U: Tensor) -> None:
        if self.stream is None or self._done is None:
            target_U.copy_(source_U)
            return
        with torch.cuda.stream(self.stream):
            target_U.copy_(source_U, non_blocking=True)
            self._done.record(self.stream)

    def wait(self) -> None:
        """Until the copy that was started last is done."""
        if self._done is not None:
            self._done.synchronize()


def _lanes(tensor: Tensor) -> list[_Lane]:
    """Two, whose copies come after what the device was asked for so far."""
    stream = None
    if tensor.is_cuda:
        stream = torch.cuda.Stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        tensor.record_stream(stream)
    return [_Lane(tensor.device, stream) for _ in range(2)]


def pieces_of(tensor: Tensor, *, staged: bool = False) -> Iterator[NDArray[np.uint8]]:
    """A contiguous tensor's bytes, in order. A piece is gone when the next one is asked for."""
    bytes_U = tensor.detach().view(-1).view(torch.uint8)
    if bytes_U.is_cpu and not staged:
        yield bytes_U.numpy()
        return
    parts, lanes = bytes_U.split(PIECE_BYTES), _lanes(bytes_U)
    lanes[0].start(lanes[0].buffer_U[: len(parts[0])], parts[0])
    for number, part in enumerate(parts):
        lane, other = lanes[number % 2], lanes[1 - number % 2]
        if number + 1 < len(parts):
            following = parts[number + 1]
            other.start(other.buffer_U[: len(following)], following)
        lane.wait()
        yield lane.buffer_U[: len(part)].numpy()


def fill(tensor: Tensor, blocks: Iterable[NDArray[np.uint8]]) -> None:
    """Copy blocks of bytes from the host, one after another, into a contiguous tensor. A block is free again when the
    next one is asked for. What the device is asked for afterwards finds them there."""
    target_U = tensor.view(-1).view(torch.uint8)
    lanes = _lanes(target_U)
    copies, start = 0, 0
    for block_U in blocks:
        for first in range(0, len(block_U), PIECE_BYTES):
            piece_U = block_U[first : first + PIECE_BYTES]
            lane, copies = lanes[copies % 2], copies + 1
            lane.wait()
            pinned_U = lane.buffer_U[: len(piece_U)]
            pinned_U.numpy()[:] = piece_U
            lane.start(target_U[start : start + len(piece_U)], pinned_U)
            start += len(piece_U)
    assert start == len(target_U), (start, len(target_U))
    if target_U.is_cuda:
        torch.cuda.current_stream(target_U.device).wait_stream(lanes[0].stream)


def host_checksum(tensor: Tensor) -> str:
    """xxh3-64 (hex) of a contiguous tensor's bytes."""
    digest = Digest()
    for piece_U in pieces_of(tensor):
        digest.update(piece_U)
    return digest.hexdigest()

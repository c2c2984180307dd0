"""Small arrays of a micro-batch on their way to the device: written side by side, sent together."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

_CHUNK_BYTES = 4 * 2**20
_ALIGNMENT = 64  # bytes, as torch's own memory


class Staging:
    """`put` gives a tensor on the device at once; what it holds arrives with `send`.

    Each blocking copy of its own would wait until the device has done all that it was asked for. This is one copy from
    pinned memory, for which nobody waits. On the CPU there is nothing to copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host_U = self._device_U = torch.empty(0, dtype=torch.uint8)
        self._sent = self._used = 0  # bytes of the current chunk

    def put(self, array: NDArray[Any]) -> Tensor:
        values = torch.from_numpy(array)
        if self.device.type == "cpu":
            return values
        start = self._used + -self._used % _ALIGNMENT
        if start + values.nbytes > len(self._host_U):
            self.send()
            self._open_chunk(values.nbytes)
            start = 0
        self._used = start + values.nbytes
        host_U, device_U = (whole_U[start : self._used] for whole_U in (self._host_U, self._device_U))
        host_U.view(values.dtype).view(values.shape).copy_(values)
        return device_U.view(values.dtype).view(values.shape)

    def send(self) -> None:
        """Before anything on the device reads what was put. It may be called again after more was."""
        if self._used > self._sent:
            piece = slice(self._sent, self._used)
            self._device_U[piece].copy_(self._host_U[piece], non_blocking=True)
        self._sent = self._used

    def _open_chunk(self, nbytes: int) -> None:
        size = max(nbytes, _CHUNK_BYTES)
        # torch hands pinned memory out again only when the copies from it are done.
        self._host_U = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._device_U = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._sent = self._used = 0

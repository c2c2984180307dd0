"""Activations wait in host memory for the backward pass.

What autograd saves is copied out by storage, once, however many operators save it or a view of it. On a GPU the copies
have a stream of their own: the forward pass waits only for one that is several storages old, and the backward pass
fetches several storages ahead. On the CPU there is no other memory to go to: the copies are made all the same, so that
what is computed can be tested there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from backends.train.offload import host_memory, paired, storage_bytes

_SMALLEST = 2**18  # bytes: what is smaller stays
_AHEAD = 8  # storages whose copies may be under way


class ActivationOffload:
    """`with offload.saving():` around a forward pass. One pass at a time, each with its backward pass or none."""

    def __init__(self, device: torch.device, smallest_bytes: int = _SMALLEST) -> None:
        self.device, self.smallest_bytes = device, smallest_bytes
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.offloaded_bytes = 0  # of the last pass
        self._held: dict[int, _Held] = {}  # by storage
        self._order: list[weakref.ref[_Held]] = []
        self._leaving: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    @contextmanager
    def saving(self) -> Iterator[None]:
        self._held, self._order, self.offloaded_bytes = {}, [], 0
        self._wait(0)
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._held = {}
            self._wait(0)

    # ── on the way out ────────────────────────────────────────────────────────────────────────────

    def pack(self, tensor: Tensor) -> Tensor | _View:
        if self._stays(tensor):
            return tensor
        held = self._hold(tensor)
        held.readers += 1
        return _View(held, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _stays(self, tensor: Tensor) -> bool:
        """Parameters are there anyway, and engines move them about."""
        if tensor.device.type != self.device.type or tensor.untyped_storage().nbytes() < self.smallest_bytes:
            return True
        return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter) or type(tensor) is not Tensor

    def _hold(self, tensor: Tensor) -> _Held:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        known = self._held.get(reference.cdata)
        if known is not None and known.version == tensor._version and not known.source.expired():
            return known
        held = _Held(self, len(self._order), self._copy_out(storage_bytes(tensor)), reference, tensor._version)
        self._held[reference.cdata] = held
        self._order.append(weakref.ref(held))
        self.offloaded_bytes += storage.nbytes()
        return held

    def _copy_out(self, source: Tensor) -> list[Tensor]:
        if self.stream is None:
            return [source.clone()]
        host = host_memory(source)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for piece, part in paired(host, source):
                piece.copy_(part, non_blocking=True)
            self._leaving.append((self.stream.record_event(), source))
        self._wait(_AHEAD)
        return host

    def _wait(self, most: int) -> None:
        """Let go of what was copied. The pass itself waits for the copy, so that its memory may be used again."""
        while len(self._leaving) > most:
            copied, _ = self._leaving.popleft()
            torch.cuda.current_stream(self.device).wait_event(copied)

    # ── on the way back ───────────────────────────────────────────────────────────────────────────

    def unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        held = packed.held
        ahead = 0 if self.stream is None else _AHEAD
        for number in range(held.number, max(held.number - ahead, 0) - 1, -1):
            if (other := self._order[number]()) is not None and (other is held or other.readers):
                other.fetch()
        return packed.restored()


class _Held:
    """A storage's bytes: on the host, and on the device from the first reader of the backward pass to the last."""

    def __init__(
        self, offload: ActivationOffload, number: int, host: list[Tensor], source: StorageWeakRef, version: int
    ) -> None:
        self.offload, self.number, self.host, self.source, self.version = offload, number, host, source, version
        self.readers = 0
        self.back: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None

    def fetch(self) -> None:
        if self.back is not None:
            return
        stream = self.offload.stream
        if stream is None:
            (self.back,) = self.host
            return
        current = torch.cuda.current_stream(self.offload.device)
        self.back = torch.empty(sum(map(len, self.host)), dtype=torch.uint8, device=self.offload.device)
        stream.wait_stream(current)  # the memory may still be in use there
        with torch.cuda.stream(stream):
            for piece, part in paired(self.host, self.back):
                part.copy_(piece, non_blocking=True)
            self.arrived = stream.record_event()
        # It may be let go before anyone reads it, of a branch without a gradient: not while the copy is under way.
        self.back.record_stream(stream)

    def read(self) -> Tensor:
        assert self.back is not None
        found = self.back
        if self.arrived is not None:
            torch.cuda.current_stream(self.offload.device).wait_event(self.arrived)
        self.readers -= 1
        if self.readers <= 0:
            self.back = self.arrived = None
        return found


@dataclass(frozen=True, eq=False)
class _View:
    """Say where in a storage the tensor lies that an operator saved."""

    held: _Held
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def restored(self) -> Tensor:
        whole = self.held.read()
        found = torch.empty(0, dtype=self.dtype, device=whole.device)
        return found.set_(whole.untyped_storage(), self.offset, self.shape, self.stride)

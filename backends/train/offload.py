"""Move tensors off the device and back, unseen by whatever holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_LEAST_PIECE = 2**20  # bytes


class Offloader:
    """Moves tensors off the device and back, leaving every view of their storage intact.

    Each tensor must fill its storage. An offloaded one keeps its shape, but the storage is emptied. On CPU there is
    nowhere to go: only what `drop` names is let go of (and comes back as zeros), but for what a library pinned there,
    which cannot be.
    """

    def __init__(self) -> None:
        self._offloaded: list[tuple[Tensor, list[Tensor] | None, int]] = []  # tensor, its bytes, how many

    @property
    def offloaded(self) -> bool:
        return bool(self._offloaded)

    def offload(self, keep: list[Tensor], drop: list[Tensor]) -> None:
        for tensor in keep:
            if self._stays(tensor):
                continue
            nbytes = tensor.untyped_storage().nbytes()
            pieces = host_memory(tensor)
            for piece, part in paired(pieces, tensor):
                piece.copy_(part, non_blocking=True)
            self._offloaded.append((tensor, pieces, nbytes))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        storages = ((tensor, tensor.untyped_storage()) for tensor in drop)
        self._offloaded += [(tensor, None, storage.nbytes()) for tensor, storage in storages if storage.resizable()]
        for tensor, _, _ in self._offloaded:
            tensor.untyped_storage().resize_(0)

    def _stays(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def onload(self) -> None:
        for tensor, pieces, nbytes in self._offloaded:
            tensor.untyped_storage().resize_(nbytes)
            if pieces is None:
                tensor.zero_()
                continue
            for piece, part in paired(pieces, tensor):
                part.copy_(piece, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._offloaded = []


def piece_sizes(nbytes: int) -> list[int]:
    """`nbytes` as a sum of powers of two and a small rest: torch rounds each piece of pinned memory up to a power of
    two, which for one piece may be twice as much."""
    sizes, rest = [], nbytes
    while rest >= _LEAST_PIECE:
        sizes.append(1 << rest.bit_length() - 1)
        rest -= sizes[-1]
    return [*sizes, rest] if rest else sizes


def host_memory(tensor: Tensor) -> list[Tensor]:
    """Return pieces of host memory for a tensor's storage, pinned where it is on a GPU."""
    sizes = piece_sizes(tensor.untyped_storage().nbytes())
    return [torch.empty(size, dtype=torch.uint8, pin_memory=tensor.is_cuda) for size in sizes]


def paired(pieces: list[Tensor], tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each piece with the part of the tensor's storage that it is for."""
    return zip(pieces, storage_bytes(tensor).split([len(piece) for piece in pieces]), strict=True)


def storages_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The bytes of each storage that the tensors lie in, once and whole: views may be many, padded, or share one."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        if tensor.untyped_storage().nbytes():
            found[tensor.untyped_storage().data_ptr()] = storage_bytes(tensor)
    return list(found.values())


def storage_bytes(tensor: Tensor) -> Tensor:
    """Return all bytes of its storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())

"""Moving tensors off the device and back without anybody who holds them noticing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Offloader:
    """Moves tensors off the device and back, leaving every view of their storage intact.

    Each tensor must fill its storage. A offloaded one keeps its shape, but the storage is emptied. On CPU there is
    nowhere to go: only what `drop` names is let go of (and comes back as zeros).
    """

    def __init__(self) -> None:
        self._offloaded: list[tuple[Tensor, Tensor | None, int]] = []

    @property
    def offloaded(self) -> bool:
        return bool(self._offloaded)

    def offload(self, keep: list[Tensor], drop: list[Tensor]) -> None:
        for tensor in keep:
            if self._stays(tensor):
                continue
            host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)
            self._offloaded.append((tensor, host, tensor.untyped_storage().nbytes()))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._offloaded += [(tensor, None, tensor.untyped_storage().nbytes()) for tensor in drop]
        for tensor, _, _ in self._offloaded:
            tensor.untyped_storage().resize_(0)

    def _stays(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def onload(self) -> None:
        for tensor, host, nbytes in self._offloaded:
            tensor.untyped_storage().resize_(nbytes)
            if host is None:
                tensor.zero_()
            else:
                tensor.copy_(host, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._offloaded = []


def storages_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The bytes of each storage that the tensors lie in, once and whole: views may be many, padded, or share one."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            found[storage.data_ptr()] = whole.set_(storage)
    return list(found.values())

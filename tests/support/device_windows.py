"""The transport `cuda_ipc` where there is no GPU: its windows lie in this process's host memory, as tensors. All
around them is what runs on a GPU."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from workers.transports import cuda_ipc


class HostWindows:
    """In the places of `SharedWindows` and `MappedWindows`. Those that are open are in `opened`."""

    opened: ClassVar[dict[str, HostWindows]] = {}

    def __init__(self, windows: list[Tensor]) -> None:
        self.windows = windows

    @classmethod
    def share(cls, nbytes: int, count: int) -> HostWindows:
        return cls([torch.full((nbytes,), 0xA5, dtype=torch.uint8) for _ in range(count)])

    @classmethod
    def map(cls, offer: dict[str, Any]) -> HostWindows:
        return cls(cls.opened[offer["key"]].windows)

    def handles(self) -> dict[str, Any]:
        self.opened[str(id(self))] = self
        return {"key": str(id(self))}

    def window(self, bucket: int) -> Tensor:
        return self.windows[bucket % len(self.windows)]

    def finish_writing(self) -> None: ...

    def close(self) -> None:
        self.opened.pop(str(id(self)), None)


def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "SharedWindows", HostWindows.share)
    monkeypatch.setattr(cuda_ipc, "MappedWindows", HostWindows.map)

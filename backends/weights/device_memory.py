"""Device memory of one process, mapped by another on the same GPU (CUDA IPC). For `workers/transports/cuda_ipc.py`.

The handles are torch's, those that it sends tensors between processes with; here they travel as JSON, never as pickle.
The owner may write a window again, and give it up, only when the other side has said that it is done with it: the
driver's pacing sees to the first, `close` in the order reader, writer to the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specs.errors import SyncError

_HANDLE = ("device", "handle", "nbytes", "offset", "counter", "counter_offset", "event", "event_sync")


class SharedWindows:
    """The owner's end: windows that others may map."""

    def __init__(self, nbytes: int, count: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.windows = [torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device) for _ in range(count)]

    def handles(self) -> dict[str, Any]:
        """Return what `MappedWindows` needs, as JSON. Each call shares the memory once: to one reader."""
        return {"gpu": this_gpu(), "windows": [_to_json(window_U) for window_U in self.windows]}

    def window(self, bucket: int) -> Tensor:
        return self.windows[bucket % len(self.windows)]

    def finish_writing(self) -> None:
        """When this returns, written bytes are visible to other processes."""
        torch.cuda.synchronize()

    def close(self) -> None:
        self.windows = []
        torch.cuda.ipc_collect()


class MappedWindows:
    """The reader's end."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        if handles["gpu"] != (own := this_gpu()):
            message = f"the actor's GPU is {handles['gpu']}, the rollout's {own}: CUDA IPC joins two roles on one"
            raise SyncError(message, hint='set sync.transport = "shm"')
        self.windows = [_from_json(handle) for handle in handles["windows"]]

    def window(self, bucket: int) -> Tensor:
        return self.windows[bucket % len(self.windows)]

    def close(self) -> None:
        torch.cuda.synchronize()  # no copy out of the mapping is still to come
        self.windows = []
        torch.cuda.ipc_collect()


def this_gpu() -> str:
    """Which GPU this is, whatever number it has among those that the process sees."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _to_json(window_U: Tensor) -> dict[str, Any]:
    parts = window_U.untyped_storage()._share_cuda_()
    return {key: part.hex() if isinstance(part, bytes) else part for key, part in zip(_HANDLE, parts, strict=True)}


def _from_json(handle: Mapping[str, Any]) -> Tensor:
    own = {**handle, "device": torch.cuda.current_device()}
    parts = [bytes.fromhex(own[key]) if isinstance(own[key], str) else own[key] for key in _HANDLE]
    storage = torch.UntypedStorage._new_shared_cuda(*parts)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

"""The process group of a role's ranks."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch import distributed as dist

from backends.protocol import Rank

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def join_group(rank: Rank, device: str) -> None:
    """Pick this rank's GPU and join the group that the launcher's environment names. One rank alone needs no group."""
    if device.startswith("cuda"):
        torch.cuda.set_device(rank.local_rank % torch.cuda.device_count())
    if rank.world_size == 1 or dist.is_initialized():
        return
    if int(os.environ.get("LOCAL_WORLD_SIZE", rank.world_size)) == rank.world_size:
        # All ranks on one host: nothing has to listen beyond loopback.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    backend = "nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, rank=rank.rank, world_size=rank.world_size)


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()

"""The process group of a role's ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed as dist

from backends.protocol import COLLECTIVE_TIMEOUT, Rank


def join_group(rank: Rank, device: str, *, even_alone: bool = False) -> None:
    """Pick this rank's GPU and join the group that the launcher's environment names. One rank alone needs no group,
    but for an engine that cannot do without one (`even_alone`); that one has no address."""
    if device.startswith("cuda"):
        torch.cuda.set_device(device_index(rank, torch.cuda.device_count()))
    if dist.is_initialized() or (rank.world_size == 1 and not even_alone):
        return
    backend = "nccl" if device.startswith("cuda") else "gloo"
    if rank.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    if int(os.environ.get("LOCAL_WORLD_SIZE", rank.world_size)) == rank.world_size:
        # All ranks are on one host: listening on loopback suffices.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, rank=rank.rank, world_size=rank.world_size)


def device_index(rank: Rank, visible: int) -> int:
    """Which of the `visible` devices is this rank's. Usually each rank sees only its own, which is the first."""
    return rank.local_rank % visible


@contextmanager
def pretended_group(rank: Rank) -> Iterator[None]:
    """A fake group of that many ranks: its collectives send nothing and leave tensors unchanged."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "a process has one group"
    dist.init_process_group("fake", store=FakeStore(), rank=rank.rank, world_size=rank.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def most_of_any_rank(count: int, device: torch.device) -> int:
    """Maximum over all ranks; a collective."""
    most = torch.tensor([count], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()

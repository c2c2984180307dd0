"""The process group of a role's ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import distributed as dist

from backends.bound_store import bound_store, joined_store
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
    dist.init_process_group(
        backend, store=meeting_store(rank), timeout=COLLECTIVE_TIMEOUT, rank=rank.rank, world_size=rank.world_size
    )


def meeting_store(rank: Rank) -> dist.Store | None:
    """Where the ranks first meet: on one host in a file that only this user can read; else at rank 0, which listens at
    MASTER_ADDR alone. None: torchrun's agents serve it."""
    if path := os.environ.get("RLCTL_GROUP_STORE"):
        return dist.FileStore(path, rank.world_size)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank.world_size, COLLECTIVE_TIMEOUT)
    return bound_store(*where)[0] if rank.rank == 0 else joined_store(*where)


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


def most_of_any_rank(number: float, device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    """Return the maximum over the ranks of a group, or all; a collective. NaN is more than any number."""
    most = torch.tensor(math.inf if math.isnan(number) else number, dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return float(most)


def heaviest_of_any_rank(work: Sequence[float], device: torch.device) -> list[float]:
    """Each number's maximum over all ranks; a collective. All bring as many."""
    most = torch.tensor(work, dtype=torch.float64, device=device)
    if dist.is_initialized() and len(work) > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    found: list[float] = most.tolist()
    return found


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()

"""Collectives between threads of the test's process: a group of ranks without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


class ThreadedGroup:
    """What one rank sees of the group."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: dict[int, Tensor]) -> None:
        self.rank, self.barrier, self.board = rank, barrier, board

    @staticmethod
    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: ThreadedGroup | None = None) -> None:
        """In place, as that of torch.distributed."""
        assert group is not None
        group.board[group.rank] = tensor.clone()
        group.barrier.wait(150)
        parts = torch.stack([group.board[rank] for rank in sorted(group.board)])
        group.barrier.wait(150)
        reduce = {dist.ReduceOp.MAX: parts.amax, dist.ReduceOp.MIN: parts.amin}.get(op, parts.sum)
        tensor.copy_(reduce(0))


def on_threads(ranks: int, work: Callable[[int, ThreadedGroup], Any]) -> list[Any]:
    """What `work` returns on each rank; raises what the first one raised."""
    barrier, board = threading.Barrier(ranks), dict[int, Tensor]()
    found: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank, ThreadedGroup(rank, barrier, board))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(ranks)]

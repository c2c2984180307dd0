"""A process group that spans roles: the actor's rank 0 and every rollout. For weights only
(`workers/transports/process_group.py`).

It is made from torch's process-group classes themselves, so that it lives beside whatever group an engine has.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from backends.bound_store import bound_store, joined_store
from backends.peer_errors import as_peer_error
from backends.protocol import COLLECTIVE_TIMEOUT, Buffer
from backends.weights import lost_peers

_POLL_S = 2e-4  # a bucket takes longer


@dataclass(frozen=True)
class GroupMeeting:
    """Where the ranks of a group find one another; `key` tells this group from an earlier one at the same place. It
    ends, and nobody listens there any more, when `serving` is emptied."""

    address: str
    port: int
    size: int
    key: str
    serving: list[Any] = field(default_factory=list, compare=False, repr=False)  # at its host: the store


def host_meeting(address: str, size: int) -> GroupMeeting:
    """Listen for the other `size` - 1 ranks at `address`, on a port that is free."""
    store, port = bound_store(address, 0, size, COLLECTIVE_TIMEOUT)
    return GroupMeeting(address, port, size, secrets.token_hex(8), [store])


@contextmanager
def _without_nccls_watchdog() -> Iterator[None]:
    """Make groups that leave it to us what a lost peer means: torch's default ends the process, and the actor with it.
    The constructor reads the variable."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class JoinedGroup:
    """One rank's end. Windows lie in host memory (gloo), or on this process's GPU when `device` is "cuda" (NCCL).

    Whatever waits for the other ranks raises PeerGone when one is gone, PeerLate when one does not come in time.
    """

    def __init__(self, meeting: GroupMeeting, rank: int, device: str) -> None:
        """Returns when all ranks have come and one byte has gone round; RuntimeError when no group forms."""
        self.meeting = meeting
        self._others = "a rollout" if rank == 0 else "the actor or a rollout"
        self.device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        self._windows: list[Tensor] = []
        self._sending: dict[int, Any] = {}
        with self._reaching_others():
            self._group: Any = self._join(rank)
            # NCCL connects at the first collective, and only when all call it: now they do, later they come in turn.
            self._group.allreduce(torch.zeros(1, dtype=torch.uint8, device=self.device)).wait()
        if self.device.type == "cpu":  # all have met. A thread of NCCL's may ask the store later
            meeting.serving.clear()

    def _join(self, rank: int) -> Any:
        meeting = self.meeting
        served = joined_store(meeting.address, meeting.port, meeting.size, COLLECTIVE_TIMEOUT)
        make = self._nccl if self.device.type == "cuda" else self._gloo
        return make(dist.PrefixStore(meeting.key, served), rank, meeting.size)

    @contextmanager
    def _reaching_others(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if (peer_error := as_peer_error(error, self._others)) is None:
                raise
            raise peer_error from error

    def _gloo(self, store: Any, rank: int, size: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs know nothing of its options
        options = gloo._Options()
        options._timeout = COLLECTIVE_TIMEOUT
        options._devices = [gloo.create_device(hostname=self._own_address())]
        return gloo(store, rank, size, options)

    def _nccl(self, store: Any, rank: int, size: int) -> Any:
        torch.cuda.set_device(self.device)  # the writer joins in a thread of its own
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = COLLECTIVE_TIMEOUT
        with _without_nccls_watchdog():
            return dist.ProcessGroupNCCL(store, rank, size, options)

    def _own_address(self) -> str:
        """This host's address on the way to the meeting."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.meeting.address, self.meeting.port))
            return str(probe.getsockname()[0])

    def make_windows(self, nbytes: int, count: int) -> None:
        """Have `count` windows of at least `nbytes`; those that are there and fit are kept."""
        if len(self._windows) < count or any(len(window_U) < nbytes for window_U in self._windows):
            self._wait()
            self._windows = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(count)]

    def use_windows(self, windows: Sequence[NDArray[np.uint8]]) -> None:
        """Receive into this host memory."""
        self._wait()
        self._windows = [torch.from_numpy(window_U) for window_U in windows]

    def window(self, bucket: int) -> Buffer:
        slot = bucket % len(self._windows)
        if (work := self._sending.pop(slot, None)) is not None:
            self._finish(work)
        return self._buffer(slot)

    def broadcast(self, bucket: int, nbytes: int) -> None:
        """Start to send the first `nbytes` of a bucket's window. Does not wait for the readers."""
        slot = bucket % len(self._windows)
        with self._reaching_others():
            self._sending[slot] = self._group.broadcast(self._windows[slot][:nbytes], 0)

    def receive(self, bucket: int, nbytes: int) -> Buffer:
        slot = bucket % len(self._windows)
        with self._reaching_others():
            work = self._group.broadcast(self._windows[slot][:nbytes], 0)
        self._finish(work)
        return self._buffer(slot)

    def rest(self) -> None:
        """Give memory on a device back; host memory is kept."""
        self._wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._windows = []

    def close(self) -> None:
        """Leave, whether the others are still there or not. A group waits for what it has begun to send, and its
        receivers may never come, so a thread gives it up."""
        held = [self._sending, self._windows, self._group]
        self._group, self._sending, self._windows = None, {}, []
        threading.Thread(target=held.clear, name="weights-leave", daemon=True).start()

    def _wait(self) -> None:
        for work in self._sending.values():
            self._finish(work)
        self._sending = {}

    def _finish(self, work: Any) -> None:
        with self._reaching_others():
            if self.device.type == "cpu":
                self._wait_unless_lost(work)
            else:
                self._poll_unless_lost(work)
            work.wait()

    def _wait_unless_lost(self, work: Any) -> None:
        """Until gloo is done, well or not. Raises PeerGone as soon as the driver says that somebody is gone: gloo would
        wait for one whose network is down until its timeout."""
        while not work.is_completed():
            try:
                work.wait(timedelta(seconds=lost_peers.LOOK_S))
            except RuntimeError:
                if not work.is_completed():
                    lost_peers.check(self._others)

    def _poll_unless_lost(self, work: Any) -> None:
        """The same for NCCL, whose own wait only puts the stream in line: from then on the process would hang in CUDA.
        Leaving lets go of the group, which aborts its communicator and with it the kernels that wait."""
        while not work.is_completed():
            lost_peers.check(self._others)
            time.sleep(_POLL_S)

    def _buffer(self, slot: int) -> Buffer:
        window_U = self._windows[slot]
        return window_U if self.device.type == "cuda" else window_U.numpy()

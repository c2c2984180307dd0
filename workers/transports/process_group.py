"""The transport over a process group of the actor's rank 0 and all rollouts: NCCL between GPUs, gloo between hosts or
CPUs.

Each bucket is one broadcast. The group is separate from the actor's own. Both ends need torch, which only
`backends/weights/joined_group.py` imports.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from backends.protocol import Buffer
from backends.weights.joined_group import JoinedGroup, Meeting, host_meeting
from specs.errors import PeerGone, RlctlError
from workers.transports.base import NOTHING_KNOWN, BucketReader, BucketWriter, Entry, Known


class GroupWriter(BucketWriter):
    """Rank 0 of the group. The others need the offer to find it, so a thread waits for them."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.address, self.device = str(options["address"]), str(options["device"])
        self.meeting: Meeting | None = None
        self.group: JoinedGroup | None = None
        self._joining: threading.Thread | None = None
        self._error: RuntimeError | PeerGone | None = None
        self._sizes: list[int] = []
        self._windows = 0

    def begin(
        self, sizes: Sequence[int], windows: int, readers: int, *, renew: bool, known: Known = NOTHING_KNOWN
    ) -> dict[str, Any]:
        self._sizes, self._windows = list(sizes), windows
        if renew or self.meeting is None:
            self.close()
            self.meeting = host_meeting(self.address, 1 + readers)
            self._joining = threading.Thread(target=self._join, args=(self.meeting,), name="weights", daemon=True)
            self._joining.start()
        meeting = self.meeting
        where = {"address": meeting.address, "port": meeting.port, "size": meeting.size, "key": meeting.key}
        return {**where, "device": self.device, "sizes": self._sizes, "windows": windows, "leftovers": []}

    def _join(self, meeting: Meeting) -> None:
        """Join in a thread; only the latest meeting counts."""
        try:
            group = JoinedGroup(meeting, 0, self.device)
        except (RuntimeError, PeerGone) as error:  # raised by the next call that waits for the group
            if meeting is self.meeting:
                self._error = error
            return
        if meeting is self.meeting:
            self.group = group

    def _joined(self) -> JoinedGroup:
        if self._joining is not None:
            self._joining.join()
            self._joining = None
        if self.group is None:
            assert self._error is not None
            if isinstance(self._error, PeerGone):
                raise self._error
            raise RlctlError(f"the actor and the rollouts could not form a group: {self._error}") from self._error
        return self.group

    def window(self, bucket: int) -> Buffer:
        group = self._joined()
        group.make_windows(max(self._sizes), self._windows)
        return group.window(bucket)

    def send(self, bucket: int, entries: Sequence[Entry]) -> int:
        # As long as was announced, whatever lies in it: gloo ends a process whose peer has another length in mind.
        self._joined().broadcast(bucket, self._sizes[bucket])
        return self._sizes[bucket]

    def rest(self) -> None:
        self._joined().rest()

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = self.meeting = self._joining = self._error = None


class GroupReader(BucketReader):
    """Rank 1 + replica of the group."""

    def __init__(self, options: Mapping[str, Any], replica: int) -> None:
        self.rank = 1 + replica
        self._sizes: list[int] = []
        self.meeting: Meeting | None = None
        self.group: JoinedGroup | None = None

    def begin(self, offer: Mapping[str, Any]) -> None:
        meeting = Meeting(offer["address"], int(offer["port"]), int(offer["size"]), offer["key"])
        if self.group is None or meeting.key != self.group.meeting.key:
            self.close()
            self.group = JoinedGroup(meeting, self.rank, offer["device"])
        self._sizes = [int(size) for size in offer["sizes"]]
        self.group.make_windows(max(self._sizes, default=0), int(offer["windows"]))

    def receive(self, bucket: int, entries: Sequence[Entry]) -> Buffer:
        assert self.group is not None, "begin comes first"
        return self.group.receive(bucket, self._sizes[bucket])

    def rest(self) -> None:
        if self.group is not None:
            self.group.rest()

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = None

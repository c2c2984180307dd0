"""The transport over a process group of the actor's rank 0 and the rollouts: NCCL between GPUs, gloo between hosts or
CPUs.

Each bucket is one broadcast. Over gloo one reader per host takes part, the leader, and its windows lie in memory that
the other rollouts of the host map (`host_readers.py`): a host is sent the weights once, however many rollouts it has.
NCCL passes them on inside a host by itself, so there all take part. The group is separate from the actor's own. Both
ends need torch, which only `backends/weights/joined_group.py` imports.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from backends.protocol import Buffer
from backends.weights.joined_group import GroupMeeting, JoinedGroup, host_meeting
from backends.weights.lost_peers import unless_lost, wait_for_thread
from specs.errors import PeerGone, RlctlError
from workers.transports.base import BucketReader, BucketWriter, Entry, Readers
from workers.transports.host_readers import HostFollower, HostLeader


class GroupWriter(BucketWriter):
    """Rank 0 of the group. The others need the offer to find it, so a thread waits for them."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.address, self.device = str(options["address"]), str(options["device"])
        self.meeting: GroupMeeting | None = None
        self.group: JoinedGroup | None = None
        self._joining: threading.Thread | None = None
        self._error: RuntimeError | PeerGone | None = None
        self._sizes: list[int] = []
        self._windows = 0
        self._hosts: list[list[int]] = []  # rollouts by host, the leader first

    def begin(self, sizes: Sequence[int], windows: int, readers: Readers) -> dict[str, Any]:
        self._sizes, self._windows = list(sizes), windows
        before, self._hosts = self._hosts, [list(host) for host in readers.hosts]
        if self.device != "cpu":
            self._hosts = [[replica] for host in readers.hosts for replica in host]
        if readers.renew or self.meeting is None or self._hosts != before:
            self.close()
            self.meeting = host_meeting(self.address, 1 + len(self._hosts))
            self._joining = threading.Thread(target=self._join, args=(self.meeting,), name="weights", daemon=True)
            self._joining.start()
        meeting = self.meeting
        where = {"address": meeting.address, "port": meeting.port, "size": meeting.size, "key": meeting.key}
        told = {"device": self.device, "sizes": self._sizes, "windows": windows, "hosts": self._hosts}
        return {**where, **told, "leftovers": []}

    def _join(self, meeting: GroupMeeting) -> None:
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
            wait_for_thread(self._joining, "a rollout")
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
    """Rank 1 + host of the group, or a follower of the rollout that is."""

    def __init__(self, options: Mapping[str, Any], replica: int) -> None:
        self.replica = replica
        self.group: JoinedGroup | None = None
        self.leader: HostLeader | None = None  # of this host: this reader itself
        self.follower: HostFollower | None = None
        self._key = ""
        self._sizes: list[int] = []

    def begin(self, offer: Mapping[str, Any]) -> None:
        self._sizes = [int(size) for size in offer["sizes"]]
        try:
            if self._key != offer["key"]:
                self.close()
                self._meet(offer)
                self._key = offer["key"]
            self._make_windows(max(self._sizes, default=0), int(offer["windows"]))
        except BaseException:
            self.close()  # others of this host, and of the group, wait for it
            raise

    def _meet(self, offer: Mapping[str, Any]) -> None:
        hosts: Sequence[Sequence[int]] = offer["hosts"]
        place = next(number for number, host in enumerate(hosts) if self.replica in host)
        leader, *followers = hosts[place]
        name = f"{offer['key']}-{place}"
        if self.replica != leader:
            self.follower = HostFollower(name, f"rollout {leader}")
            return
        if followers:
            self.leader = HostLeader(name, len(followers))
        meeting = GroupMeeting(offer["address"], int(offer["port"]), int(offer["size"]), offer["key"])
        others = "the actor or a rollout"
        self.group = unless_lost(lambda: JoinedGroup(meeting, 1 + place, offer["device"]), others)
        if self.leader is not None:
            unless_lost(self.leader.meet, others)

    def _make_windows(self, nbytes: int, count: int) -> None:
        if self.follower is not None:
            self.follower.begin(count)
            return
        assert self.group is not None
        if self.leader is None:
            self.group.make_windows(nbytes, count)
        else:
            self.group.use_windows(self.leader.windows(nbytes, count))

    def receive(self, bucket: int, entries: Sequence[Entry]) -> Buffer:
        try:
            if self.follower is not None:
                return self.follower.receive(bucket)
            assert self.group is not None, "begin comes first"
            window = self.group.receive(bucket, self._sizes[bucket])
        except BaseException:
            self.close()  # those that it sends on to learn of it
            raise
        if self.leader is not None:
            self.leader.hand_on()
        return window

    def rest(self) -> None:
        if self.group is not None:
            self.group.rest()

    def close(self) -> None:
        for held in (self.group, self.leader, self.follower):
            if held is not None:
                held.close()
        self.group = self.leader = self.follower = None
        self._key = ""

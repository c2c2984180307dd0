"""Waiting for a broadcast by looking whether it is done, as over NCCL; here it is gloo's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from backends import activity
from backends.weights import lost_peers
from backends.weights.joined_group import JoinedGroup, host_meeting
from specs.errors import PeerGone


def test_who_looks_leaves_when_the_driver_says_that_somebody_is_gone() -> None:
    meeting = host_meeting("127.0.0.1", 2)
    with ThreadPoolExecutor(2) as pool:
        writer, reader = pool.map(lambda rank: JoinedGroup(meeting, rank, "cpu"), (0, 1))
    sent_U = torch.arange(64, dtype=torch.uint8)
    for group, content_U in ((writer, sent_U), (reader, torch.zeros(64, dtype=torch.uint8))):
        group.use_windows([content_U.numpy()])
    work = reader._group.broadcast(reader._windows[0], 0)
    activity.begin("import_bucket", 7, counted=False)
    try:
        lost_peers.tell(7)
        with pytest.raises(PeerGone, match="is gone, the driver says"):
            reader._poll_unless_lost(work)
        lost_peers.tell(0)
        writer.broadcast(0, 64)
        reader._poll_unless_lost(work)
        assert torch.equal(reader._windows[0], sent_U)
    finally:
        lost_peers.tell(0)
        activity.end()
        reader.close()
        writer.close()

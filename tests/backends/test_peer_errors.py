"""Errors of torch.distributed by type, and by the library's own text where one type stands for everything."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import warm_python
from torch import distributed as dist

from backends.peer_errors import as_peer_error, cause_of
from specs.errors import Cause, PeerGone, PeerLate, SyncError

SOURCE = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, {}, NCCL version 2.26.2\n{}"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError(f"{SOURCE}pair.cc:553] Connection closed by peer [127.0.0.1]:29908."), Cause.PEER_GONE),
        (RuntimeError(f"{SOURCE}pair.cc:600] write [127.0.0.1]:1: Broken pipe"), Cause.PEER_GONE),
        (RuntimeError(f"{SOURCE}unbound_buffer.cc:78] Timed out waiting 6000ms for recv"), Cause.PEER_LATE),
        (RuntimeError(f"{SOURCE}pair.cc:537] Read error [127.0.0.1]:7591: Connection reset by peer"), Cause.PEER_GONE),
        (RuntimeError(f"{SOURCE}pair.cc:99] Connect timeout [127.0.0.1]:1"), Cause.PEER_LATE),
        (RuntimeError(f"{SOURCE}pair.cc:1] SO_ERROR: Connection refused, remote=[127.0.0.1]:1"), Cause.PEER_GONE),
        (RuntimeError(f"{SOURCE}pair.cc:700] Application timeout caused pair closure"), Cause.PEER_LATE),
        (RuntimeError(f"{SOURCE}pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"), Cause.RAISED),
        (RuntimeError("Connection closed by peer: a reward server said so"), Cause.RAISED),  # not gloo's
        (ValueError(f"{SOURCE}pair.cc:553] Connection closed by peer"), Cause.RAISED),
        (dist.DistStoreError("whatever"), Cause.PEER_LATE),
        (dist.DistNetworkError("whatever"), Cause.PEER_GONE),
        (dist.DistNetworkError("The server socket has failed to listen on any local address"), Cause.RAISED),
        (
            dist.DistBackendError(NCCL.format("remote process exited or there was a network error", "ncclRemoteError")),
            Cause.PEER_GONE,
        ),
        (dist.DistBackendError(NCCL.format("unhandled cuda error", "ncclUnhandledCudaError")), Cause.RAISED),
        (dist.DistBackendError("store->get('0') got error: wait timeout after 600000ms, keys: /0"), Cause.PEER_LATE),
        (ConnectionResetError(104, "x"), Cause.PEER_GONE),
        (TimeoutError("x"), Cause.PEER_LATE),
        (SyncError("Connection closed by peer"), Cause.RAISED),
    ],
)
def test_cause_of(error: Exception, cause: Cause) -> None:
    assert cause_of(error) is cause
    found = as_peer_error(error, "rollout 1")
    assert type(found) is {Cause.PEER_GONE: PeerGone, Cause.PEER_LATE: PeerLate}.get(cause, type(None))
    assert found is None or (found.peer == "rollout 1" and str(error) in found.message)


LONE = """
import sys, datetime
from torch import distributed as dist
from backends.peer_errors import cause_of
rank, port, wait = int(sys.argv[1]), int(sys.argv[2]), datetime.timedelta(seconds=1)
try:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=wait, wait_for_workers=False)
    dist.ProcessGroupGloo(store, rank, 2, wait)
except Exception as error:
    print(type(error).__name__, cause_of(error))
"""


def test_a_rank_whose_peers_never_come_waited_for_them(tmp_path: Path) -> None:
    """What this torch really raises. Rank 0 waits in a store that it serves; rank 1 for a server that is not there."""
    script = tmp_path / "lone.py"
    script.write_text(LONE)
    for rank, cause in ((0, Cause.PEER_LATE), (1, Cause.PEER_GONE)):
        assert warm_python(script, str(rank), str(rank)).split()[-1:] == [cause]

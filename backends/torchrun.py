"""`python -m backends.torchrun`: torchrun with a rendezvous that no stranger can reach.

Options as torchrun's, and these:

    --rdzv-endpoint ADDRESS:PORT    where the ranks meet (MASTER_ADDR and MASTER_PORT)
    --rdzv-conf node=N              place of this host among `--nnodes`

torchrun's own keep the agents' state in a store that listens on every interface of the host without any key. With
`--standalone` that state is pickled: whoever connects has his code run by the agent. Here the agent of a role on one
host keeps its state in memory. Agents on several hosts share a store, in which they keep text and JSON; the first one
serves it at the address of `--rdzv-endpoint` alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta

from torch import distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from backends.bound_store import bound_store, joined_store

BACKEND = "rlctl"
_JOIN_TIMEOUT = timedelta(minutes=10)


class FixedRendezvous(RendezvousHandler):
    """The hosts are known from the start: none comes later, and a group that lost one is over."""

    def __init__(self, params: RendezvousParameters) -> None:
        address, _, port = params.endpoint.rpartition(":")
        self._meeting = RendezvousStoreInfo(address, int(port))
        self._node, self._nodes = int(params.get("node", 0)), params.max_nodes
        self._run_id = params.run_id
        self._store: dist.Store | None = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Ranks on several hosts meet in the agents' store; on one host they have their own."""
        return self._nodes > 1

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store = self._open_store()
        store = dist.PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, self._node, self._nodes, self._meeting)

    def _open_store(self) -> dist.Store:
        if self._nodes == 1:
            return dist.HashStore()
        where = (self._meeting.master_addr, self._meeting.master_port, self._nodes, _JOIN_TIMEOUT)
        return bound_store(*where)[0] if self._node == 0 else joined_store(*where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def main(argv: Sequence[str] | None = None) -> None:
    rendezvous_handler_registry.register(BACKEND, FixedRendezvous)
    # torchrun makes a folder for logs even where it writes none, and never removes it. In the folder of the group's
    # store the driver does so, should this process be killed.
    store = os.environ.get("RLCTL_GROUP_STORE")
    parent = os.path.dirname(store) if store else None
    with tempfile.TemporaryDirectory(prefix="rlctl-torchrun-", dir=parent, ignore_cleanup_errors=True) as logs:
        options = ["--rdzv-backend", BACKEND, "--log-dir", logs]
        torchrun.main([*options, *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    main()

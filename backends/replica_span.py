"""How the nodes of a replica that spans several find one another: by files in a folder that all of them see.

The first node has the rank's process; each other one has a process that holds its part. Parts say that they are there,
and the first node then says what they are to build, and where they meet.
"""

from __future__ import annotations

import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specs.json_file import read_object, write_object

_LOOK_S = 0.2
_START = "start.json"


@dataclass(frozen=True)
class ReplicaSpan:
    """Node `node` of the `nodes` of a replica; 0 has its rank. `address` is this node's own, for the others; `folder`
    is for this start of the replica alone."""

    nodes: int
    node: int
    address: str
    folder: Path

    def announce(self) -> None:
        """Say that this part is there."""
        (self.folder / f"node{self.node}").touch()

    def await_parts(self) -> None:
        """Wait until all parts are there: the driver ends this process where one does not come."""
        self._await({f"node{node}" for node in range(1, self.nodes)})

    def begin(self, build: dict[str, Any]) -> tuple[str, int]:
        """Tell the parts what they are to `build`; return the address and port at which all meet."""
        with socket.create_server((self.address, 0)) as free:
            port = int(free.getsockname()[1])
        write_object(self.folder / _START, {"build": build, "address": self.address, "port": port})
        return self.address, port

    def await_begin(self) -> tuple[dict[str, Any], str, int]:
        """Wait for that; return what to build, and where to meet."""
        self._await({_START})
        start = read_object(self.folder / _START)
        return start["build"], start["address"], start["port"]

    def end(self) -> None:
        """Remove the files, once all have met."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _await(self, names: set[str]) -> None:
        """Wait for files. The folder is listed: a network file system may remember that a file was not there."""
        while not names <= {path.name for path in self.folder.iterdir()}:
            time.sleep(_LOOK_S)

"""Hosts of a run that are this machine: their shells are plain ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlctl.processes.shells import LocalShell


class LocalHosts:
    """`Cluster`. `commands`: the shells of some hosts, by their numbers."""

    gives_devices = False
    address = "127.0.0.1"

    def __init__(
        self, *names: str, pending: Mapping[str, str] | None = None, replaces: bool = False, **commands: Sequence[str]
    ) -> None:
        self.names, self.pending, self.replaces = ["here", *names], dict(pending or {}), replaces
        self.commands, self.closed = commands, False

    def shell(self, number: int, devices: Sequence[int], env: Mapping[str, str], log_path: Path) -> LocalShell:
        return LocalShell(self.commands.get(self.names[number], ("sh",)), env, log_path)

    def count(self, gpus: int) -> int:
        return len(self.names)

    def reserve(self, say: Callable[[str], None]) -> None:
        pass

    def close(self) -> None:
        self.closed = True

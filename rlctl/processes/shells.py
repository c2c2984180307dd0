"""Shells on a run's hosts: the driver writes a script into one, which becomes the supervisor of a role's processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from specs.errors import Problem, SpecError
from workers.watchdog import signal_group


@dataclass(frozen=True)
class HostNeeds:
    """The share of a node that a host of the run takes. `required`: the run cannot begin without it."""

    gpus: int
    required: bool = True

    @property
    def bundle(self) -> dict[str, float]:
        return {"CPU": 1.0, **({"GPU": float(self.gpus)} if self.gpus else {})}

    def __str__(self) -> str:
        return f"{self.gpus} GPUs" if self.gpus else "a CPU"


class Shell(Protocol):
    """A POSIX shell, here or on another host. Nothing of it waits."""

    @property
    def lost(self) -> bool:
        """Return whether it ended with its host, or the way there."""

    def write(self, text: str) -> None:
        """Send input; what an ended shell does not read is lost."""

    def read(self) -> bytes:
        """Return what it has written since the last call."""

    def poll(self) -> int | None:
        """Return its exit code; None while it runs, or has not begun."""

    def hang_up(self) -> None:
        """End its input."""

    def kill(self) -> None:
        """End the shell, with what leads to it on this host."""

    def close(self) -> None:
        """Let go of a shell that has ended."""


class Cluster(Protocol):
    """The hosts of a run besides this one, by their numbers; this one is 0."""

    address: str  # this host's, for the others
    names: list[str]
    pending: dict[str, str]  # names of hosts that the run begins without, and why they are not there
    replaces: bool  # whether another host may take the place of one that is lost
    gives_devices: bool  # whether its shells see a role's GPUs alone

    def count(self, gpus: int) -> int:
        """Return how many hosts there are with so many GPUs, this one included, whoever uses them. Raise SpecError
        where that cannot be learned."""

    def reserve(self, say: Callable[[str], None]) -> None:
        """Learn which hosts there are, and wait for those that are needed; `say` what a person waits for. All else
        comes after it. Raise SpecError where they cannot be had."""

    def shell(self, number: int, devices: Sequence[int], env: Mapping[str, str], log_path: Path) -> Shell:
        """Open a shell that sees these GPUs of its host. `env`: of what leads there, on this host. What it writes
        besides its output goes to the log."""

    def close(self) -> None:
        """Give the hosts back."""


class LocalShell:
    """A process on this host whose input and output are those of a shell, here or at its other end."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        """Raise SpecError where the program is missing."""
        with log_path.open("ab") as log_file:
            try:
                self._process = subprocess.Popen(
                    command,
                    env=dict(env),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log_file,
                    start_new_session=True,
                )
            except OSError as error:
                hint = "run it inside a SLURM job" if command[0] == "srun" else ""
                message = f"{command[0]} cannot be started: {error.strerror}"
                raise SpecError([Problem("cluster.kind", message, hint)]) from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._output.fileno(), False)

    def write(self, text: str) -> None:
        with suppress(BrokenPipeError, ValueError):
            self._input.write(text.encode())
            self._input.flush()

    def read(self) -> bytes:
        found = b""
        with suppress(BlockingIOError, ValueError):
            while more := os.read(self._output.fileno(), 65536):
                found += more
        return found

    @property
    def lost(self) -> bool:
        return self.poll() is not None

    def poll(self) -> int | None:
        return self._process.poll()

    def hang_up(self) -> None:
        with suppress(BrokenPipeError):
            self._input.close()

    def kill(self) -> None:
        signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self.hang_up()
        self._output.close()

"""Run an agent that is a program, for one episode: in a folder of its own, with nothing of this machine but `PATH`."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.environments.replies import Lost
from workers.watchdog import signal_group

MODEL_NAME = "rlctl"  # programs ask for a model by a name; any is answered by the one that learns
OUTPUT_BYTES = 64 << 10  # of what it prints, the last are kept
LOGGED_BYTES = 8 << 20  # of it, the first are logged: the log is not truncated before the episode ends
_KEPT = re.compile(r"PATH|LANG|LC_\w+|TZ|SSL_CERT_\w+")
_PLACE = re.compile(r"(?<!\$)\{(\w+)\}")


def prompt_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return what `{prompt}` stands for: the text of the user's last message."""
    return next((str(one["content"]) for one in reversed(messages) if one["role"] == "user"), "")


@dataclass(frozen=True)
class Harness:
    """Describe the program, and the function that gives its reward."""

    command: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    reward: Callable[..., Any] | None


@dataclass
class HarnessRun:
    """Hold what an episode's program did. `values`: what stands for the names in braces."""

    harness: Harness
    folder: Path
    base: str
    values: Mapping[str, Any]
    exit_code: int = 0
    output: bytearray = field(default_factory=bytearray)
    _printed: int = 0
    _process: asyncio.subprocess.Process | None = None
    _stopped: bool = False

    @property
    def cwd(self) -> Path:
        return self.folder / "work"

    async def run(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """Run the program to its end. Raises Lost where it cannot begin."""
        home = self.folder / "home"
        home.mkdir(parents=True)
        self._fill()
        env = {name: value for name, value in os.environ.items() if _KEPT.fullmatch(name)}
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
        env |= {"HOME": str(home), "TMPDIR": str(home), "NO_PROXY": "127.0.0.1", **variables}
        env |= {name: self._written(value) for name, value in self.harness.env.items()}
        command = [self._written(part) for part in self.harness.command]
        # asyncio's own pipe would have `wait` wait for all that hold its other end: what the program leaves behind too.
        reads, writes = os.pipe()
        os.set_blocking(reads, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(reads, self._read, reads)
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *command,
                cwd=self.cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=writes,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if self._stopped:  # it was quicker than this process, which had it started
                self.stop()
            self.exit_code = await process.wait()
        except (OSError, ValueError) as error:
            raise Lost(f"{command[0]} cannot be run: {getattr(error, 'strerror', error)}") from None
        finally:
            self.stop()
            self._read(reads)
            if (more := self._printed - LOGGED_BYTES) > 0:
                os.write(1, b"\n(%d bytes that it printed after this are left out)\n" % more)
            loop.remove_reader(reads)
            os.close(reads)
            os.close(writes)
        return {"exit_code": self.exit_code, "output": self.output.decode(errors="replace")}

    def stop(self) -> None:
        """Kill the program and what is in its group, at its start if that is still to come."""
        self._stopped = True
        if self._process is not None:
            signal_group(self._process.pid, signal.SIGKILL)

    def _read(self, pipe: int) -> None:
        with suppress(BlockingIOError):
            while chunk := os.read(pipe, 1 << 16):
                self.output += chunk
                del self.output[:-OUTPUT_BYTES]
                os.write(1, chunk[: max(LOGGED_BYTES - self._printed, 0)])
                self._printed += len(chunk)

    def _fill(self) -> None:
        """Make the working directory. Raises Lost."""
        if self.harness.cwd == "fresh":
            self.cwd.mkdir()
            return
        source = Path(self.base, self._written(self.harness.cwd))
        if not source.exists():
            raise Lost(f"cwd = {source} cannot be copied: it does not exist")
        try:
            if source.is_dir():
                shutil.copytree(source, self.cwd, symlinks=True)
            elif source.suffix == ".zip":
                shutil.unpack_archive(source, self.cwd)
            else:
                self.cwd.mkdir()
                clone, unpack = ("git", "clone", "-q", source, self.cwd), ("tar", "-xf", source, "-C", self.cwd)
                command = clone if source.suffix == ".bundle" else (*unpack, "--no-same-owner")
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise OSError(done.stderr.strip() or f"{command[0]} ended with {done.returncode}")
        except (OSError, ValueError, shutil.Error, EOFError) as error:
            raise Lost(f"cwd = {source} cannot be copied: {error}") from None

    def _written(self, text: str) -> str:
        """Return a text with values in the place of names."""
        return _PLACE.sub(lambda found: str(self.values.get(found[1], found[0])).replace("\0", ""), text)


def remove_folder(folder: Path) -> None:
    """Remove a folder, also what was made read-only in it."""
    with suppress(OSError):
        shutil.rmtree(folder)
    if folder.exists():
        for inner in (folder, *folder.rglob("*")):
            if inner.is_dir() and not inner.is_symlink():
                with suppress(OSError):
                    inner.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)

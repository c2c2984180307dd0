"""Keep two writers out of one folder: whoever writes a run directory or a sweep's folder holds its `.lock`."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import IO

from specs.errors import RunDirError

LOCK = ".lock"


class RunLock:
    """Hold the folder's lock, with the owner's name in it, until `release` or the end of the process."""

    def __init__(self, folder: Path, hint: str) -> None:
        """Raises RunDirError when another process holds it, OSError when the file system has no locks."""
        path = folder / LOCK
        self._file: IO[str] = open(path, "a+", errors="replace")  # noqa: SIM115 - held for the life of the run
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            owner = self._file.read().strip()
            self._file.close()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise OSError(error.errno, error.strerror, str(path)) from None
            raise RunDirError(f"{folder} is in use by {_named(owner)}", hint=hint) from None
        self._file.truncate(0)
        self._file.write(f"{os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def release(self) -> None:
        self._file.close()


def owner_of(folder: Path) -> str:
    """Return who holds the folder's lock, "" if none, as far as this host can tell."""
    with suppress(OSError), (folder / LOCK).open(errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _named(file.read().strip())
    return ""


def _named(owner: str) -> str:
    return "another rlctl" + (f" (process {owner})" if owner else "")

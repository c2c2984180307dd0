"""Keep what people's code prints, by whatever way, in a log of limited size, and say how much is left out."""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

LOG_BYTES = 64 << 20  # size limit of a log
READ_BYTES = 1 << 16
_left_out = Counter[Path]()  # bytes that this process's readers have dropped of each log
_dropping = threading.Lock()


def log_output(path: Path) -> tuple[int, threading.Thread]:
    """Return the end of a pipe for a process to print to, and the thread that appends to the log what comes out of it.
    The thread ends when nobody holds that end any more."""
    log = path.open("ab", buffering=0)
    reads, writes = os.pipe()
    reader = threading.Thread(target=_append, args=(reads, log, path), name="output", daemon=True)
    reader.start()
    return writes, reader


def _append(reads: int, log: BinaryIO, path: Path) -> None:
    with log, open(reads, "rb", buffering=0) as pipe:
        while chunk := pipe.read(READ_BYTES):
            with suppress(OSError), _dropping:  # on a full disk it is lost: the process must not wait for it
                size = os.fstat(log.fileno()).st_size
                if size + len(chunk) > LOG_BYTES:
                    _left_out[path] += size
                    log.truncate(0)
                    log.write(b"(%d bytes that were printed before this are left out)\n" % _left_out[path])
                log.write(chunk)

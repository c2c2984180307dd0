"""Standard output that may go away while a run goes on."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, TextIO


class Outlet:
    """A text file that never fails its writer. Whoever reads it may go: `head`, a `tee` that the same Ctrl-C ended, a
    terminal that hung up; and its disk may be full. From then on all goes nowhere."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except OSError:
            self._let_go()
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            self._let_go()

    def _let_go(self) -> None:
        """What waits in buffers must have somewhere to go, when Python ends too."""
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)

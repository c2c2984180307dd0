"""Guard standard output and error of a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from specs.terminal import VisibleStream


@contextmanager
def visible_streams() -> Iterator[None]:
    """Make visible text of whatever is printed inside, usage errors, tracebacks and warnings of libraries too."""
    before = sys.stdout, sys.stderr
    for file in before:
        replace_unwritable(file)
    sys.stdout, sys.stderr = (cast(TextIO, VisibleStream(file)) if file is not None else file for file in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def replace_unwritable(file: Any) -> None:
    """Have a stream write `?` for what its encoding lacks: a terminal without Unicode must end nothing."""
    if (reconfigure := getattr(file, "reconfigure", None)) is not None:
        reconfigure(errors="replace")


class SafeStdout:
    """Wrap a text file so that writes never fail. Its reader may end (`head`, a `tee` that the same Ctrl-C ended, a
    terminal that hung up) or its disk may be full; from then on output is dropped."""

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
        """Point the descriptor at /dev/null, so that flushing buffers works, also when Python exits."""
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)

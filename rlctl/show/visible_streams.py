"""Guards standard output and error of a command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

from specs.terminal import VisibleStream


@contextmanager
def visible_streams() -> Iterator[None]:
    """Inside, whatever is printed (usage errors, tracebacks and warnings of libraries too) is visible text."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, VisibleStream(file)) if file is not None else file for file in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before

"""Tasks that ship with rlctl: rows made by rule, the same on every machine, so that a run needs no data file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

PREFIX = "builtin:"


def sort_digits() -> Iterator[dict[str, Any]]:
    """Yield all 10,000 strings of four digits, `3142>`, with the digits in ascending order, `1234`.

    They come in a fixed scattered order (7919 is coprime to 10,000), so that the last rows, which evaluation
    holds out, look like the rest.
    """
    for index in range(10_000):
        digits = f"{(index * 7919 + 4242) % 10_000:04d}"
        yield {"prompt": f"{digits}>", "answer": "".join(sorted(digits))}


BUILTIN_TASKS: Mapping[str, Callable[[], Iterator[dict[str, Any]]]] = {"sort-digits": sort_digits}

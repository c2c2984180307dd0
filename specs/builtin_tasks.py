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


def sort_digits_pairs() -> Iterator[dict[str, Any]]:
    """Yield the prompts of `sort_digits` with the right answer as `chosen` and a wrong one as `rejected`: by turns as
    they were given, in descending order, with two digits exchanged, with one digit changed, one too few or too many."""
    for index, row in enumerate(sort_digits()):
        right, given = row["answer"], row["prompt"][:-1]
        at, other = index // 6 % 3, str((int(right[index // 6 % 4]) + 1 + index // 24 % 9) % 10)
        wrong = (
            given,
            right[::-1],
            right[:at] + right[at + 1] + right[at] + right[at + 2 :],
            right[: index // 6 % 4] + other + right[index // 6 % 4 + 1 :],
            right[:3],
            right + other,
        )[index % 6]
        if wrong != right:
            yield {"prompt": row["prompt"], "chosen": right, "rejected": wrong}


BUILTIN_TASKS: Mapping[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "sort-digits": sort_digits,
    "sort-digits-pairs": sort_digits_pairs,
}

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
    they were given, in descending order, with two digits exchanged, with one digit changed, that in order again, the
    answer to another prompt, with one digit too few, with one too many."""
    rows = list(sort_digits())
    for index, row in enumerate(rows):
        right, turn = row["answer"], index // 8
        at, other = turn % 4, str((int(right[turn % 4]) + 1 + turn // 4 % 9) % 10)
        changed = right[:at] + other + right[at + 1 :]
        wrong = (
            row["prompt"][:-1],
            right[::-1],
            right[: at % 3] + right[at % 3 + 1] + right[at % 3] + right[at % 3 + 2 :],
            changed,
            "".join(sorted(changed)),
            rows[index - 1 - turn % 5]["answer"],
            right[:at] + right[at + 1 :],
            right + other,
        )[index % 8]
        if wrong != right:
            yield {"prompt": row["prompt"], "chosen": right, "rejected": wrong}


BUILTIN_TASKS: Mapping[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "sort-digits": sort_digits,
    "sort-digits-pairs": sort_digits_pairs,
}

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


CALCULATOR = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"properties": {"expression": {"type": "string"}}}},
}


def products() -> Iterator[dict[str, Any]]:
    """Yield the 8,100 products of two numbers of two digits, `37*24`, in a fixed scattered order, with the answer."""
    for index in range(8100):
        first, second = divmod(index * 4001 % 8100, 90)
        yield {"prompt": f"{first + 10}*{second + 10}", "answer": str((first + 10) * (second + 10))}


def products_chats() -> Iterator[dict[str, Any]]:
    """Yield a conversation about each product: by turns one that calls the tool `calculator` and repeats what it says,
    and one that gives the answer to another product at once."""
    rows = list(products())
    for index, row in enumerate(rows):
        asked = {"role": "user", "content": row["prompt"]}
        if index % 2:
            said = [{"role": "assistant", "content": rows[index - 1]["answer"]}]
        else:
            function = {"name": "calculator", "arguments": {"expression": row["prompt"]}}
            said = [
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
                {"role": "tool", "content": row["answer"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        yield {"messages": [asked, *said], "tools": [CALCULATOR]}


def guesses() -> Iterator[dict[str, Any]]:
    """Yield 1,000 games in which a digit is to be guessed."""
    for index in range(1000):
        yield {"prompt": "guess", "number": index * 7 % 10}


def guesses_chats() -> Iterator[dict[str, Any]]:
    """Yield 4,000 games of a player who heeds every second hint, and else guesses at random."""
    state = 1
    for row in [*guesses()] * 4:
        low, high = 0, 9
        messages: list[dict[str, Any]] = [{"role": "user", "content": row["prompt"]}]
        for _ in range(4):
            state = state * 48271 % (2**31 - 1)
            guess = low + state // 2 % (high - low + 1) if state % 2 else state // 2 % 10
            messages.append({"role": "assistant", "content": str(guess)})
            if guess == row["number"]:
                break
            higher = row["number"] > guess
            low, high = (max(low, guess + 1), high) if higher else (low, min(high, guess - 1))
            messages.append({"role": "user", "content": "higher" if higher else "lower"})
        yield {"messages": messages[: len(messages) - (messages[-1]["role"] == "user")]}


BUILTIN_TASKS: Mapping[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "sort-digits": sort_digits,
    "sort-digits-pairs": sort_digits_pairs,
    "products": products,
    "products-chats": products_chats,
    "guesses": guesses,
    "guesses-chats": guesses_chats,
}

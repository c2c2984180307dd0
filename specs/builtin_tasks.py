"""Tasks that ship with rlctl: rows made by rule, the same on every machine, so that a run needs no data file. And the
names of those that come from the package reasoning-gym."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "builtin:"
GYM_PREFIX = "reasoning-gym:"


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
    """Yield the 810 products of a digit and a number of two digits, `7*24`, in a fixed scattered order, with the
    answer."""
    for index in range(810):
        first, second = divmod(index * 401 % 810, 90)
        yield {"prompt": f"{first + 1}*{second + 10}", "answer": str((first + 1) * (second + 10))}


def products_chats() -> Iterator[dict[str, Any]]:
    """Yield two conversations about each product: one that calls the tool `calculator` and repeats what it says, and
    one that gives the answer to another product at once."""
    wrong = "100"
    for row in products():
        asked = {"role": "user", "content": row["prompt"]}
        function = {"name": "calculator", "arguments": {"expression": row["prompt"]}}
        called = [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": row["answer"]},
            {"role": "assistant", "content": row["answer"]},
        ]
        for said in (called, [{"role": "assistant", "content": wrong}]):
            yield {"messages": [asked, *said], "tools": [CALCULATOR]}
        wrong = row["answer"]


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


@dataclass(frozen=True)
class GymSource:
    """Name rows of a data set of reasoning-gym, `reasoning-gym:chain_sum?size=2000&seed=7&min_terms=2`. Row `n` is made
    from `seed + n`; `options` are those of the data set."""

    name: str
    size: int
    seed: int
    options: Mapping[str, Any]

    @classmethod
    def parse(cls, source: str) -> GymSource:
        """Return what a source says. Raises ValueError for a size or a seed that is none."""
        name, _, text = source.removeprefix(GYM_PREFIX).partition("?")
        pairs = (part.partition("=") for part in text.split("&") if part)
        options = {key: _option(value) for key, _, value in pairs}
        size, seed = options.pop("size", 10_000), options.pop("seed", 0)
        for key, value, least in (("size", size, 1), ("seed", seed, 0)):
            if type(value) is not int or value < least:
                raise ValueError(f"its {key} is {value!r}, not a whole number of at least {least}")
        return cls(name, size, seed, options)

    def overlap(self, other: GymSource, rows: int) -> int:
        """Return how many of the first `rows` rows of another source are rows of this one."""
        same = (self.name, self.options) == (other.name, other.options)
        end = min(self.seed + self.size, other.seed + min(rows, other.size))
        return max(end - max(self.seed, other.seed), 0) if same else 0


def _option(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def gym_entry_as_json(value: Any) -> Any:
    """Return an entry of reasoning-gym, or a part of it, as JSON that `gym_entry` reads: scores tell tuples from lists,
    and 1 from "1"."""
    if isinstance(value, list):
        return [gym_entry_as_json(each) for each in value]
    if isinstance(value, tuple):
        return {"__tuple__": gym_entry_as_json([*value])}
    if isinstance(value, dict) and any(not isinstance(key, str) for key in value):
        return {"__dict__": gym_entry_as_json([[*pair] for pair in value.items()])}
    return {key: gym_entry_as_json(each) for key, each in value.items()} if isinstance(value, dict) else value


def gym_entry(value: Any) -> Any:
    """Return the entry, or a part of it, as it was."""
    if isinstance(value, list):
        return [gym_entry(each) for each in value]
    if not isinstance(value, dict):
        return value
    read = {key: gym_entry(each) for key, each in value.items()}
    return tuple(read["__tuple__"]) if "__tuple__" in read else dict(read["__dict__"]) if "__dict__" in read else read

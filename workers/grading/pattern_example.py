"""A text in which a regular expression is found, made from the expression itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

_LONGEST = 400  # characters
_KINDS = {codes.CATEGORY_DIGIT: "7", codes.CATEGORY_SPACE: " ", codes.CATEGORY_WORD: "a"}
_TRIED = "a7 .,-\n<A"  # characters for what a set leaves out


def example(pattern: str, inside: str, flags: int = re.DOTALL) -> str | None:
    """A text that the pattern is found in, with `inside` in place of its innermost last group; None where none is
    made."""
    try:
        compiled, tree = re.compile(pattern, flags), parser.parse(pattern, flags)
    except (re.error, RecursionError, OverflowError):
        return None
    for group in range(compiled.groups, -1, -1):
        for optional in (1, 0):
            text = _written(tree, inside, group, {}, optional)
            if text is not None and len(text) <= _LONGEST + len(inside) and compiled.search(text):
                return text
    return None


def _written(
    tree: Iterable[tuple[Any, Any]], inside: str, group: int, groups: dict[int, str], optional: int
) -> str | None:
    """`optional`: how often what may be left out is written."""
    text = ""
    for code, given in tree:
        part = _one(code, given, inside, group, groups, optional)
        if part is None or len(text := text + part) > _LONGEST + len(inside):
            return None
    return text


def _one(code: Any, given: Any, inside: str, group: int, groups: dict[int, str], optional: int) -> str | None:
    if code is codes.LITERAL:
        return chr(given)
    if code is codes.NOT_LITERAL:
        return next(char for char in _TRIED if ord(char) != given)
    if code is codes.ANY:
        return "a"
    if code is codes.IN:
        return _of_set(given)
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        least, most, tree = given
        part = _written(tree, inside, group, groups, optional)
        return None if part is None else part * max(least, min(optional, int(most)))
    if code is codes.SUBPATTERN:
        number, _, _, tree = given
        text = inside if number is not None and number == group else _written(tree, inside, group, groups, optional)
        if number is not None and text is not None:
            groups[number] = text
        return text
    if code is codes.BRANCH:
        return _written(given[1][0], inside, group, groups, optional)
    if code is codes.GROUPREF:
        return groups.get(given)
    if code is codes.ATOMIC_GROUP:
        return _written(given, inside, group, groups, optional)
    return ""  # places and what looks around: whether the text is found decides


def _of_set(items: list[tuple[Any, Any]]) -> str | None:
    if items and items[0][0] is codes.NEGATE:
        excluded = [_of_set([item]) for item in items[1:]]
        return next((char for char in _TRIED if char not in excluded), None)
    code, given = items[0]
    if code is codes.RANGE:
        return chr(given[0])
    return _KINDS.get(given) if code is codes.CATEGORY else chr(given)

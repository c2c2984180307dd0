"""Plain text of a prompt and a completion as tokens: the same for what is learned and for what a reward model reads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol


class TextTokens(Protocol):
    """The part of a tokenizer that plain text needs."""

    def __hash__(self) -> int: ...

    @property
    def end_id(self) -> int | None: ...

    @property
    def unknown_id(self) -> int | None: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def encode(self, texts: Sequence[str], *, rendered: bool) -> list[list[int]]: ...

    def decode(self, sequences: Sequence[Sequence[int]], *, special_tokens: bool = False) -> list[str]: ...


def joined(codec: TextTokens, prompts: Sequence[str], completions: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each prompt and of its completion, which no token of both spans; the end of sequence follows
    the completion once."""
    if _puts_blanks(codec):
        after = [_behind(codec, text) for text in completions]
    else:
        after = codec.encode(completions, rendered=True)
    return [(one, ended(codec, other)) for one, other in zip(begun(codec, prompts), after, strict=True)]


@lru_cache(4)
def _puts_blanks(codec: TextTokens) -> bool:
    """Return whether the tokenizer puts a blank before every text, which would then stand between prompt and completion
    (Llama 2)."""
    letter = codec.encode(["a"], rendered=True)[0]
    return " " in codec.decode([[*letter, *letter]])[0]


def _behind(codec: TextTokens, text: str) -> list[int]:
    """Return the tokens of a text behind another, of which none spans both; those of the text alone where all do."""
    for other in ("\n", ":", "=", "a"):
        first, both = codec.encode([other, other + text], rendered=True)
        if first and both[: len(first)] == first:
            return both[len(first) :]
    return codec.encode([text], rendered=True)[0]


def begun(codec: TextTokens, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of texts with what the tokenizer puts before them, once: some texts hold it already."""
    encoded = codec.encode(texts, rendered=False)
    return [ids[1:] if len(ids) > 1 and ids[0] == ids[1] and ids[0] in codec.special_ids else ids for ids in encoded]


def ended(codec: TextTokens, tokens: list[int]) -> list[int]:
    """Return tokens with the end of sequence behind them, once: a text may hold it, and the tokenizer add it."""
    while tokens[-1:] == [codec.end_id]:
        tokens = tokens[:-1]
    return tokens if codec.end_id is None else [*tokens, codec.end_id]


def without_padding(tokens: list[int], pad: int | None) -> list[int]:
    """Leave out padding tokens at the end: transformers reads a score at the last token that is none. Where the end of
    sequence is the padding token, that is the one before it."""
    while len(tokens) > 1 and tokens[-1] == pad:
        tokens = tokens[:-1]
    return tokens

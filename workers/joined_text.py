"""Plain text of a prompt and a completion as tokens: the same for what is learned and for what a reward model reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextTokens(Protocol):
    """The part of a tokenizer that plain text needs."""

    @property
    def end_id(self) -> int | None: ...

    def encode(self, texts: Sequence[str], *, rendered: bool) -> list[list[int]]: ...


def joined(codec: TextTokens, prompts: Sequence[str], completions: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each prompt and of its completion, which no token of both spans; the end of sequence follows
    the completion once."""
    before, after = codec.encode(prompts, rendered=False), codec.encode(completions, rendered=True)
    return [(prompt, ended(codec, completion)) for prompt, completion in zip(before, after, strict=True)]


def ended(codec: TextTokens, tokens: list[int]) -> list[int]:
    """Return tokens with the end of sequence behind them, once."""
    return tokens if codec.end_id is None or tokens[-1:] == [codec.end_id] else [*tokens, codec.end_id]


def without_padding(tokens: list[int], pad: int | None) -> list[int]:
    """Leave out padding tokens at the end: transformers reads a score at the last token that is none. Where the end of
    sequence is the padding token, that is the one before it."""
    while len(tokens) > 1 and tokens[-1] == pad:
        tokens = tokens[:-1]
    return tokens

"""A model's tokenizer as the library `tokenizers` reads it, for a check that cannot wait for transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from backends.hf.tokenizer import end_tokens_of, token_ids
from specs.json_file import read_object, read_or_empty

_NAMES = ("special_tokens_map.json", "tokenizer_config.json")  # the later one counts


class TokenizerFile:
    """Encodes and decodes prompts as `TextCodec` does, from `tokenizer.json`. Raises ValueError where there is none, or
    none that can be read."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._folder = folder
        named: dict[str, Any] = {}
        for name in _NAMES:
            named |= read_object(folder / name) if (folder / name).is_file() else {}
        self.special_tokens = _texts(named)
        pad = read_or_empty(folder / "config.json").get("pad_token_id")
        self.pad_id = pad if isinstance(pad, int) else None  # the model's, whose score is read before it
        self._around = named.get("add_bos_token") is not False
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises nothing more specific
            read_object(folder / "tokenizer.json")  # whose errors say more of a file that is no JSON
            raise ValueError(str(error)) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token, added ones too, and its id."""
        return dict(self._tokenizer.get_vocab())

    @property
    def unknown_id(self) -> int | None:
        """The token that stands for what the tokenizer does not know."""
        return self._id("unk_token")

    def encode(self, texts: Sequence[str], *, rendered: bool) -> list[list[int]]:
        """Return the token ids of each text (`TextCodec.encode`)."""
        found = [
            list(self._tokenizer.encode(text, add_special_tokens=self._around and not rendered).ids) for text in texts
        ]
        end = self._id("eos_token")
        if rendered or end is None:
            return found
        closed = self.special_tokens["eos_token"]
        return [
            ids[:-1] if ids and ids[-1] == end and not text.endswith(closed) else ids
            for text, ids in zip(texts, found, strict=True)
        ]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of a rendered text, and the characters that each stands for (`TextCodec`)."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return list(found.ids), list(found.offsets)

    @property
    def end_id(self) -> int | None:
        """The token that ends a sequence."""
        return self._id("eos_token")

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that stand for no text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(id_ for id_, token in added.items() if token.special)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a completion (`TextCodec.stop_ids`)."""
        return frozenset((*end_tokens_of(self._folder), *token_ids(self.end_id)))

    def decode(self, sequences: Sequence[Sequence[int]], *, special_tokens: bool = False) -> list[str]:
        """Return the text of each token sequence."""
        return [str(self._tokenizer.decode(list(ids), skip_special_tokens=not special_tokens)) for ids in sequences]

    def _id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._tokenizer.token_to_id(text)


def _texts(named: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by their names (`eos_token`, …), each as text or as an object with a `content`."""
    texts = {name: one.get("content") if isinstance(one, dict) else one for name, one in named.items()}
    return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}

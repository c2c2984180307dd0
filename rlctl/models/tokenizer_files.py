"""Checks that a model's tokenizer exists, can be read, and has no token that the model lacks."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlctl.models.hub import Folder, unread
from rlctl.models.paths import read_object
from rlctl.models.weight_files import AGAIN
from specs.text import show

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt", "tekken.json")

Wrong = Callable[..., None]  # is told what is wrong, a hint, and the key and its value where it is not the model's own


# Packages without which such a file alone is no tokenizer.
NEEDS_PACKAGE = {"tokenizer.model": "sentencepiece", "spiece.model": "sentencepiece", "tekken.json": "mistral-common"}
_MOST_PARSED = 1 << 22  # bytes: a larger file costs more time than the check may take
_KINDS = ("BPE", "Unigram", "WordLevel", "WordPiece")  # of models in tokenizer.json
_USE_ITS_OWN = "use the tokenizer that the model was trained with"


def check_tokenizer(folder: Folder, vocab_size: Any, wrong: Wrong) -> None:
    """Checks that there is a tokenizer, and that its tokens are within the model's vocabulary."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        if unread(folder, TOKENIZER_FILES):
            return
        here = isinstance(folder, Path)
        hint = f"put the model's tokenizer files into {folder}" if here else "name a repository that has one"
        where = "in the model folder" if here else "with the model on the hub"
        wrong(f"no tokenizer {where} (none of {', '.join(TOKENIZER_FILES[:3])}, …)", hint)
        return
    highest = _highest_added(folder)
    if (folder / "tokenizer.json").is_file():
        found = _highest_of_file(folder, wrong)
        if found is None:
            return
        highest = max(highest, found)
    elif _vocabulary_without_merges(folder):
        wrong("has vocab.json without merges.txt, of which the tokenizer is made", AGAIN)
        return
    if isinstance(vocab_size, int) and highest >= vocab_size:
        wrong(f"the tokenizer has token {highest}, but the model's vocab_size is {vocab_size}", _USE_ITS_OWN)


def special_texts(folder: Path) -> set[str]:
    """Special tokens that a tokenizer's files name: completions are read without them."""
    config = folder / "tokenizer_config.json"
    named = (read_object(config, lambda *_: None) or {}).get("added_tokens_decoder") if config.is_file() else None
    table = token_table(folder)
    listed = [one for one in named.values() if isinstance(one, dict)] if isinstance(named, dict) else []
    return {*(table.special if table else ()), *_special_of(listed)}


def _special_of(added: Iterable[Mapping[str, Any]]) -> list[str]:
    return [str(one.get("content")) for one in added if one.get("special")]


class TokenTable:
    """What a tokenizer.json of any size says without being built: all of it but the vocabulary is parsed, and in the
    vocabulary single tokens are looked for. Raises ValueError where the file has another form."""

    def __init__(self, text: bytes) -> None:
        start = next((found for found in _MODEL.finditer(text) if _ends_head(text, found.start())), None)
        if start is None:
            raise ValueError("no model behind the rest")
        self.head: dict[str, Any] = json.loads(text[: start.start()] + b'"model":null}')
        at = text.find(b'"vocab"', start.end())
        merges = text.find(b'"merges"', at)
        self._vocabulary = text[at : merges if merges > at else len(text)]
        self.added = [one for one in self.head.get("added_tokens") or () if isinstance(one, dict)]
        self._added = {str(one.get("content")): one.get("id") for one in self.added}
        self._bytes = b'"ByteLevel"' in text[: start.start()]

    def __contains__(self, text: str) -> bool:
        """Whether a token is written so."""
        keys = {json.dumps(text, ensure_ascii=ascii).encode() for ascii in (True, False)}
        return text in self._added or any(self._at(key) >= 0 for key in keys)

    def _at(self, key: bytes) -> int:
        at = self._vocabulary.find(key)
        while at > 0 and self._vocabulary[at - 1 : at] == b"\\":  # the end of a longer one
            at = self._vocabulary.find(key, at + 1)
        return at

    @property
    def added_texts(self) -> Collection[str]:
        return self._added

    def id_of(self, text: str) -> int | None:
        """The id of a token, added or of the vocabulary."""
        if text in self._added:
            return self._added.get(text)
        for ascii in (True, False):
            key = json.dumps(text, ensure_ascii=ascii).encode()
            if (at := self._at(key)) >= 0 and (found := _NUMBER.match(self._vocabulary, at + len(key))):
                return int(found[1])
        return None

    def text_of(self, number: int) -> str | None:
        """The token of an id."""
        for text, one in self._added.items():
            if one == number:
                return text
        if (found := re.search(rb":\s?%d\s*[,}]" % number, self._vocabulary)) is None:
            return None
        before = self._vocabulary[max(0, found.start() - _LONGEST_TOKEN) : found.start()]
        key = re.search(rb'"(?:[^"\\]|\\.)*"$', before)
        return None if key is None else str(json.loads(key[0]))

    def says(self, text: str) -> bool:
        """Whether one token is all of a text, for all that its kind of vocabulary tells."""
        written = {text, text.replace(" ", "\u2581"), f"\u2581{text}"}
        written |= {"".join(_BYTE_LETTERS[byte] for byte in text.encode())} if self._bytes else set()
        written |= {f"<0x{byte:02X}>" for byte in text.encode()[:1] if len(text.encode()) == 1}
        return any(one in self for one in written)

    @property
    def special(self) -> list[str]:
        """Added tokens that are special."""
        return _special_of(self.added)

    @property
    def begins_with(self) -> str:
        """The token that is put before a text; "" of none."""
        found = self.head.get("post_processor") or {}
        try:
            for one in [found, *(found.get("processors") or ())]:
                single = one.get("single") or [{}]
                if token := single[0].get("SpecialToken"):
                    return str(token.get("id", ""))
                if one.get("cls"):
                    return str(one["cls"][0])
        except (AttributeError, TypeError, LookupError):  # of a file that is broken, which is said elsewhere
            return ""
        return ""

    @property
    def highest(self) -> int:
        """The highest id of an added token, and of the vocabulary where that is in order; -1 of none."""
        numbers = re.findall(rb":\s?(\d+)", self._vocabulary[-4 * _LONGEST_TOKEN :])
        ids = [one for one in self._added.values() if isinstance(one, int)]
        return max([*ids, *map(int, numbers)], default=-1)


def token_table(folder: Path) -> TokenTable | None:
    """Of a model's folder; None where it has no tokenizer.json of the usual form."""
    file = folder / "tokenizer.json"
    try:
        return TokenTable(file.read_bytes()) if file.is_file() else None
    except (OSError, ValueError, TypeError):
        return None


_MODEL = re.compile(rb'"model"\s*:\s*\{')
_NUMBER = re.compile(rb":\s*(\d+)")
_LONGEST_TOKEN = 1024  # bytes


def _ends_head(text: bytes, at: int) -> bool:
    try:
        return isinstance(json.loads(text[:at] + b'"model":null}'), dict)
    except ValueError:
        return False


def _byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary (GPT-2, Radford et al. 2019)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + n) for n, byte in enumerate(others)}


_BYTE_LETTERS = _byte_letters()


def lone_tokenizer(folder: Folder) -> str:
    """The tokenizer file that only another package reads, where there is no other; else ""."""
    there = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return there[0] if len(there) == 1 and there[0] in NEEDS_PACKAGE else ""


def _highest_of_file(folder: Folder, wrong: Wrong) -> int | None:
    """The highest token of tokenizer.json; -1 where it is not looked at, None where `wrong` was told about it."""
    file = folder / "tokenizer.json"
    if unread(folder, [file.name]):
        return -1
    if isinstance(file, Path) and file.stat().st_size > _MOST_PARSED:
        table = token_table(file.parent)
        return -1 if table is None else table.highest
    tokenizer = read_object(file, wrong)
    if tokenizer is None:
        return None
    try:
        model = tokenizer.get("model") or {}
        kind, vocabulary = model.get("type"), model.get("vocab")
        highest = _highest_token(tokenizer)
    except (AttributeError, TypeError, KeyError):
        wrong("tokenizer.json is not a tokenizer", AGAIN)
        return None
    if kind is not None and kind not in _KINDS:
        wrong(f"tokenizer.json holds a model of the kind {show(kind)}; known: {', '.join(_KINDS)}", AGAIN)
        return None
    if not vocabulary:
        wrong("tokenizer.json has no vocabulary", AGAIN)
        return None
    return highest


def _highest_token(tokenizer: dict[str, Any]) -> int:
    vocab, added = (tokenizer.get("model") or {}).get("vocab"), tokenizer.get("added_tokens") or []
    ids = [*vocab.values()] if isinstance(vocab, dict) else [len(vocab) - 1] if vocab else []
    return max([*map(operator.index, ids), *(operator.index(token["id"]) for token in added)], default=-1)


def _highest_added(folder: Folder) -> int:
    """The highest token that files beside tokenizer.json add to it; -1 where there is none, or they cannot be read."""
    ids: list[int] = []
    for name, key in (("added_tokens.json", ""), ("tokenizer_config.json", "added_tokens_decoder")):
        file = folder / name
        if not file.is_file() or unread(folder, [name]):
            continue
        content: Any = read_object(file, lambda *_: None) or {}
        tokens = content.get(key) if key else content
        numbers = (tokens if key else tokens.values()) if isinstance(tokens, dict) else ()
        ids += [int(one) for one in numbers if str(one).isdecimal()]
    return max(ids, default=-1)


def _vocabulary_without_merges(folder: Folder) -> bool:
    others = [name for name in TOKENIZER_FILES if name != "vocab.json"]
    return (
        (folder / "vocab.json").is_file()
        and not any((folder / name).is_file() for name in (*others, "merges.txt"))
        and not unread(folder, ["merges.txt"])
    )

"""Checks that a model's tokenizer exists, can be read, and has no token that the model lacks."""

from __future__ import annotations

import operator
from collections.abc import Callable
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
    """Special tokens that a tokenizer's small files name: completions are read without them."""
    texts = set()
    for name, key in (("tokenizer.json", "added_tokens"), ("tokenizer_config.json", "added_tokens_decoder")):
        file = folder / name
        if not file.is_file() or file.stat().st_size > 2**22:
            continue
        tokens = (read_object(file, lambda *_: None) or {}).get(key) or ()
        listed = tokens.values() if isinstance(tokens, dict) else tokens
        texts |= {str(one.get("content")) for one in listed if isinstance(one, dict) and one.get("special")}
    return texts


def lone_tokenizer(folder: Folder) -> str:
    """The tokenizer file that only another package reads, where there is no other; else ""."""
    there = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return there[0] if len(there) == 1 and there[0] in NEEDS_PACKAGE else ""


def _highest_of_file(folder: Folder, wrong: Wrong) -> int | None:
    """The highest token of tokenizer.json; -1 where it is not looked at, None where `wrong` was told about it."""
    file = folder / "tokenizer.json"
    # Large files cost more time to parse than the check may take; the data role parses them anyway.
    if unread(folder, [file.name]) or (isinstance(file, Path) and file.stat().st_size > 2**22):
        return -1
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

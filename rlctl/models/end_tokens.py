"""Checks of the tokens that end a completion, as `config.json` and `generation_config.json` name them."""

from __future__ import annotations

from typing import Any

from rlctl.models.hub import Folder, unread
from rlctl.models.paths import read_object
from rlctl.models.tokenizer_files import Wrong
from specs.text import show

_REPAIR = "copy the file from the model again, or name the model's end tokens in it"
GENERATION = "generation_config.json"


def check_end_tokens(folder: Folder, config: dict[str, Any], wrong: Wrong, doubt: Wrong) -> None:
    """Checks that the end tokens are token ids of the model's vocabulary. `config`: the parsed config.json."""
    files: dict[str, Any] = {"config.json": config}
    if (folder / GENERATION).is_file() and not unread(folder, [GENERATION]):
        files[GENERATION] = read_object(folder / GENERATION, wrong) or {}
    vocab_size = config.get("vocab_size")
    inside: list[tuple[str, int]] = []
    outside: list[tuple[str, int]] = []
    for name, content in files.items():
        value = content.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
            wrong(f"eos_token_id in {name} is {_written(value)}, not a token id or a list of them", _REPAIR)
            return
        for one in ids:
            known = not isinstance(vocab_size, int) or 0 <= one < vocab_size
            (inside if known else outside).append((name, one))
    for name, one in outside:
        say = doubt if inside else wrong  # another one ends completions
        say(f"eos_token_id {one} in {name} is outside the model's vocabulary of {vocab_size}", _REPAIR)


def _written(value: Any) -> str:
    return show(value) or "an object"

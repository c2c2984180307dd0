"""The tokens that end a completion."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from backends.hf.tokenizer import TextCodec, load_codec, token_ids
from specs.errors import ModelError
from specs.wire.role_config import RolloutConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def stop_tokens(own: Iterable[int], config: RolloutConfig, *, ask_tokenizer: bool) -> frozenset[int]:
    """The model's own end tokens `own` and the tokens of `config.stop`; with `ask_tokenizer` also the tokenizer's end.

    Raises ModelError when a stop text is not exactly one token, or when the tokenizer cannot be read but is needed.
    """
    ids = set(own)
    if not ids and not config.stop and not _has_tokenizer(config.model.path):
        raise ModelError(
            f"no token ends a completion: {config.model.path} names no eos_token_id and has no tokenizer",
            hint="put eos_token_id into its generation_config.json",
        )
    if config.stop or not ids or (ask_tokenizer and _has_tokenizer(config.model.path)):
        codec = load_codec(config.model.path, trust_remote_code=config.model.trust_remote_code)
        ids |= set(token_ids(codec.tokenizer.eos_token_id))
        ids |= {_single_token(codec, text) for text in config.stop}
    return frozenset(ids)


def end_tokens_of(folder: Path) -> set[int]:
    """`eos_token_id` of `config.json` and `generation_config.json`, read without transformers."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            ids |= set(token_ids(json.loads((folder / name).read_text("utf-8")).get("eos_token_id")))
    return ids


def _has_tokenizer(path: str) -> bool:
    """Checks the folder, because transformers makes an empty tokenizer with end token 0 if there is none."""
    folder = Path(path)
    return not folder.is_dir() or any((folder / name).exists() for name in _TOKENIZER_FILES)


def _single_token(codec: TextCodec, text: str) -> int:
    encoded = codec.tokenizer.encode(text, add_special_tokens=False)
    if len(encoded) != 1:
        raise ModelError(
            f"the stop text {text!r} is {len(encoded)} tokens under the tokenizer of {codec.model_path}",
            hint="`rollout.stop` takes texts of exactly one token",
        )
    return int(encoded[0])

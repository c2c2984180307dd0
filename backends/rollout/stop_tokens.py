"""The tokens that end a completion."""

from __future__ import annotations

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
        ids |= {single_token(codec, text) for text in config.stop}
    return frozenset(ids)


def _has_tokenizer(path: str) -> bool:
    """Checks the folder, because transformers makes an empty tokenizer with end token 0 if there is none."""
    folder = Path(path)
    return not folder.is_dir() or any((folder / name).exists() for name in _TOKENIZER_FILES)


def single_token(codec: TextCodec, text: str) -> int:
    """The token of a stop text. Raises ModelError when it is none, several, or one that stands for other text too."""
    encoded = codec.tokenizer.encode(text, add_special_tokens=False)
    if len(encoded) != 1:
        what = f"{len(encoded)} tokens" if encoded else "no token"
    elif encoded[0] == codec.tokenizer.unk_token_id and text != codec.tokenizer.unk_token:
        what = "the token for unknown text"
    elif (read := str(codec.tokenizer.decode(encoded)).strip()) != text.strip():  # it drops characters that it lacks
        what = f"read as {read!r}"
    else:
        return int(encoded[0])
    raise ModelError(
        f"the stop text {text!r} is {what} under the tokenizer of {codec.model_path}",
        hint="`rollout.stop` takes texts of exactly one token",
    )

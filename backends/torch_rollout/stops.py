"""Which tokens end an answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from specs.errors import ModelError
from specs.role_config import RolloutConfig

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def stop_tokens(model: PreTrainedModel, config: RolloutConfig) -> frozenset[int]:
    """The model's own end tokens (generation config, config, tokenizer) and the tokens of `config.stop`.

    Raises ModelError when a stop text is not exactly one token, or when the tokenizer cannot be read but is needed.
    """
    ids = set(_ids(getattr(model.generation_config, "eos_token_id", None))) | set(_ids(model.config.eos_token_id))
    tokenizer = _tokenizer(config)
    if tokenizer is None:
        if config.stop or not ids:
            raise ModelError(
                f"no tokenizer in {config.model.path}",
                hint="`rollout.stop` needs the tokenizer, and so does a model whose config names no eos_token_id",
            )
        return frozenset(ids)
    ids |= set(_ids(tokenizer.eos_token_id))
    for text in config.stop:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        if len(encoded) != 1:
            raise ModelError(
                f"the stop text {text!r} is {len(encoded)} tokens under the tokenizer of {config.model.path}",
                hint="`rollout.stop` takes texts of exactly one token",
            )
        ids.add(encoded[0])
    return frozenset(ids)


def _tokenizer(config: RolloutConfig) -> PreTrainedTokenizerBase | None:
    """None where the folder has none: transformers would make an empty one up, with end token 0."""
    path = Path(config.model.path)
    if path.is_dir() and not any((path / name).exists() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError):
        return None


def _ids(value: int | Sequence[int] | None) -> Iterable[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else value

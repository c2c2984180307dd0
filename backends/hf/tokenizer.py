"""The model's own tokenizer: prompts to tokens, completions to text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specs.errors import ModelError
from specs.json_file import read_or_empty
from specs.model_facts import merged_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# AutoTokenizer imports torch: two seconds and 200 MB that a role without a model need not pay. Of these models it is
# known which class it picks, and that the class alone needs no torch; a test holds this table against AutoTokenizer.
_CLASS_WITHOUT_TORCH = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}


class TextCodec:
    """A tokenizer, reduced to what prompts and rewards need. `today`: for its chat template, empty: the day it is."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model_path: str, today: str = "") -> None:
        self.tokenizer, self.model_path, self.today = tokenizer, model_path, today

    @property
    def has_chat_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def unknown_id(self) -> int | None:
        """The token that stands for what the tokenizer does not know."""
        found = self.tokenizer.unk_token_id
        return found if isinstance(found, int) else None

    def chat_template(self, *, tools: bool = False) -> str:
        """Return the text of its chat template; with `tools` that of several which writes them. Raises ModelError where
        there is none, or none of several is the default."""
        if not self.has_chat_template:
            message = f"the tokenizer of {self.model_path} has no chat template, which writes the turns"
            raise ModelError(message, hint="use an instruct model, or add a chat_template.jinja")
        try:
            return str(self.tokenizer.get_chat_template(tools=[] if tools else None))
        except ValueError as error:
            hint = 'name one of its chat templates default, or set data.chat = "never"'
            raise ModelError(f"the tokenizer of {self.model_path}: {error}", hint=hint) from error

    def encode(self, texts: Sequence[str], *, rendered: bool) -> list[list[int]]:
        """Return the token ids of each text. `rendered`: the text came from a chat template and holds its special
        tokens already; else the tokenizer adds what it puts before plain text (and nothing after it)."""
        if not texts:
            return []
        encoded: list[list[int]] = self.tokenizer(
            list(texts), add_special_tokens=not rendered, return_attention_mask=False
        ).input_ids
        end = self.tokenizer.eos_token_id
        if rendered or end is None:
            return encoded
        return [
            ids[:-1] if ids and ids[-1] == end and not text.endswith(self.tokenizer.eos_token) else ids
            for text, ids in zip(texts, encoded, strict=True)
        ]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of a rendered text, and the characters that each stands for, from and to. Raises
        ModelError where the tokenizer cannot tell."""
        if not self.tokenizer.is_fast:
            hint = "save it with a tokenizer.json, as transformers' save_pretrained does"
            raise ModelError(f"the tokenizer of {self.model_path} does not tell where tokens stand", hint=hint)
        found = self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True)
        return list(found.input_ids), [tuple(span) for span in found.offset_mapping]

    @property
    def end_id(self) -> int | None:
        """The token that ends a sequence."""
        found = self.tokenizer.eos_token_id
        return found if isinstance(found, int) else None

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that stand for no text. Looked up once: of hundreds that takes a millisecond, and every row asks."""
        added = self.tokenizer.added_tokens_decoder
        return frozenset((*self.tokenizer.all_special_ids, *(id_ for id_, one in added.items() if one.special)))

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a completion: of the model's configs, where they are within reach, and of the tokenizer."""
        from transformers.utils.hub import cached_file

        file = None
        with suppress(OSError):
            file = cached_file(self.model_path, "config.json")
        ids = end_tokens_of(Path(file).parent) if file else set()
        return frozenset((*ids, *token_ids(self.tokenizer.eos_token_id)))

    def decode(self, sequences: Sequence[Sequence[int]], *, special_tokens: bool = False) -> list[str]:
        """Return the text of each token sequence, spaces exactly as generated. `special_tokens`: with these in it."""
        if not sequences:
            return []
        return self.tokenizer.batch_decode(
            [list(ids) for ids in sequences], skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False
        )


def load_codec(model_path: str, *, trust_remote_code: bool = False, today: str = "") -> TextCodec:
    """Load the tokenizer of a model folder or hub id. Raises ModelError when there is none or it is broken."""
    name = _class_without_torch(model_path)
    try:
        if name is not None:
            from transformers.models import qwen2

            loader: Any = getattr(qwen2, name)
            loaded = loader.from_pretrained(model_path)
        else:
            from transformers import AutoTokenizer

            loaded = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises bare Exception for a broken tokenizer.json
        raise _unusable(model_path, error) from error
    if len(loaded) <= len(loaded.added_tokens_decoder):  # transformers makes an empty one where there are no files
        raise _unusable(model_path, ValueError("it has no vocabulary"))
    return TextCodec(loaded, model_path, today)


def _class_without_torch(model_path: str) -> str | None:
    """Return the name of the class that AutoTokenizer would pick, where that is certain; else None."""
    folder = Path(model_path)
    config, tokenizer = (read_or_empty(folder / name) for name in ("config.json", "tokenizer_config.json"))
    name = _CLASS_WITHOUT_TORCH.get(str(config.get("model_type")))
    known = name is not None and "auto_map" not in tokenizer
    return name if known and tokenizer.get("tokenizer_class") in (name, f"{name}Fast") else None


def own_code_hint(error: BaseException) -> str:
    """Return what to do where a model cannot be used because it runs code of its own; "" where it is not that."""
    named = "trust_remote_code" in str(error)
    return "it runs its own code: read it, then set model.trust_remote_code = true" if named else ""


def _unusable(model_path: str, error: Exception, what: str = "tokenizer") -> ModelError:
    words = (str(error).strip() or type(error).__name__).splitlines()[0]
    if own := own_code_hint(error):
        hint = own
    elif Path(model_path).is_dir():
        hint = "put config.json, tokenizer.json and tokenizer_config.json there"
    else:
        hint = "check the name; without a network the model must lie in the Hugging Face cache or in a folder"
    return ModelError(f"no usable {what} at {model_path}: {words}", hint=hint)


def token_ids(value: Any) -> Iterable[int]:
    """Return the ids of an `eos_token_id` as configs hold it: nothing, one id, or several; others are left out."""
    return [one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, int)]


def end_tokens_of(folder: Path) -> set[int]:
    """`eos_token_id` of `config.json` and `generation_config.json`, read without transformers."""
    contents = (merged_config(read_or_empty(folder / name)) for name in ("config.json", "generation_config.json"))
    return {id_ for content in contents for id_ in token_ids(content.get("eos_token_id"))}


def pad_token_of(model_path: str, *, trust_remote_code: bool = False) -> int | None:
    """Return the padding token that a model's `config.json` names, as transformers reads it. Raises ModelError."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise _unusable(model_path, error, "config") from error
    found = getattr(config.get_text_config(), "pad_token_id", None)
    return int(found) if isinstance(found, int) else None

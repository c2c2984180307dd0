"""Tokenizers and chat templates as the files of a model hold them: whether there is one, whether it fits the model,
and whether it is another's. What they do with the first rows is found by rendering them (`workers/data`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlctl.models.weight_files import AGAIN, Wrong
from specs.errors import Problem
from specs.json_file import read_object
from specs.schema.spec import Spec
from specs.text import show
from workers.data.tokenizer_file import TokenizerFile

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt", "tekken.json")
_OF_TEXT = ("bos", "eos", "unk", "pad")
SHOWN = 3  # differing tokens that a message shows
load_tokenizer = cache(TokenizerFile)  # of a model folder


def reference_of(spec: Spec) -> tuple[str, str]:
    """Return the path of the reference model, empty where none is loaded, and why it is that one."""
    if not spec.needs_ref:
        return "", spec.why_no_ref
    if spec.ref_is_actor:
        return "", "the actor without its adapters: no second model is loaded"
    if spec.own_ref_model:
        return spec.own_ref_model, "set by ref.model"
    if spec.precomputes_ref:
        return "", "the actor before it learns: no second model is loaded"
    return spec.model.path, "the actor's starting weights"


def tokenizer_problems(folder: Path, config: Mapping[str, Any]) -> Iterator[Wrong]:
    """Yield a tokenizer that is missing, broken, or has tokens beyond the model's vocabulary, and end tokens that no
    completion can have. `config`: the model's."""
    file, vocab_size = folder / "tokenizer.json", config.get("vocab_size")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        hint = "put the tokenizer that the model was trained with beside its config.json"
        yield f"no tokenizer with the model (none of {', '.join(TOKENIZER_FILES[:3])}, …)", hint
    elif file.is_file():
        try:
            codec = load_tokenizer(folder)
            vocabulary = codec.vocabulary
        except ValueError as error:
            yield f"its tokenizer cannot be read: {error}", AGAIN
            return
        # Gemma 3's has one for images, which its text models lack: no conversation of texts brings it.
        beyond = {number: token for token, number in vocabulary.items() if number >= (vocab_size or 1 << 31)}
        own = [codec.special_tokens.get(f"{name}_token", "") for name in _OF_TEXT]
        used = [chat_template_of(folder).text, *own] if beyond else []
        met = [n for n, token in beyond.items() if n not in codec.special_ids or any(token in one for one in used)]
        if not vocabulary:
            yield "its tokenizer has no vocabulary", AGAIN
        elif met:
            message = f"the tokenizer has token {max(met)}, but the model's vocab_size is {vocab_size}"
            yield message, "use the tokenizer that the model was trained with"
    yield from _end_token_problems(folder, config)


def _end_token_problems(folder: Path, config: Mapping[str, Any]) -> Iterator[Wrong]:
    named = {"config.json": config}
    if (file := folder / "generation_config.json").is_file():
        try:
            named[file.name] = read_object(file)
        except ValueError as error:
            yield f"{file.name} {error}", AGAIN
            return
    given = {
        name: content["eos_token_id"] for name, content in named.items() if content.get("eos_token_id") is not None
    }
    ids = {name: one if isinstance(one, list) else [one] for name, one in given.items()}
    vocab_size = config.get("vocab_size")
    known = range(vocab_size if isinstance(vocab_size, int) else 1 << 31)
    hint = "copy the file from the model again, or name the model's end tokens in it"
    for name, values in ids.items():
        if not all(type(one) is int for one in values):
            yield f"eos_token_id in {name} is {show(values)}, not a token id or a list of them", hint
            return
    if any(ids.values()) and not any(one in known for values in ids.values() for one in values):
        name, values = next(iter(ids.items()))
        yield f"eos_token_id {values[0]} in {name} is outside the model's vocabulary of {vocab_size}", hint


def kinship_problems(actor: Path, other: Path) -> Iterator[Wrong]:
    """Yield tokens of the actor's tokenizer that are others in the tokenizer of a model which scores them. Tokenizers
    without a `tokenizer.json` are compared when they are built."""
    files = [folder / "tokenizer.json" for folder in (actor, other)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    try:
        mine, theirs = load_tokenizer(actor).vocabulary, load_tokenizer(other).vocabulary
    except ValueError:  # which `tokenizer_problems` reports of the actor's
        return
    if changed := sorted(mine.items() - theirs.items(), key=lambda pair: pair[1]):
        there = {number: show(token, 20) for token, number in theirs.items()}
        some = [f"{number} is {show(one, 20)} and {there.get(number, 'nothing')} there" for one, number in changed]
        count = "1 token" if len(changed) == 1 else f"{len(changed)} tokens"
        message = f"its tokenizer differs from the actor's in {count}: {', '.join(some[:SHOWN])}"
        yield message, "use a model with the actor's tokenizer"


# ── chat templates ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the file that it is in. `text` is empty where there is none."""

    where: str = ""
    text: str = ""
    with_tools: str = ""  # of several, what writes tools
    names: tuple[str, ...] = ()  # of several templates, none of which is the default


def chat_template_of(folder: Path) -> ChatTemplate:
    """Return the template of a model folder; of several the default one."""
    if (file := folder / "chat_template.jinja").is_file():
        other = folder / "additional_chat_templates" / "tool_use.jinja"
        with_tools = other.read_text(encoding="utf-8", errors="replace") if other.is_file() else ""
        return ChatTemplate(file.name, file.read_text(encoding="utf-8", errors="replace"), with_tools)
    # The first is a processor's, read only where a tokenizer is made of Mistral's own file.
    names = ("chat_template.json", "tokenizer_config.json")[(folder / "tokenizer.json").is_file() :]
    for name in names:
        with_tools = ""
        try:
            found = read_object(folder / name).get("chat_template")
        except ValueError:  # not there, or broken, which `tokenizer_problems` reports
            continue
        if isinstance(found, list):
            named: dict[Any, Any] = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            if named and "default" not in named:
                return ChatTemplate(name, names=tuple(map(str, named)))
            found, with_tools = named.get("default"), str(named.get("tool_use", ""))
        if found:
            return ChatTemplate(name, str(found), with_tools)
    return ChatTemplate()


def chat_problems(spec: Spec, folder: Path) -> Iterator[Problem]:
    """Yield a chat template that the spec needs and the actor's model, in `folder`, does not have."""
    data, found = spec.data, chat_template_of(folder)
    lacks = f"the tokenizer of {spec.model.path} has no chat template"
    if data.chat == "never" or found.text:
        return
    if found.names:
        message = f"{found.where} has no chat template named default ({', '.join(found.names)})"
        yield Problem("model.path", message, 'name one of them default, or set data.chat = "never"')
    elif data.chat == "always":
        yield Problem("data.chat", lacks, 'write "auto" or "never"')
    elif data.system:
        hint = "remove the key" + (", or put its text into data.template" if hasattr(data, "template") else "")
        yield Problem("data.system", f"has no effect: {lacks}", hint)

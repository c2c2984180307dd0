"""Checks that a model's tokenizer and chat template exist, can be read, and fit the model and the spec."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlctl.models.hub import Folder, unread
from rlctl.models.paths import read_object
from rlctl.models.weight_files import AGAIN
from specs.schema.sections import DataSection
from specs.text import show

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt", "tekken.json")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")  # the first that has one

Wrong = Callable[..., None]  # is told what is wrong, a hint, and the key and its value where it is not the model's own


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
    file = folder / "tokenizer.json"
    # Large files cost more time to parse than the check may take; the reward role parses them anyway.
    if not file.is_file() or unread(folder, ["tokenizer.json"]):
        return
    if isinstance(file, Path) and file.stat().st_size > 2**22:
        return
    tokenizer = read_object(file, wrong)
    if tokenizer is None or not isinstance(vocab_size, int):
        return
    try:
        highest = _highest_token(tokenizer)
    except (AttributeError, TypeError, KeyError):
        wrong("tokenizer.json is not a tokenizer", AGAIN)
        return
    if highest >= vocab_size:
        message = f"the tokenizer has token {highest}, but the model's vocab_size is {vocab_size}"
        wrong(message, "use the tokenizer that the model was trained with")


def _highest_token(tokenizer: dict[str, Any]) -> int:
    vocab, added = (tokenizer.get("model") or {}).get("vocab"), tokenizer.get("added_tokens") or []
    ids = [*vocab.values()] if isinstance(vocab, dict) else [len(vocab) - 1] if vocab else []
    return max([*map(operator.index, ids), *(operator.index(token["id"]) for token in added)], default=-1)


def check_chat_template(folder: Folder, path: str, data: DataSection, wrong: Wrong) -> None:
    """Checks that there is a chat template where the spec needs one, and that it is valid Jinja. `path`: the model's
    as the spec writes it."""
    if data.chat == "never":
        return
    name, template = _chat_template(folder, wrong)
    lacks = f"the tokenizer of {path} has no chat template"
    if template:
        if error := _template_error(template):
            wrong(f"{name}: {error}", 'repair the template, or set data.chat = "never"')
    elif unread(folder, _TEMPLATE_FILES):
        return
    elif data.chat == "always":
        wrong(lacks, 'write "auto" or "never"', "data.chat", '"always"')
    elif data.system:
        hint = "remove the key, or put its text into data.template"
        wrong(f"has no effect: {lacks}", hint, "data.system", show(data.system))


def _chat_template(folder: Folder, wrong: Wrong) -> tuple[str, str]:
    """Where the template stands, and its text; "" where there is none. Of several the default one."""
    for name in _TEMPLATE_FILES:
        file = folder / name
        if not file.is_file() or unread(folder, [name]):
            continue
        if name.endswith(".jinja"):
            return name, file.read_text(encoding="utf-8", errors="replace")
        found = (read_object(file, wrong) or {}).get("chat_template")
        if isinstance(found, list):
            found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}.get("default")
        if found:
            return f"chat_template in {name}", str(found)
    return "", ""


def _template_error(template: str) -> str:
    """What is wrong with the syntax of a chat template, or ""."""
    try:
        from jinja2 import Environment, TemplateSyntaxError
    except ImportError:
        return ""  # the reward role's interpreter has it, and will say
    # transformers' own tag around what the assistant says; it has no meaning here.
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).compile(plain, raw=True)  # filters are looked up too
    except TemplateSyntaxError as error:
        return f"not a Jinja template: line {error.lineno}: {error.message}"
    return ""

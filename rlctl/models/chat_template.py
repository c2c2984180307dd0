"""A model's chat template: where it stands, and whether the spec can do without one.

What it does with the first rows is found by rendering them (`workers/chat_renderer.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specs.errors import Problem
from specs.json_file import read_object
from specs.schema.spec import Spec
from specs.text import show

_FILES = ("chat_template.json", "tokenizer_config.json")  # the first that has one


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the file that it stands in. `text` is empty where there is none."""

    where: str = ""
    text: str = ""
    names: tuple[str, ...] = ()  # of several templates, none of which is the default


def chat_template_of(folder: Path) -> ChatTemplate:
    """Return the template of a model folder; of several the default one."""
    if (file := folder / "chat_template.jinja").is_file():
        return ChatTemplate(file.name, file.read_text(encoding="utf-8", errors="replace"))
    for name in _FILES:
        try:
            found = read_object(folder / name).get("chat_template")
        except ValueError:  # not there, or broken, which `check_tokenizer` reports
            continue
        if isinstance(found, list):
            named: dict[Any, Any] = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            if named and "default" not in named:
                return ChatTemplate(name, names=tuple(map(str, named)))
            found = named.get("default")
        if found:
            return ChatTemplate(name, str(found))
    return ChatTemplate()


def chat_problems(spec: Spec, folder: Path) -> Iterator[Problem]:
    """Yield a chat template that the spec needs and the actor's model, in `folder`, does not have."""
    data, path, found = spec.data, spec.model.path, chat_template_of(folder)
    lacks = f"the tokenizer of {path} has no chat template"
    if data.chat == "never" or found.text:
        return
    if found.names:
        message = f"{found.where} has no chat template named default ({', '.join(found.names)})"
        yield Problem("model.path", message, 'name one of them default, or set data.chat = "never"', show(path))
    elif data.chat == "always":
        yield Problem("data.chat", lacks, 'write "auto" or "never"', '"always"')
    elif data.system:
        hint = "remove the key, or put its text into data.template"
        yield Problem("data.system", f"has no effect: {lacks}", hint, show(data.system))

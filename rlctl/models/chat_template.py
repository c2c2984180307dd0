"""Checks of a model's chat template, as far as its text tells: it is rendered by `check-config --probe`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlctl.models.hub import Folder, unread
from rlctl.models.paths import read_object
from rlctl.models.tokenizer_files import Wrong
from rlctl.models.weight_files import LFS, LFS_HINT
from specs.schema.sections import DataSection
from specs.text import show

if TYPE_CHECKING:
    from jinja2.nodes import Template

_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")  # the first that has one
# What transformers gives a template: its arguments and functions, and every special token by its name.
_DEFINED = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
_TOKEN = re.compile(r"\w+_token$")


@dataclass(frozen=True)
class ChatTemplate:
    """A template and where it stands. `text` is empty where there is none, or where it is not known whether there is:
    `unknown`."""

    where: str = ""
    text: str = ""
    unknown: bool = False
    names: tuple[str, ...] = ()  # of several templates, none of which is the default


def chat_template_of(folder: Folder, wrong: Wrong = lambda *_: None) -> ChatTemplate:
    """The template of a model folder; of several the default one. `wrong` is told of files that cannot be read."""
    for name in _FILES:
        file = folder / name
        if not file.is_file() or unread(folder, [name]):
            continue
        if name.endswith(".jinja"):
            return ChatTemplate(name, file.read_text(encoding="utf-8", errors="replace"))
        where, found = f"chat_template in {name}", (read_object(file, wrong) or {}).get("chat_template")
        if isinstance(found, list):
            named: dict[Any, Any] = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            if named and "default" not in named:
                return ChatTemplate(where, names=tuple(map(str, named)))
            found = named.get("default")
        if found:
            return ChatTemplate(where, str(found))
    return ChatTemplate(unknown=unread(folder, _FILES))


def check_chat_template(folder: Folder, path: str, data: DataSection, wrong: Wrong, doubt: Wrong) -> None:
    """Checks that there is a chat template where the spec needs one, and that it is valid Jinja. `path`: the model's
    as the spec writes it."""
    if data.chat == "never":
        return
    found = chat_template_of(folder, wrong)
    lacks = f"the tokenizer of {path} has no chat template"
    if found.names:
        message = f"{found.where} has no template named default ({', '.join(found.names)})"
        wrong(message, 'name one of them default, or set data.chat = "never"')
    elif found.text:
        _check_text(found, wrong, doubt)
    elif found.unknown:
        return
    elif data.chat == "always":
        wrong(lacks, 'write "auto" or "never"', "data.chat", '"always"')
    elif data.system:
        hint = "remove the key, or put its text into data.template"
        wrong(f"has no effect: {lacks}", hint, "data.system", show(data.system))
    elif found.where:
        doubt(f"{found.where} is empty: prompts go to the model as they are", "copy it again, or remove it")


def _check_text(found: ChatTemplate, wrong: Wrong, doubt: Wrong) -> None:
    if found.text.startswith(LFS):
        wrong(f"{found.where} is a pointer of Git LFS, not the file itself", LFS_HINT)
        return
    try:
        from jinja2 import Environment, TemplateSyntaxError
    except ImportError:
        return  # the data role's interpreter has it, and will say
    # transformers' own tag around what the assistant says; it has no meaning here.
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", found.text)
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        environment.compile(plain, raw=True)  # filters are looked up too
        unknown = _undefined_names(environment.parse(plain))
    except TemplateSyntaxError as error:
        message = f"{found.where}: not a Jinja template: line {error.lineno}: {error.message}"
        wrong(message, 'repair the template, or set data.chat = "never"')
        return
    if unknown:
        message = f"{found.where} uses {', '.join(unknown)}, which nothing defines: it is empty there"
        doubt(message, "check the spelling; transformers gives a template messages, tools and the special tokens")


def _undefined_names(template: Template) -> list[str]:
    """Names that a template prints or compares with, which transformers does not give it and it never asks about. A
    name whose truth is asked (`if thinking`), or whether it is defined, may be missing."""
    from jinja2 import meta, nodes

    unknown = {name for name in meta.find_undeclared_variables(template) if not _TOKEN.match(name)} - _DEFINED
    tests = [one.test for one in template.find_all(nodes.If)]
    tests += [one.test for one in template.find_all(nodes.CondExpr)]
    asked = {name for test in tests for name in _names_whose_truth_counts(test)}
    # Calling one, or looking into it, ends the rendering: the probe sees it.
    parents = (nodes.Test, nodes.Filter, nodes.Call, nodes.Getattr, nodes.Getitem)
    nested = [getattr(one, "node", None) for kind in parents for one in template.find_all(kind)]
    asked |= {one.name for one in nested if isinstance(one, nodes.Name)}
    asked |= {one.name for one in template.find_all(nodes.Name) if one.ctx == "store"}  # set in some branch
    return sorted(unknown - asked)


def _names_whose_truth_counts(test: Any) -> list[str]:
    from jinja2 import nodes

    if isinstance(test, nodes.Name):
        return [test.name]
    if isinstance(test, nodes.Not):
        return _names_whose_truth_counts(test.node)
    if isinstance(test, nodes.And | nodes.Or):
        return [*_names_whose_truth_counts(test.left), *_names_whose_truth_counts(test.right)]
    return []

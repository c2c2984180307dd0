"""What transformers' own classes say of a `config.json`: names, types and defaults of its keys, read from their source.

Nothing is imported: a class is found by its `model_type`, its fields are read as syntax.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float,),  # transformers refuses 1 for 1.0
    "bool": (bool,),
    "str": (str,),
    "None": (type(None),),
    "list": (list,),
    "tuple": (list,),
    "dict": (dict,),
    "RopeParameters": (dict,),
}
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True)
class ConfigField:
    """`types`: what JSON may have; empty: not known. `default`: a literal; None also where it is none."""

    types: tuple[type, ...]
    default: Any = None

    def takes(self, value: object) -> bool:
        if not self.types or (isinstance(value, bool) and bool not in self.types and int in self.types):
            return not self.types
        return isinstance(value, self.types)

    @property
    def words(self) -> str:
        names = [WORDS[one] for one in WORDS if one in self.types and not (one is int and float in self.types)]
        if float in self.types and int not in self.types:
            names[names.index(WORDS[float])] = "a number with a point"
        return " or ".join(names) or "null"


@dataclass(frozen=True)
class ConfigClass:
    """A model family as the installed transformers knows it."""

    fields: Mapping[str, ConfigField] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)  # usual name of a key → the family's own
    source: str = ""  # of the module of its config
    modeling: str = ""  # of the module of its layers; "" where it has another name

    def own_name(self, name: str) -> str:
        return self.renamed.get(name, name)

    def value(self, config: Mapping[str, Any], name: str) -> Any:
        """What a config says of a key by its usual name: under either name, else the default of the class."""
        own = self.own_name(name)
        for key in (own, name):
            if key in config:
                return config[key]
        return self.fields[own].default if own in self.fields else None


@cache
def config_class(model_type: str) -> ConfigClass | None:
    """None where transformers is not installed here, or does not know the type under a folder of its name."""
    root = transformers_folder()
    for folder in _folders(model_type) if root else ():
        file = _read(root / "models" / folder / f"configuration_{folder}.py") if root else ""
        if found := _class_of(file, model_type):
            modeling = _read(root / "models" / folder / f"modeling_{folder}.py") if root else ""
            return ConfigClass(_fields(found), _renamed(found), file, modeling)
    return None


@cache
def transformers_folder() -> Path | None:
    """Where the transformers of this interpreter is installed."""
    package = importlib.util.find_spec("transformers")
    return next((Path(root) for root in (package.submodule_search_locations or [])), None) if package else None


@cache
def activations() -> frozenset[str]:
    """Names that transformers knows for activation functions; empty where it is not here."""
    root = transformers_folder()
    table = re.search(
        r"^ACT2CLS = \{(.*?)^\}", _read(root / "activations.py") if root else "", re.DOTALL | re.MULTILINE
    )
    return frozenset(re.findall(r'^    "(\w+)":', table[1], re.MULTILINE)) if table else frozenset()


@cache
def rope_types() -> Mapping[str, frozenset[str]]:
    """Kind of rotary positions → keys that it cannot do without; empty where that cannot be told."""
    root = transformers_folder()
    source = _read(root / "modeling_rope_utils.py") if root else ""
    table = re.search(r"^ROPE_INIT_FUNCTIONS\b.*?\{(.*?)^\}", source, re.DOTALL | re.MULTILINE)
    if not table:
        return {}
    found = {"default": frozenset[str]()}
    for kind in re.findall(r'^    "(\w+)":', table[1], re.MULTILINE):
        needed = re.search(rf"def _validate_{kind}_rope_parameters\(.*?required_keys = \{{(.*?)\}}", source, re.DOTALL)
        found[kind] = frozenset(re.findall(r'"(\w+)"', needed[1])) if needed else frozenset()
    return found


def _folders(model_type: str) -> list[str]:
    name = model_type.replace("-", "_")
    return [name, name.removesuffix("_text")] if name.isidentifier() else []


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _class_of(source: str, model_type: str) -> ast.ClassDef | None:
    if f'model_type = "{model_type}"' not in source:
        return None
    try:
        classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    except SyntaxError:
        return None
    return next((node for node in classes if _assigned(node, "model_type") == model_type), None)


def _assigned(node: ast.ClassDef, name: str) -> Any:
    """The literal that the class assigns to a name; None where it is none."""
    for line in node.body:
        if isinstance(line, ast.Assign) and [target.id for target in line.targets if isinstance(target, ast.Name)] == [
            name
        ]:
            return _literal(line.value)
    return None


def _literal(node: ast.expr | None) -> Any:
    try:
        return ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError, SyntaxError):
        return None


def _renamed(node: ast.ClassDef) -> dict[str, str]:
    found = _assigned(node, "attribute_map")
    return {str(name): str(own) for name, own in found.items()} if isinstance(found, dict) else {}


def _fields(node: ast.ClassDef) -> dict[str, ConfigField]:
    lines = [line for line in node.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)]
    return {
        line.target.id: ConfigField(_types(line.annotation), _literal(line.value))
        for line in lines
        if isinstance(line.target, ast.Name) and "ClassVar" not in ast.unparse(line.annotation)
    }


def _types(annotation: ast.expr) -> tuple[type, ...]:
    """What an annotation allows, by the outermost types; empty where a part of it is not known."""
    parts: list[ast.expr] = []
    unions = [annotation]
    while unions:
        part = unions.pop()
        if isinstance(part, ast.BinOp):
            unions += [part.left, part.right]
        else:
            parts.append(part.value if isinstance(part, ast.Subscript) else part)
    names = [ast.unparse(part) for part in parts]
    if not all(name in _TYPES for name in names):
        return ()
    return tuple(dict.fromkeys(one for name in names for one in _TYPES[name]))

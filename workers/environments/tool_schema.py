"""Describe a function as a tool for the model, from its type hints and its docstring in Google style."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from itertools import chain, repeat, takewhile
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from specs.errors import RewardError

_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}
_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def schema_of(function: Callable[..., Any], name: str = "") -> dict[str, Any]:
    """Return the tool as chat templates take it. Raises RewardError for a parameter without a hint, with one that is no
    JSON type or without a name, for a function without a docstring, and for one that yields."""
    name = name or function.__name__
    own = function.__doc__ != type(function).__doc__  # a partial has that of its class
    text = inspect.getdoc(function if own else _with_hints(function)) or ""  # a method may inherit it
    if not text:
        raise RewardError(f"tool {name} has no docstring", hint="say in it what the tool does: the model reads it")
    if inspect.isgeneratorfunction(_with_hints(function)) or inspect.isasyncgenfunction(_with_hints(function)):
        raise RewardError(f"tool {name} yields: a call gives a generator", hint="return what the model is to read")
    description, about = _read_docstring(text)
    parameters = tool_parameters(function)
    properties = {each.name: _property(name, function, each) for each in parameters}
    for parameter, schema in properties.items():
        if parameter in about:
            schema["description"] = about[parameter]
    inner: dict[str, Any] = {"type": "object", "properties": properties}
    if required := [each.name for each in parameters if each.default is each.empty]:
        inner["required"] = required
    return {"type": "function", "function": {"name": name, "description": description, "parameters": inner}}


def tool_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return what the model can fill in: no `self`, no `*args` and `**kwargs`, nothing that a partial has filled in."""
    filled = function.keywords if isinstance(function, partial) else {}
    given = [each for each in inspect.signature(function).parameters.values() if each.name not in filled]
    if given and given[0].name in ("self", "cls") and given[0].annotation is inspect.Parameter.empty:
        given = given[1:]
    return [each for each in given if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def _with_hints(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that has a callable's hints: of a partial the one it calls, of an object its `__call__`."""
    if isinstance(function, partial):
        return _with_hints(function.func)
    return function if hasattr(function, "__name__") else type(function).__call__


def _hint_of(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the hint of one parameter; what is returned may be known to type checkers alone. Raises NameError."""
    only = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    names = getattr(inspect.unwrap(_with_hints(function)), "__globals__", {})
    return get_type_hints(only, names)[parameter.name]


def _property(tool: str, function: Callable[..., Any], parameter: inspect.Parameter) -> dict[str, Any]:
    if parameter.kind is parameter.POSITIONAL_ONLY:
        hint = "leave out the / behind it: arguments are given by name"
        raise RewardError(f"tool {tool}: {parameter.name} is positional-only", hint=hint)
    if parameter.annotation is parameter.empty:
        raise RewardError(
            f"tool {tool}: {parameter.name} has no type hint", hint=f"write {parameter.name}: str, or another type"
        )
    try:
        return _schema_of_hint(_hint_of(function, parameter))
    except (NameError, TypeError, ValueError) as error:
        hint = "use str, int, float, bool, list[…], tuple[…], dict[str, …], Literal[…], an Enum or X | None"
        raise RewardError(f"tool {tool}: the type hint of {parameter.name}: {error}", hint=hint) from None


def as_hinted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with members of enums and tuples as their hints ask. Raises ValueError for no enum's value."""
    parameters = inspect.signature(function).parameters
    hints = {name: _hint_of(function, parameters[name]) for name in arguments if name in parameters}
    return {name: _as_hinted(hints.get(name), value) for name, value in arguments.items()}


def _as_hinted(hint: Any, value: Any) -> Any:
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if origin in (list, tuple) and isinstance(value, list):
        kinds = inner[:1] * len(value) if origin is list or inner[1:] == (...,) else inner
        return origin(map(_as_hinted, chain(kinds, repeat(None)), value))
    if origin is dict and inner and isinstance(value, dict):
        return {key: _as_hinted(inner[1], each) for key, each in value.items()}
    if origin in (Union, types.UnionType) and value is not None:
        members = [each for each in inner if each is not type(None)]
        if len(members) == 1:
            return _as_hinted(members[0], value)
        for each in members:
            with suppress(ValueError):
                if (found := _as_hinted(each, value)) is not value:
                    return found
    return value


def _schema_of_hint(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type hint, as transformers' `get_json_schema` writes it. Raises TypeError."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in _TYPES or (origin in (list, dict) and not inner):
        return {"type": _TYPES[origin or hint]}
    if origin is Literal:
        return _choices(list(inner))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _choices([member.value for member in hint])
    if origin in (Union, types.UnionType):
        return _union([_schema_of_hint(each) for each in inner if each is not type(None)], type(None) in inner)
    if (origin is list and inner) or (origin is tuple and inner[1:] == (...,)):
        return {"type": "array", "items": _schema_of_hint(inner[0])}
    if tuple in (hint, origin) and len(inner) != 1:
        return {"type": "array"} | ({"prefixItems": [*map(_schema_of_hint, inner)]} if inner else {})
    if origin is dict and inner:
        return {"type": "object", "additionalProperties": _schema_of_hint(inner[1])}
    raise TypeError(f"{hint} is no JSON type")


def _union(members: list[dict[str, Any]], nullable: bool) -> dict[str, Any]:
    if len(members) == 1:
        schema = members[0]
    elif all(member.keys() == {"type"} and isinstance(member["type"], str) for member in members):
        names = sorted({member["type"] for member in members})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": members}
    return {**schema, "nullable": True} if nullable else schema


def _choices(values: list[Any]) -> dict[str, Any]:
    if any(type(value) not in _TYPES for value in values):
        raise TypeError(f"{values} holds what JSON does not know")
    names = list(dict.fromkeys(_TYPES[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return what stands before the first section, and the description of each argument."""
    parts = _SECTION.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    about: dict[str, str] = {}
    lines = [line for line in sections.get("Args", sections.get("Arguments", "")).splitlines() if line.strip()]
    depth = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
    name = ""
    for line in (line[depth:] for line in takewhile(lambda line: not line[:depth].strip(), lines)):
        if not line[0].isspace() and (found := _ARGUMENT.match(line)):
            name, about[found[1]] = found[1], found[2].strip()
        elif name:
            about[name] = f"{about[name]} {line.strip()}".strip()
    return parts[0].strip(), about

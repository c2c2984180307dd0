"""Base of every table of the run spec: frozen, without room for a mistyped key or for a value that nothing can use.

Below each key of a table stands what it means, as a docstring, which `meaning_of` reads.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints, field_validator
from pydantic_core import PydanticCustomError

from specs.errors import Problem
from specs.text import show

_LARGEST = 2**63 - 1  # TOML 1.0: whole numbers have 64 bits; the parser lets longer ones through
_VARIABLE = re.compile(r"\$(?:([A-Z_][A-Z0-9_]*)\b|\{(\w+)\})")
_NAME_BYTES, _PATH_BYTES = 255, 4095  # Linux: NAME_MAX, and PATH_MAX without its end


def plain(value: Any) -> Any:
    """`value`, looked through at every depth. Raises PydanticCustomError."""
    if isinstance(value, str) and "\0" in value:
        raise unusable("holds a NUL character, which no file, command or variable can", "write it without")
    if type(value) is int and not -_LARGEST <= value <= _LARGEST:
        raise unusable("is longer than 64 bits, which TOML's whole numbers have", "write a smaller number")
    if isinstance(value, dict):
        for name, item in value.items():
            plain(name)
            plain(item)
    elif isinstance(value, tuple | list):
        for item in value:
            plain(item)
    return value


def usable_path(path: str) -> str:
    """`path`, if the file system can be asked about it. Raises PydanticCustomError."""
    if "\0" in path:
        return path  # `plain` says so
    if path.startswith("~") and os.path.expanduser(path) == path:
        user = path.partition("/")[0]
        raise unusable(f"this machine has no user {user[1:]!r}", f"write the path without {user}")
    if variable := _VARIABLE.search(path):
        name = variable[1] or variable[2]
        known = os.environ.get(name)
        hint = f"write {show(path.replace(variable[0], known))}" if known else "write the path itself"
        raise unusable(f"holds the variable {variable[0]}, which a spec does not replace", hint)
    longest = max(path.split("/"), key=len)
    if len(os.fsencode(longest)) > _NAME_BYTES:
        raise unusable(f"too long: a name in it has {len(os.fsencode(longest))} bytes", f"use at most {_NAME_BYTES}")
    if len(os.fsencode(path)) > _PATH_BYTES:
        raise unusable(f"too long: {len(os.fsencode(path))} bytes", f"use at most {_PATH_BYTES}")
    return path


def unusable(why: str, hint: str) -> PydanticCustomError:
    """A finding whose words and hint `specs/load/explain.py` takes over."""
    return PydanticCustomError("unusable", "{why}", {"why": why, "hint": hint})


NonEmpty = Annotated[str, StringConstraints(min_length=1)]
PathText = Annotated[str, AfterValidator(usable_path)]
NonEmptyPath = Annotated[NonEmpty, AfterValidator(usable_path)]
FunctionPath = Annotated[PathText, StringConstraints(pattern=r"^.+\.py:[A-Za-z_]\w*$")]
OptionalFunctionPath = Annotated[PathText, StringConstraints(pattern=r"^(.+\.py:[A-Za-z_]\w*)?$")]


class Table(BaseModel):
    """A TOML table: frozen, and without room for a mistyped key."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )  # deferred: a rank reads few of the tables, and most of its start was to prepare for all

    _plain = field_validator("*")(plain)

    made_of: ClassVar[tuple[type[Table], ...]] = ()
    """Other tables whose keys it has."""


def meaning_of(table: type[Table], name: str) -> str:
    """Return what is written below the field `name` of a table; "" where nothing is."""
    sources = [base for made in (table, *table.made_of) for base in made.__mro__ if issubclass(base, Table)]
    written = next((found[name] for source in sources if name in (found := _docstrings(source))), "")
    return written or table.model_fields[name].description or ""


@cache
def _docstrings(table: type[Table]) -> Mapping[str, str]:
    """Return field → the docstring that follows it in the class's own body."""
    try:
        body: list[Any] = ast.parse(dedent(inspect.getsource(table))).body[0].body  # type: ignore[attr-defined]
    except OSError:  # made by `create_model`
        return {}
    found: dict[str, str] = {}
    for field, below in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            found[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return found


def no_effect(key: str, why: str) -> Problem:
    """Return the problem of a key that does nothing under what else is chosen."""
    return Problem(key, f"has no effect: {why}", "remove the key")

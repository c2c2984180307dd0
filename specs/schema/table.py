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

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints
from pydantic_core import PydanticCustomError

from specs.errors import Problem
from specs.text import show

_VARIABLE = re.compile(r"\$(?:([A-Z_][A-Z0-9_]*)\b|\{(\w+)\})")


def usable_path(path: str) -> str:
    """Return `path`, if the file system can be asked about it. Raises PydanticCustomError."""
    if "\0" in path:
        raise unusable("holds the character NUL, which no path does", "write the path without \\u0000")
    if path.startswith("~") and os.path.expanduser(path) == path:
        user = path.partition("/")[0]
        raise unusable(f"this machine has no user {user[1:]!r}", f"write the path without {user}")
    if variable := _VARIABLE.search(path):
        name = variable[1] or variable[2]
        known = os.environ.get(name)
        hint = f"write {show(path.replace(variable[0], known))}" if known else "write the path itself"
        raise unusable(f"holds the variable {variable[0]}, which a spec does not replace", hint)
    return path


def unusable(why: str, hint: str) -> PydanticCustomError:
    """Return a finding whose words and hint `specs/load/explain.py` takes over."""
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

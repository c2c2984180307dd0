"""From a TOML file and `--set` overrides to a `Spec`, or to every problem at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli
from pydantic import ValidationError

from specs.errors import Problem, SpecError
from specs.explain import explain, show
from specs.foreign_engines import tuples
from specs.overrides import apply_overrides, fill_engine_kinds
from specs.rules import cross_field_problems
from specs.schema import SCHEMA_VERSION, Spec


def load_spec(path: Path, overrides: Sequence[str] = ()) -> Spec:
    """Read and check a spec. Raises SpecError holding all problems: syntax; keys, types, bounds; rules across keys.

    Nothing is coerced: "8" is not 8, true is not 1, 1.0 is not a whole number. Files that the spec names are not looked
    at; `specs/files.py` does that.
    """
    return spec_from(read_toml(path), overrides)


def spec_from(raw: dict[str, Any], overrides: Sequence[str] = ()) -> Spec:
    """The same from tables that are already parsed; `raw` may be changed."""
    problems = apply_overrides(raw, overrides)
    version = raw.get("schema", SCHEMA_VERSION)
    if type(version) is not int or version != SCHEMA_VERSION:
        raise SpecError([*problems, _other_schema(version)])
    fill_engine_kinds(raw)
    try:
        # Strict: TOML has types of its own, so nothing needs guessing. TOML arrays are the schema's tuples.
        spec = Spec.model_validate(tuples(raw), strict=True)
    except ValidationError as error:
        raise SpecError([*problems, *explain(error.errors(include_url=False), raw)]) from None
    problems += cross_field_problems(spec)
    if problems:
        raise SpecError(problems)
    return spec


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a file. Raises SpecError with line and column."""
    try:
        text = path.read_bytes().decode("utf-8")
        return tomli.loads(text)
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file", hint="`rlctl init SPEC.toml --preset quickstart` writes one") from None
    except IsADirectoryError:
        raise SpecError(f"{path}: a folder, not a spec", hint="name the TOML file inside it") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}", hint="make it readable") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8 (byte {error.start})", hint="save the file as UTF-8") from None
    except tomli.TOMLDecodeError as error:
        raise SpecError(_syntax(path, text, str(error)), hint=_syntax_hint(text, str(error))) from None


def _other_schema(version: Any) -> Problem:
    hint = f"write `schema = {SCHEMA_VERSION}`"
    if type(version) is int and version > SCHEMA_VERSION:
        hint = "the spec is for a newer rlctl; upgrade, or " + hint + " and see what check-config says"
    elif type(version) is int:
        hint = "the spec is for an older rlctl; " + hint + ", and check-config names every key that has changed"
    return Problem("schema", f"this rlctl reads schema {SCHEMA_VERSION}", hint, show(version))


def _place(message: str, text: str) -> tuple[int, int]:
    found = re.search(r"\(at line (\d+), column (\d+)\)", message)
    if found:
        return int(found[1]), int(found[2])
    return text.count("\n") + 1, 1


def _syntax(path: Path, text: str, message: str) -> str:
    line, column = _place(message, text)
    lines = text.splitlines()
    shown = lines[line - 1].rstrip() if line <= len(lines) else ""
    cause = re.sub(r" \(at .*\)$", "", message)
    return f"{path}:{line}:{column}: not TOML: {cause}" + (f"\n  {line} | {shown}" if shown else "")


def _syntax_hint(text: str, message: str) -> str:
    line = _place(message, text)[0]
    lines = text.splitlines()
    shown = lines[line - 1] if line <= len(lines) else ""
    if "Cannot overwrite" in message or "Cannot declare" in message:
        return "a key or a section stands twice; keep one"
    if re.search(r"=\s*(True|False|None)\b", shown):
        return "TOML writes true and false in lower case, and has no None: leave the key out"
    if re.search(r"=\s*[A-Za-z][\w./:-]*\s*(#.*)?$", shown):
        return "text needs quotes"
    if "end of document" in message:
        return "a bracket, brace or quote is not closed"
    if text.startswith("\ufeff"):
        return "the file begins with a byte order mark; save it as UTF-8 without one"
    return "repair that line; https://toml.io says what TOML is"

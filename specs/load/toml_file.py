"""Read and write TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import date, time
from pathlib import Path, PurePath
from typing import Any

import tomli

from specs.errors import SpecError
from specs.packages import page

_OTHER_FORMATS = {".yaml": "YAML", ".yml": "YAML", ".json": "JSON", ".py": "Python", ".sh": "a script"}
NO_TOML_NUMBER = r"[+-]?(\.\d|\d+\.(?!\d)|0\d+(?![\d:-]))"  # how other languages write 0.5, 1.0 and 1
_HINTS = {  # what a line looks like → what to do
    r"\ufeff": "the file begins with a byte order mark; save it as UTF-8 without one",
    r"\s*\[[^\]]*$": "write a section as [section], on a line of its own",
    r"[^=\[\]]+$": "write key = value, or [section]",
    r"[^=]*=\s*(True|False|None|null|nil|yes|no|on|off)\s*(#.*)?$": (
        "TOML writes true and false in lower case, and has no None: leave the key out"
    ),
    rf"[^=]*=\s*{NO_TOML_NUMBER}": "a number has digits on both sides of its point, and no 0 before others: 0.5, 1.0",
    r"[^=]*=\s*[A-Za-z$./~\u201c\u2018]": 'text needs quotes, "…"',
    r'[^=]*=\s*("[^"]*|' r"'[^']*)$": "the quote is not closed on its line",
    r'.*"[^"]*\\[^"]*"': "a backslash starts an escape; use single quotes for a literal backslash",
}

_OTHERWISE = "repair that line, or close what one above it opens; a key may stand only once in its section"


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
        if other := _OTHER_FORMATS.get(path.suffix.lower()):
            hint = f"`rlctl init SPEC.toml` writes one; {page('coming-from.md')} has the keys of TRL and verl"
            raise SpecError(f"{path}: {other}, and a spec is TOML", hint=hint) from None
        raise _syntax_error(path, text, error) from None
    except RecursionError:
        raise SpecError(f"{path}: not a spec: brackets within brackets, hundreds deep", hint="flatten it") from None


def _syntax_error(path: Path, text: str, error: tomli.TOMLDecodeError) -> SpecError:
    """Name the line, and show it."""
    line, shown = error.lineno, text.split("\n")[error.lineno - 1].rstrip()
    hint = next((hint for form, hint in _HINTS.items() if re.match(form, shown)), "")
    message = f"{path}:{line}:{error.colno}: not TOML: {error.msg}\n  {line} | {shown}"
    return SpecError(message, hint=hint or _OTHERWISE)


def dumped(tables: Mapping[str, Any]) -> str:
    """Return the tables as TOML, a section each."""
    plain = {name: value for name, value in tables.items() if not isinstance(value, Mapping)}
    text = "".join(f"{_key(name)} = {written(value)}\n" for name, value in plain.items())
    for name, table in tables.items():
        if isinstance(table, Mapping):
            text += f"\n[{_key(name)}]\n" + "".join(f"{_key(key)} = {written(one)}\n" for key, one in table.items())
    return text


def written(value: Any) -> str:
    """Return the value as TOML. Raises TypeError for what it cannot hold."""
    if hasattr(value, "tolist"):  # numpy's and torch's numbers and arrays; a float64 is a float too
        value = value.tolist()
    match value:
        case bool():
            return str(value).lower()
        case str() | PurePath():
            return _quoted(str(value))
        case int() | float():
            return repr(value)
        case date() | time():
            return value.isoformat()
        case list() | tuple():
            return f"[{', '.join(map(written, value))}]"
        case Mapping():
            inner = ", ".join(f"{_key(str(name))} = {written(one)}" for name, one in value.items())
            return f"{{ {inner} }}" if inner else "{}"
    raise TypeError(f"{type(value).__name__} is nothing that a spec can hold")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


def _quoted(text: str) -> str:
    """Quote the text: JSON's escapes are among TOML's, but for half of a surrogate pair and U+007F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

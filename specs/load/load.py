"""From a TOML file and `--set` overrides to a `Spec`, or to every problem at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli
from pydantic import ValidationError

from specs.errors import Problem, SpecError
from specs.load.dotted_keys import flattened
from specs.load.explain import explain
from specs.load.kind_change import Dropped
from specs.load.overrides import apply_overrides
from specs.load.repair import repaired
from specs.packages import page
from specs.rules.all_rules import cross_field_problems
from specs.schema.engines.foreign import tuples
from specs.schema.spec import SCHEMA_VERSION, Spec
from specs.text import show

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_OTHER_FORMATS = {".yaml": "YAML", ".yml": "YAML", ".json": "JSON", ".py": "Python", ".sh": "a script"}
_SWALLOWED = re.compile(r"(?<![\x00-\x1f])[\x08\x0c](?=[A-Za-z({\[])")  # of `\boxed` and `\frac` in double quotes


def load_spec(path: Path, overrides: Sequence[str] = (), note: Callable[[str], None] = lambda _: None) -> Spec:
    """Read and check a spec. Raises SpecError holding all problems: syntax; keys, types, bounds; rules across keys.
    `note` is told in a line what of the file does not hold with these overrides.

    Nothing is coerced: "8" is not 8, true is not 1, 1.0 is not a whole number. Files that the spec names are not looked
    at; `rlctl/preflight/file_problems.py` does that.
    """
    return spec_from(read_toml(path), overrides, note)


def spec_from(raw: dict[str, Any], overrides: Sequence[str] = (), note: Callable[[str], None] = lambda _: None) -> Spec:
    """`load_spec` from parsed tables; `raw` may be changed."""
    parsed = parse(raw, overrides)
    for dropped in parsed.dropped:
        note(str(dropped))
    if parsed.problems:
        raise SpecError(parsed.problems)
    assert parsed.spec is not None
    return parsed.spec


@dataclass(frozen=True)
class Parsed:
    """A spec and what is wrong with it. With problems in single keys `spec` is what was left without them
    (`specs/load/repair.py`), fit for nothing but finding more problems; None where too little was left."""

    spec: Spec | None
    problems: list[Problem]
    doubts: Callable[[Problem], bool] = lambda _: False
    dropped: Sequence[Dropped] = ()  # keys of the file that went with the kind that `--set` replaced

    def more(self, found: Sequence[Problem]) -> list[Problem]:
        """New problems in `found` that the repair did not cause."""
        named = {problem.key for problem in self.problems}
        return [problem for problem in found if problem.key not in named and not self.doubts(problem)]


def parse(raw: dict[str, Any], overrides: Sequence[str] = ()) -> Parsed:
    """Tables to a spec, with every problem of keys, types, bounds and rules; `raw` may be changed."""
    problems, dropped = apply_overrides(raw, overrides)
    return replace(_parsed(raw, [*problems, *_swallowed_backslashes(raw)]), dropped=dropped)


def _swallowed_backslashes(raw: dict[str, Any]) -> Iterator[Problem]:
    """Texts in which TOML has read a backslash and a letter, as of `\\boxed`, as a character that nobody writes."""
    for key, value in flattened(raw).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (found := _SWALLOWED.search(text)):
                letter = {"\b": "b", "\f": "f"}[found[0][0]]
                message = f"TOML has read \\{letter} in it as a control character"
                yield Problem(key, message, "write the text in single quotes, or the backslash twice", show(text))


def _parsed(raw: dict[str, Any], problems: list[Problem]) -> Parsed:
    version = raw.get("schema", SCHEMA_VERSION)
    if type(version) is not int or version != SCHEMA_VERSION:
        return Parsed(None, [*problems, _other_schema(version)])
    try:
        # Strict: TOML has types of its own, so nothing needs guessing. TOML arrays are the schema's tuples.
        spec = Spec.model_validate(tuples(raw), strict=True)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        return _parse_the_rest(raw, errors, [*problems, *explain(errors, raw)])
    return Parsed(spec, [*problems, *cross_field_problems(spec)])


def _parse_the_rest(raw: dict[str, Any], errors: list[ErrorDetails], problems: list[Problem]) -> Parsed:
    rest = repaired(raw, errors, problems)
    if rest is None:
        return Parsed(None, problems)
    parsed = Parsed(rest.spec, problems, rest.doubts)
    return replace(parsed, problems=[*problems, *parsed.more(cross_field_problems(rest.spec) if rest.exact else [])])


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
        raise SpecError(_syntax(path, text, str(error)), hint=_syntax_hint(text, str(error))) from None
    except RecursionError:
        raise SpecError(f"{path}: not a spec: brackets within brackets, hundreds deep", hint="flatten it") from None


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
    line, column = _place(message, text)
    lines = text.splitlines()
    shown = lines[line - 1] if line <= len(lines) else ""
    value = shown.partition("=")[2].partition("#")[0].strip()
    if text.startswith("\ufeff"):
        return "the file begins with a byte order mark; save it as UTF-8 without one"
    if "Cannot overwrite" in message or "Cannot declare" in message or "Cannot mutate" in message:
        return "a key or a section is defined twice; keep one"
    if "Unclosed array" in message or "Unclosed inline table" in message:
        return "a bracket or brace above is not closed"
    if "Expected ']'" in message:
        return "write a section as [section], on a line of its own"
    if "Illegal character '\\n'" in message or "Unterminated string" in message:
        return "the quote is not closed on its line"
    if "Unescaped '\\'" in message or "hex" in message:
        return "a backslash starts an escape; use single quotes for a literal backslash"
    if "Expected '='" in message:
        return "write key = value, or [section]"
    if re.fullmatch(r"(True|False|None|null|nil|yes|no|on|off)", value):
        return "TOML writes true and false in lower case, and has no None: leave the key out"
    if re.match(r"[A-Za-z$./~\u201c\u2018][^,]*$", value):
        return 'text needs quotes, "…"'
    if "Expected newline" in message:
        rest = shown[column - 1 :].strip()
        return f"what follows the value is not TOML: {rest}; one key stands on a line, and comments begin with #"
    if "end of document" in message:
        return "a bracket, brace or quote is not closed"
    return "repair that line; https://toml.io says what TOML is"

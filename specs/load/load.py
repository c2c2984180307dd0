"""Read a spec from a TOML file and `--set` overrides, or name every problem."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specs.errors import Problem, SpecError
from specs.load.dotted_keys import flattened, value_at
from specs.load.explain import explain, without_tags
from specs.load.overrides import apply_overrides
from specs.load.toml_file import read_toml
from specs.rules.all_rules import cross_field_problems
from specs.schema.engines.foreign import tuples
from specs.schema.recipes import spec_class
from specs.schema.spec import SCHEMA_VERSION, Spec
from specs.text import show

_SWALLOWED = re.compile(r"(?<![\x00-\x1f])[\x08\x0c](?=[A-Za-z({\[])")  # of `\boxed` and `\frac` in double quotes


def load_spec(path: Path, overrides: Sequence[str] = (), note: Callable[[str], None] = lambda _: None) -> Spec:
    """Read and check a spec. Raises SpecError with every problem: of syntax, else of keys, types and bounds, else of
    rules over several keys. `note` is told in a line what of the file does not hold with these overrides.

    Nothing is coerced: "8" is not 8, true is not 1, 1.0 is not a whole number. Files that the spec names are not looked
    at; `rlctl/preflight/file_problems.py` does that.
    """
    return spec_from(read_toml(path), overrides, note)


def spec_from(raw: dict[str, Any], overrides: Sequence[str] = (), note: Callable[[str], None] = lambda _: None) -> Spec:
    """Do what `load_spec` does with parsed tables; `raw` may be changed."""
    parsed = parse(raw, overrides)
    for dropped in parsed.dropped:
        note(dropped)
    if parsed.problems or parsed.spec is None:
        raise SpecError(parsed.problems)
    return parsed.spec


@dataclass(frozen=True)
class Parsed:
    """A spec and what is wrong with it. Where single keys are wrong, `spec` is what is left without them, fit only for
    looking at the files that it names; None where that is no spec."""

    spec: Spec | None
    problems: list[Problem]
    dropped: Sequence[str] = ()  # keys of the file that went with the kind that `--set` replaced
    broken_tables: frozenset[str] = frozenset()  # dotted; those whose own keys are wrong

    def more(self, found: Sequence[Problem]) -> list[Problem]:
        """Return the new problems in `found`, in tables whose own keys are right."""
        known = {problem.key for problem in self.problems}
        return [one for one in found if one.key not in known and _table(one) not in self.broken_tables]


def _table(problem: Problem) -> str:
    return problem.key.rpartition(".")[0]


def parse(raw: dict[str, Any], overrides: Sequence[str] = ()) -> Parsed:
    """Return the spec of tables, or every problem of keys, types and bounds, or else of rules; `raw` may be changed."""
    problems, dropped = apply_overrides(raw, overrides)
    problems += _swallowed_backslashes(raw)
    version = raw.get("schema", SCHEMA_VERSION)
    if type(version) is not int or version != SCHEMA_VERSION:
        return Parsed(None, [*problems, _other_schema(version)], dropped)
    try:
        spec = _validated(raw)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        rest = _without(raw, [without_tags(one["loc"], raw) for one in errors])
        problems += explain(errors, raw)
        return Parsed(rest, problems, dropped, frozenset(map(_table, problems)))
    return Parsed(spec, [*problems, *cross_field_problems(spec)], dropped)


def _validated(raw: dict[str, Any]) -> Spec:
    """Strict: TOML has types of its own, so nothing needs guessing. TOML's arrays are the schema's tuples."""
    return spec_class(raw).model_validate(tuples(raw), strict=True)


def _without(raw: dict[str, Any], paths: Sequence[Sequence[str | int]]) -> Spec | None:
    """Return the spec without the keys at `paths`; None where it needs one of them."""
    rest = copy.deepcopy(raw)
    for path in paths:
        table = value_at(rest, path[:-1])
        if isinstance(table, dict):
            table.pop(path[-1], None)
    try:
        return _validated(rest)
    except ValidationError:
        return None


def _swallowed_backslashes(raw: dict[str, Any]) -> Iterator[Problem]:
    """Name texts in which TOML has read a backslash and a letter, as of `\\boxed`, as a control character."""
    for key, value in flattened(raw).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (found := _SWALLOWED.search(text)):
                letter = {"\b": "b", "\f": "f"}[found[0][0]]
                message = f"TOML has read \\{letter} in it as a control character"
                yield Problem(key, message, "write the text in single quotes, or the backslash twice", show(text))


def _other_schema(version: Any) -> Problem:
    hint = f"write `schema = {SCHEMA_VERSION}`, and check-config names every key that has changed"
    if type(version) is int and version > SCHEMA_VERSION:
        hint = f"the spec is for a newer rlctl; upgrade, or {hint}"
    return Problem("schema", f"this rlctl reads schema {SCHEMA_VERSION}", hint, show(version))

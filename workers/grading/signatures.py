"""How a reward function is called: each parameter gets what its name says.

`prompt`, `completion` and `row` are the sample's; any other name is a column of the row. Names that mean nothing may
stand for these three in their places: `(p, c, row)`. Functions written for other libraries can often be called too,
with lists or with nothing that means the same: what their parameters are called gives them away.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

# What a parameter of this name gets.
OF_A_SAMPLE = {
    "prompt": "the text that the model saw",
    "completion": "what the model wrote",
    "row": "the whole row of the data",
}
ALL_COLUMNS = "prompt, completion and all other columns"
DEFAULT = "its default"
# Names that only reward functions of a library have among their first four parameters: all of one set.
_LIBRARIES = (
    *(("verl", {name}) for name in ("solution_str", "data_sources", "solution_strs", "data_source")),
    ("OpenRLHF", {"queries"}),
    *(("TRL", {name}) for name in ("prompts", "completions", "completion_ids")),
    ("verifiers", {"answer", "state"}),
)
_PERHAPS_COLUMNS = {"data_source", "answer", "state"}
_PROMPT = {"prompt", "question", "query", "instruction"}
_COMPLETION = {"completion", "response", "generation"}
_ROW = {"row", "sample", "example", "item", "record"}
REFERENCE = {"ground_truth", "label", "gold", "reference", "target", "expected", "gold_answer"}
# What a parameter at each place cannot mean. Second, `answer` may be what the model answered.
_PLACES = (
    ("prompt", {"answer", "solution"} | _COMPLETION | _ROW | REFERENCE),
    ("completion", _PROMPT | _ROW | REFERENCE),
    ("whole row", {"answer", "solution"} | _PROMPT | _COMPLETION | REFERENCE),
)
_VALUES = {
    **dict.fromkeys(_PROMPT, "prompt"),
    **dict.fromkeys(_COMPLETION | {"solution_str"}, "completion"),
    **dict.fromkeys(_ROW | {"extra_info"}, "row"),
    **dict.fromkeys(REFERENCE | {"answer", "solution"}, 'row["answer"]'),
    **dict.fromkeys(("prompts",), "[prompt]"),
    **dict.fromkeys(("completions", "solution_strs"), "[completion]"),
    "queries": "[prompt + completion]",
    **dict.fromkeys(("labels", "ground_truths"), '[row["answer"]]'),
    "extra_infos": "[row]",
    "state": "{}",
}
_COLUMNS_TOLD = 12


class Uncallable(Exception):
    """A function that cannot be given what its parameters ask for; `hint` says how it can."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Parameters:
    """Those of a function. `places`: that have one, in order, the first `unnamed` of them nothing else; `names`: that
    are given by name alone. `more_places` and `rest`: whether there are `*args` and `**kwargs`."""

    places: tuple[str, ...] = ()
    unnamed: int = 0
    names: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    more_places: bool = False
    rest: bool = False

    @staticmethod
    def of(signature: inspect.Signature) -> Parameters:
        found = list(signature.parameters.values())
        places = [one for one in found if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        names = [one for one in found if one.kind is one.KEYWORD_ONLY]
        return Parameters(
            tuple(one.name for one in places),
            sum(one.kind is one.POSITIONAL_ONLY for one in places),
            tuple(one.name for one in names),
            frozenset(one.name for one in (*places, *names) if one.default is one.empty),
            any(one.kind is one.VAR_POSITIONAL for one in found),
            any(one.kind is one.VAR_KEYWORD for one in found),
        )

    @property
    def listed(self) -> tuple[str, ...]:
        return (*self.places, *self.names)

    @property
    def takes_three(self) -> bool:
        """Whether it can be called with three values by place."""
        least = sum(one in self.required for one in self.places)
        by_name = any(one in self.required for one in self.names)
        return least <= 3 and (len(self.places) >= 3 or self.more_places) and not by_name


@dataclass(frozen=True)
class Call:
    """What a function is given: names of OF_A_SAMPLE or of columns. `rest`: all that it does not name, too."""

    by_place: tuple[str, ...]
    by_name: tuple[str, ...] = ()
    rest: bool = False

    def arguments(self, prompt: str, completion: str, row: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        values = {**row, "prompt": prompt, "completion": completion, "row": row}
        named = {name: values[name] for name in self.by_name}
        if self.rest:
            named = {name: value for name, value in values.items() if name not in ("row", *self.by_place)} | named
        return [values[name] for name in self.by_place], named

    def given(self, parameters: Parameters) -> dict[str, str]:
        """Parameter → what it gets, in words."""
        listed = dict(zip(parameters.places, self.by_place, strict=False)) | {name: name for name in self.by_name}
        if not parameters.places and self.by_place:
            listed = {f"*{name}": name for name in self.by_place}
        found = {name: _told(listed[name]) if name in listed else DEFAULT for name in parameters.listed}
        found = found or {name: _told(source) for name, source in listed.items()}
        return {**found, "**": ALL_COLUMNS} if self.rest else found

    @property
    def sees_completion(self) -> bool:
        return self.rest or "completion" in (*self.by_place, *self.by_name)


def _told(source: str) -> str:
    return OF_A_SAMPLE.get(source, f'column "{source}"')


BY_PLACE = Call(("prompt", "completion", "row"))


def bind(name: str, parameters: Parameters, columns: Collection[str] | None) -> Call:
    """How the function is called for rows of these columns; None: they are not known, and any name may be one. Raises
    Uncallable."""
    _refuse_libraries(name, parameters, columns)
    if parameters.places[:1] in (("self",), ("cls",)):
        one = parameters.places[0]
        message = f"{_shown(name, parameters)}: nothing is given as {one}"
        raise Uncallable(message, f"name a bound method: {name} = SomeClass().{name}")
    listed = parameters.listed
    told = [one for one in listed if one in OF_A_SAMPLE or (columns is not None and one in columns)]
    unknown = [one for one in listed if one in parameters.required and one not in told]
    nothing = not (told or unknown or parameters.rest)
    if (unknown or nothing) and parameters.takes_three and _in_place(parameters.places, told):
        if columns is not None:
            _refuse_places(name, parameters.places)
        return BY_PLACE
    if unknown and columns is not None:
        raise Uncallable(*_unknown(name, parameters, unknown, columns))
    if nothing:
        raise Uncallable(f"{name} takes nothing of a sample", f"write def {name}(completion, row)")
    given = {*told, *unknown}
    by_place = []
    for one in parameters.places[: parameters.unnamed]:
        if one not in given:
            break  # it has a default, and so have those behind it
        by_place.append(one)
    by_name = [one for one in listed[parameters.unnamed :] if one in given]
    return Call(tuple(by_place), tuple(by_name), parameters.rest)


def _in_place(places: Sequence[str], told: Collection[str]) -> bool:
    """Whether the names that are known stand where a call by place gives them."""
    return all(one not in told or one == given for one, given in zip(places, BY_PLACE.by_place, strict=False))


def _refuse_libraries(name: str, parameters: Parameters, columns: Collection[str] | None) -> None:
    for library, names in _LIBRARIES:
        may_be_columns = names <= (_PERHAPS_COLUMNS if columns is None else set(columns))
        if names <= set(parameters.places[:4]) and not may_be_columns:
            message = f"{_shown(name, parameters)}, as {library} calls it"
            raise Uncallable(message, _adapted(name, parameters))


def _refuse_places(name: str, places: Sequence[str]) -> None:
    for parameter, (given, others) in zip(places, _PLACES, strict=False):
        if parameter in others:
            raise Uncallable(
                f"{name} takes ({', '.join(places)}): {parameter} would be the {given}",
                f"write def {name}(prompt, completion, row), or name columns of the data",
            )


def _unknown(name: str, parameters: Parameters, unknown: Sequence[str], columns: Collection[str]) -> tuple[str, str]:
    one, shown = unknown[0], _shown(name, parameters)
    listed = ", ".join(list(columns)[:_COLUMNS_TOLD]) + (", …" if len(columns) > _COLUMNS_TOLD else "")
    message = f"{shown}: {one} is not prompt, completion or row, and no column of the data ({listed})"
    value = _VALUES.get(one, "")
    if value in OF_A_SAMPLE:
        return message, f"{OF_A_SAMPLE[value]} is called {value}: rename {one}"
    near = get_close_matches(one, columns, 1)
    if near:
        return message, f"did you mean {near[0]}?"
    return message, f"name a column, read it from row, or give {one} a default"


def _shown(name: str, parameters: Parameters) -> str:
    return f"{name} takes ({', '.join(parameters.listed)})"


def _adapted(name: str, parameters: Parameters) -> str:
    """A wrapper that calls the function with what it expects."""
    required = sum(one in parameters.required for one in parameters.places)
    given = parameters.places[: max(required, 1)]
    many = any(_VALUES.get(parameter, "").startswith("[") for parameter in given)
    values = [_VALUES.get(one, f'[row["{one}"]]' if many else f'row["{one}"]') for one in given]
    if many:
        values = [value if value.startswith(("[", "{")) else f"[{value}]" for value in values]
    call = f"{name}({', '.join(values)}){'[0]' if many else ''}"
    return f"write def score(prompt, completion, row): return {call}, and name score"


class Bound:
    """A function that is called for each sample by the columns of its row."""

    def __init__(self, function: Any, name: str, columns: Collection[str] | None = None) -> None:
        """`columns`: of the rows, where they are known already. Raises Uncallable."""
        self._function, self._name = function, name
        try:
            self._parameters: Parameters | None = Parameters.of(inspect.signature(function))
        except (ValueError, TypeError):  # of C code: it is not known
            self._parameters = None
        self._calls: dict[tuple[str, ...], Call] = {}
        call = BY_PLACE if self._parameters is None else bind(name, self._parameters, columns)
        self.given: Mapping[str, str] = {} if self._parameters is None else call.given(self._parameters)

    def __call__(self, prompt: str, completion: str, row: dict[str, Any]) -> Any:
        columns = tuple(row)
        if columns not in self._calls:
            self._calls[columns] = self._bind(columns)
        places, named = self._calls[columns].arguments(prompt, completion, row)
        return self._function(*places, **named)

    def _bind(self, columns: tuple[str, ...]) -> Call:
        if self._parameters is None:
            return BY_PLACE
        try:
            return bind(self._name, self._parameters, columns)
        except Uncallable as error:
            raise TypeError(f"{error}; {error.hint}") from None

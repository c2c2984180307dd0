"""Call a reward function: each parameter gets what its name says, `prompt`, `completion`, `row` or a column.

Three parameters of other names get these three by place: `(p, c, row)`. A function in the shape of another library is
refused with the line that adapts it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

PLACES = ("prompt", "completion", "row")
# By library: the parameter that tells it, and what all of its parameters are here.
LIBRARIES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "TRL": ("completions", {"prompts": "[prompt]", "completions": "[completion]", "completion_ids": "[[]]"}),
    "verl": (
        "solution_str",
        {"solution_str": "completion", "ground_truth": 'row["answer"]', "extra_info": "row"},
    ),
    "OpenRLHF": ("queries", {"queries": "[prompt + completion]", "prompts": "[prompt]", "labels": '[row["answer"]]'}),
}
_ELSEWHERE = {name for _, values in LIBRARIES.values() for name in values}


class Uncallable(Exception):
    """A function in the shape of another library; `hint` says how it can be called."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class BoundFunction:
    """A reward function, called for a sample by the names of its parameters."""

    def __init__(self, function: Any, name: str) -> None:
        """Raises Uncallable for a function in the shape of another library."""
        self._function, self._name = function, name
        try:
            self._parameters = list(inspect.signature(function).parameters.values())
        except (ValueError, TypeError):  # of C code: called by place
            self._parameters = [inspect.Parameter("values", inspect.Parameter.VAR_POSITIONAL)]
        self._by_name = {
            one.name: one for one in self._parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        }
        self._rest = any(one.kind is one.VAR_KEYWORD for one in self._parameters)
        self._more_places = len(self._parameters) > len(self._by_name) + self._rest
        self._required = [name for name, one in self._by_name.items() if one.default is one.empty]
        for library, (mark, values) in LIBRARIES.items():
            if mark in self._required:
                raise Uncallable(f"{self._shown()}, as {library} calls it", self._adapter(values))

    def __call__(self, prompt: str, completion: str, row: dict[str, Any]) -> Any:
        """Call it. Raises TypeError where the row has no column of a parameter's name."""
        values = {**row, "prompt": prompt, "completion": completion, "row": row}
        missing = [name for name in self._required if name not in values]
        if (missing or not self._by_name) and self._takes_places(values):
            return self._function(prompt, completion, row)
        if missing:
            columns = ", ".join(list(row)[:12])
            message = f"{self._shown()}: {missing[0]} is not prompt, completion or row, and no column of the data"
            raise TypeError(f"{message} ({columns}); rename it, or give it a default")
        unnamed = [one.name for one in self._by_name.values() if one.kind is one.POSITIONAL_ONLY and one.name in values]
        named = {name: values[name] for name in self._by_name if name in values and name not in unnamed}
        if self._rest:
            named = {name: value for name, value in values.items() if name not in ("row", *unnamed)} | named
        return self._function(*(values[name] for name in unnamed), **named)

    def _takes_places(self, values: Mapping[str, Any]) -> bool:
        """Return whether it can be called with prompt, completion and row by place: no name says otherwise."""
        places = [one.name for one in self._by_name.values() if one.kind is not one.KEYWORD_ONLY]
        enough = len(places) >= len(PLACES) or self._more_places
        fit = (name == place or name not in (*values, *_ELSEWHERE) for name, place in zip(places, PLACES, strict=False))
        return enough and set(self._required) <= set(places[: len(PLACES)]) and all(fit)

    def _shown(self) -> str:
        return f"{self._name} takes ({', '.join(self._by_name)})"

    def _adapter(self, values: Mapping[str, str]) -> str:
        """Return the line that calls the function with what it expects."""
        lists = any(value.startswith("[") for value in values.values())
        column = '[row["{}"]]' if lists else 'row["{}"]'
        given = ", ".join(f"{name}={values.get(name, column.format(name))}" for name in self._required)
        call = f"{self._name}({given})" + ("[0]" if lists else "")
        return f"write def score(prompt, completion, row): return {call}, and name score"

"""Call a reward function: each parameter gets what its name says, `prompt`, `completion`, `row` or a column, and of an
episode of several turns `messages` or `episode`.

Three parameters of other names get these three by place: `(p, c, row)`, and so does `(*args)`. A function in the shape
of another library is refused with the line that adapts it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from specs.errors import RewardError

PLACES = ("prompt", "completion", "row")
# By library: the parameter that tells it, and the values of its parameters here.
LIBRARIES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "TRL": ("completions", {"prompts": "[prompt]", "completions": "[completion]", "completion_ids": "[[]]"}),
    "verl": (
        "solution_str",
        {
            "solution_str": "completion",
            "ground_truth": 'row["reward_model"]["ground_truth"]',
            "extra_info": 'row.get("extra_info")',
        },
    ),
    "OpenRLHF": ("queries", {"queries": "[prompt + completion]", "prompts": "[prompt]", "labels": '[row["answer"]]'}),
}
_ELSEWHERE = {name for _, values in LIBRARIES.values() for name in values}


class BoundFunction:
    """A reward function, called for a sample by the names of its parameters."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        """Raises RewardError for a function in the shape of another library."""
        self._function, self._name = function, name
        self._signature = inspect.signature(function)
        parameters = self._signature.parameters.values()
        self._rest = next((each.name for each in parameters if each.kind is each.VAR_KEYWORD), "")
        self._named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        self._bare = [each.kind for each in parameters] == [inspect.Parameter.VAR_POSITIONAL]  # (*args) alone
        self._required = [each.name for each in self._named if each.default is each.empty]
        for library, (mark, values) in LIBRARIES.items():
            if mark in self._required:
                raise RewardError(f"{self._shown()}, as {library} calls it", hint=self._adapter(values))

    def __call__(
        self, prompt: str, completion: str, row: dict[str, Any], episode: Mapping[str, Any] | None = None
    ) -> Any:
        """Call it. `episode`: with its `messages`, of several turns. Raises TypeError where the row has no column of a
        parameter's name."""
        values = {**row, "prompt": prompt, "completion": completion, "row": row}
        if episode is not None:
            values |= {"episode": episode, "messages": episode["messages"]}
        missing = [name for name in self._required if name not in values]
        if self._bare or (missing and self._takes_places(values)):
            return self._function(prompt, completion, row)
        if missing:
            columns = ", ".join(list(row)[:12])
            message = f"{self._shown()}: {missing[0]} is not prompt, completion or row, and no column of the data"
            raise TypeError(f"{message} ({columns}); rename it, or give it a default")
        bound = inspect.BoundArguments(self._signature, {})
        bound.arguments |= {each.name: values.pop(each.name) for each in self._named if each.name in values}
        if self._rest:
            bound.arguments[self._rest] = {name: value for name, value in values.items() if name != "row"}
        return self._function(*bound.args, **bound.kwargs)

    def _takes_places(self, values: Mapping[str, Any]) -> bool:
        """Return whether it can be called with prompt, completion and row by place: no name says otherwise."""
        places = [each.name for each in self._named if each.kind is not each.KEYWORD_ONLY][: len(PLACES)]
        fit = (name == place or name not in (*values, *_ELSEWHERE) for name, place in zip(places, PLACES, strict=False))
        return len(places) == len(PLACES) and set(self._required) <= set(places) and all(fit)

    def _shown(self) -> str:
        return f"{self._name} takes ({', '.join(each.name for each in self._named)})"

    def _adapter(self, values: Mapping[str, str]) -> str:
        """Return the line that calls the function with what it expects."""
        lists = any(value.startswith("[") for value in values.values())
        column = '[row["{}"]]' if lists else 'row["{}"]'
        given = ", ".join(f"{name}={values.get(name, column.format(name))}" for name in self._required)
        call = f"{self._name}({given})" + ("[0]" if lists else "")
        hint = f"write def {self._name}_score(prompt, completion, row): return {call}, and name {self._name}_score"
        if "[completion]" in given:
            hint += '; if it reads messages, with completions=[[{"role": "assistant", "content": completion}]]'
        return hint

"""Reward functions that are called otherwise than rlctl calls them: `score(prompt, completion, row)`.

Functions written for other libraries often take three arguments too, so that they can be called, and then score
nonsense. What their parameters are called gives them away.
"""

from __future__ import annotations

from collections.abc import Sequence

# Names that only reward functions of a library have among their first four parameters: all of one set.
_LIBRARIES = (
    *(("verl", {name}) for name in ("data_source", "solution_str", "data_sources", "solution_strs")),
    ("OpenRLHF", {"queries"}),
    *(("TRL", {name}) for name in ("prompts", "completions", "completion_ids")),
    ("verifiers", {"answer", "state"}),
)
_PROMPT = {"prompt", "question", "query", "instruction"}
_COMPLETION = {"completion", "response", "generation"}
_ROW = {"row", "sample", "example", "item", "record"}
_REFERENCE = {"ground_truth", "label", "gold", "reference", "target", "expected", "gold_answer"}
# What a parameter at each place cannot mean. Second, `answer` may be what the model answered.
_PLACES = (
    ("prompt", {"self", "cls", "answer", "solution"} | _COMPLETION | _ROW | _REFERENCE),
    ("completion", _PROMPT | _ROW | _REFERENCE),
    ("whole row", {"answer", "solution"} | _PROMPT | _COMPLETION | _REFERENCE),
)
_VALUES = {
    **dict.fromkeys(_PROMPT, "prompt"),
    **dict.fromkeys(_COMPLETION | {"solution_str"}, "completion"),
    **dict.fromkeys(_ROW | {"extra_info"}, "row"),
    **dict.fromkeys(_REFERENCE | {"answer", "solution"}, 'row["answer"]'),
    **dict.fromkeys(("prompts",), "[prompt]"),
    **dict.fromkeys(("completions", "solution_strs"), "[completion]"),
    "queries": "[prompt + completion]",
    **dict.fromkeys(("labels", "ground_truths"), '[row["answer"]]'),
    "extra_infos": "[row]",
    "state": "{}",
}


def misread(name: str, parameters: Sequence[str], required: int) -> tuple[str, str] | None:
    """(what is wrong, a hint) of a function whose positional parameters are called so, the first `required` of them
    without a default; None if they can be prompt, completion and row."""
    shown = f"{name} takes ({', '.join(parameters)})"
    for library, names in _LIBRARIES:
        if names <= set(parameters[:4]):
            return f"{shown}, as {library} calls it, not (prompt, completion, row)", _adapted(
                name, parameters, required
            )
    if required > 3 or len(parameters) < 3:
        return None
    for parameter, (given, others) in zip(parameters, _PLACES, strict=False):
        if parameter in ("self", "cls"):
            return f"{shown}: {parameter} would be the {given}", f"name a bound method: {name} = SomeClass().{name}"
        if parameter in others:
            return f"{shown}: {parameter} would be the {given}", _adapted(name, parameters, required)
    return None


def _adapted(name: str, parameters: Sequence[str], required: int) -> str:
    """A wrapper that calls the function with what it expects."""
    given = parameters[: max(required, 1)]
    many = any(_VALUES.get(parameter, "").startswith("[") for parameter in given)
    values = [_VALUES.get(one, f'[row["{one}"]]' if many else f'row["{one}"]') for one in given]
    if many:
        values = [value if value.startswith(("[", "{")) else f"[{value}]" for value in values]
    call = f"{name}({', '.join(values)}){'[0]' if many else ''}"
    return f"write def score(prompt, completion, row): return {call}, and name score"

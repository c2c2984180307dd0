"""Rules of data: keys that do nothing, and templates without a column."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.recipes import RlSpec
from specs.schema.rewards import reads_answer
from specs.schema.sections import is_hub_data
from specs.schema.table import no_effect
from specs.templates import single_braces, template_columns
from specs.text import show


def data_problems(spec: RlSpec) -> Iterator[Problem]:
    data, given = spec.data, spec.data.model_fields_set
    if "split" in given and not is_hub_data(data.train):
        yield no_effect("data.split", f"{show(data.train)} is not a hub data set")
    if data.system and data.chat == "never":
        yield no_effect("data.system", 'data.chat is "never"')
    if "answer_column" in given and not reads_answer(spec.reward.terms):
        yield no_effect("data.answer_column", "no term of reward.terms compares with it")
    if data.template and "prompt_column" in given:
        yield no_effect("data.prompt_column", "data.template makes the prompt")
    if data.template and not template_columns(data.template):
        hint = single_braces(data.template) or "write {column} where a row's value goes"
        yield Problem("data.template", "names no column, so every prompt would be the same", hint)

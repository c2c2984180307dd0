"""Rules of data: keys that do nothing, and templates without a column."""

from __future__ import annotations

from collections.abc import Iterator

from specs.builtin_tasks import GYM_PREFIX, GymSource
from specs.errors import Problem
from specs.schema.recipes import RlSpec
from specs.schema.rewards import reads_answer
from specs.schema.sections import is_hub_data
from specs.schema.table import no_effect
from specs.templates import single_braces, template_columns
from specs.text import show


def data_problems(spec: RlSpec) -> Iterator[Problem]:
    yield from _gym_sources(spec)
    data, given = spec.data, spec.data.model_fields_set
    if "split" in given and not is_hub_data(data.train):
        yield no_effect("data.split", f"{show(data.train)} is not a hub data set")
    if data.system and data.chat == "never":
        yield no_effect("data.system", 'data.chat is "never"')
    if "tools_column" in given and (spec.environments or data.chat == "never"):
        why = "the environments' tools are shown" if spec.environments else 'data.chat is "never"'
        yield no_effect("data.tools_column", why)
    if "answer_column" in given and not reads_answer(spec.reward.terms):
        yield no_effect("data.answer_column", "no term of reward.terms compares with it")
    if data.template and "prompt_column" in given:
        yield no_effect("data.prompt_column", "data.template makes the prompt")
    if data.template and not template_columns(data.template):
        hint = single_braces(data.template) or "write {column} where a row's value goes"
        yield Problem("data.template", "names no column, so every prompt would be the same", hint)


def _gym_sources(spec: RlSpec) -> Iterator[Problem]:
    """Yield sources of reasoning-gym that say no size, and those whose rows are trained on too."""
    sources = {"data.train": spec.data.train, **{f"{one.key}.data": one.data for one in spec.evaluations}}
    found: dict[str, GymSource] = {}
    for key, source in sources.items():
        try:
            found |= {key: GymSource.parse(source)} if source.startswith(GYM_PREFIX) else {}
        except ValueError as error:
            yield Problem(key, str(error), f"write {GYM_PREFIX}NAME?size=2000&seed=7")
    train = found.get("data.train")
    for one in spec.evaluations if train is not None else ():
        held = found.get(f"{one.key}.data")
        if train is not None and held is not None and (rows := train.overlap(held, one.prompts)):
            message = f"{rows} of its {one.prompts} prompts are trained on: row n is made from seed + n"
            yield Problem(f"{one.key}.data", message, f"use seed={train.seed + train.size}, or another above it")

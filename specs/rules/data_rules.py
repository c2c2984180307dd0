"""Rules of data and reward: what of them does nothing, or leaves nothing to learn from."""

from __future__ import annotations

import re
from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.rewards import Function, Overlong, Regex, compares_answer
from specs.schema.sections import is_hub_data
from specs.schema.spec import Spec
from specs.schema.table import no_effect
from specs.templates import template_columns
from specs.text import show


def data_problems(spec: Spec) -> Iterator[Problem]:
    """Keys of `[data]` that do nothing, and templates without a column."""
    data, given = spec.data, spec.data.model_fields_set
    if "split" in given and not is_hub_data(data.train):
        yield no_effect("data.split", data, f"{show(data.train)} is not a hub data set")
    if data.system and data.chat == "never":
        yield no_effect("data.system", data, 'data.chat is "never"')
    functions = any(isinstance(term, Function) for term in spec.reward.terms)  # are tried with a row's own answer
    if "answer_column" in given and not functions and not compares_answer(spec.reward.terms):
        yield no_effect("data.answer_column", data, "no term of reward.terms compares with it")
    if data.template and "prompt_column" in given:
        yield no_effect("data.prompt_column", data, "data.template makes the prompt")
    if data.template and not template_columns(data.template):
        jinja = re.findall(r"\{\{\s*(\w+)\s*\}\}", data.template)
        hint = f"write {{{jinja[0] if jinja else 'column'}}} where a row's value goes"
        yield Problem("data.template", "names no column, so every prompt would be the same", hint, show(data.template))


def reward_section_problems(spec: Spec) -> Iterator[Problem]:
    """Weights, patterns, and keys of a role that the reward has no use for."""
    terms = spec.reward.terms
    if all(term.weight == 0 for term in terms):
        yield Problem("reward.terms", "every weight is 0, so every completion scores 0", "give a term a weight")
    for index, term in enumerate(terms):
        if isinstance(term, Regex):
            key = f"reward.terms.{index}.pattern"
            try:
                re.compile(term.pattern, re.DOTALL)
            except re.error as error:
                yield Problem(
                    key, f"not a regular expression: {error}", "TOML's '…' keeps backslashes", show(term.pattern)
                )
        elif isinstance(term, Overlong) and term.buffer_tokens > spec.data.max_response_tokens:
            most = spec.data.max_response_tokens
            message = f"longer than the longest completion (data.max_response_tokens = {most})"
            yield Problem(
                f"reward.terms.{index}.buffer_tokens", message, f"use at most {most}", str(term.buffer_tokens)
            )
    section = spec.reward
    for key, default, why in (
        ("processes", section.nodes, "the reward role is one process on each node; reward.workers sets how many grade"),
        ("launcher", "python", "the reward role is one process on each node"),
        ("devices", (), "grading runs on the CPU"),
    ):
        if getattr(section, key) != default:
            hint = f"write {show(default)}" if section.nodes > 1 else f"remove the key, or write {show(default)}"
            yield Problem(f"reward.{key}", why, hint, show(getattr(section, key)))
    if section.nodes == 1:
        for key in sorted({"max_restarts", "min_processes"} & section.model_fields_set):
            yield no_effect(f"reward.{key}", section, "with reward.nodes = 1 no process is on another host")


def tracking_problems(spec: Spec) -> Iterator[Problem]:
    kinds = [tracker.kind for tracker in spec.tracking]
    for number, kind in enumerate(kinds):
        if kind in kinds[:number]:
            message = f"tracking.{kinds.index(kind)} is of this kind already"
            yield Problem(f"tracking.{number}.kind", message, "remove one of the two", f'"{kind}"')

"""Rules of recipes that learn from rows: sources, and keys that do nothing."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.objectives import Kto, Mixture, Objective, Preference
from specs.schema.recipes import PreferenceSpec, RowsSpec
from specs.schema.sections import is_hub_data
from specs.schema.table import no_effect
from specs.text import show


def rows_problems(spec: RowsSpec) -> Iterator[Problem]:
    data, given = spec.data, spec.data.model_fields_set
    if not data.train and not data.sets:
        yield Problem("data.train", "missing", "name a file or a hub id, or several in [[data.sets]]")
    elif data.train and data.sets:
        yield no_effect("data.train", "data.sets names the sources")
    if data.train and "split" in given and not is_hub_data(data.train):
        yield no_effect("data.split", f"{show(data.train)} is not a hub data set")
    if data.system and data.chat == "never":
        yield no_effect("data.system", 'data.chat is "never"')
    if len(data.sets) == 1 and "weight" in data.sets[0].model_fields_set:
        yield no_effect("data.sets.0.weight", "there is only one set")
    if spec.eval is not None and "split" in spec.eval.model_fields_set and not is_hub_data(spec.eval.data):
        yield no_effect("eval.split", f"{show(spec.eval.data or data.train)} is not a hub data set")
    if isinstance(spec.objective, Kto) and data.rows_per_step < 2:
        why = "kto estimates the KL with completions of other rows of a step"
        yield Problem("data.rows_per_step", why, "use 2 or more")
    yield from _objective("objective", spec.objective)
    if isinstance(spec, PreferenceSpec) and spec.ref is not None and not spec.needs_ref_role:
        why = spec.why_no_ref if not spec.needs_ref else "the actor itself is the reference"
        yield no_effect("ref", why)


def _objective(key: str, objective: Objective) -> Iterator[Problem]:
    given = objective.model_fields_set
    if isinstance(objective, Mixture):
        for number, term in enumerate(objective.mixture):
            if "precompute_ref" in term.model_fields_set:
                yield no_effect(f"{key}.mixture.{number}.precompute_ref", f"{key}.precompute_ref is that of all terms")
        if all(term.unit == "token" for term in objective.mixture):
            yield Problem(f"{key}.mixture", "has no term that compares completions", "add one, such as dpo")
    if "weight" in given:
        yield no_effect(f"{key}.weight", "it weighs the terms of a mixture")
    if isinstance(objective, Preference) and objective.precompute_ref and not objective.needs_ref:
        yield no_effect(f"{key}.precompute_ref", "the objective compares with no reference")
    if isinstance(objective, Kto) and objective.precompute_ref:
        message = "its KL compares other pairs of prompts and completions in every step"
        yield Problem(f"{key}.precompute_ref", message, "remove the key")

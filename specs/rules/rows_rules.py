"""Rules of recipes that learn from rows: sources, and keys that do nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from specs.errors import Problem
from specs.schema.objectives import Kto, Mixture, Objective, Preference, Unit
from specs.schema.recipes import PreferenceSpec, RowsSpec, TextSpec
from specs.schema.rewards import reads_answer
from specs.schema.rows import RowSet, RowsSection
from specs.schema.sections import is_hub_data, same_source
from specs.schema.table import no_effect
from specs.text import show

# Columns that are not read, by what an objective is a mean of.
UNREAD: Mapping[Unit, tuple[str, ...]] = {
    "token": ("chosen_column", "rejected_column", "label_column"),
    "pair": ("text_column", "messages_column", "completion_column", "label_column"),
    "sequence": ("text_column", "messages_column", "chosen_column", "rejected_column"),
}


def rows_problems(spec: RowsSpec) -> Iterator[Problem]:
    data = spec.data
    if not data.train and not data.sets:
        yield Problem("data.train", "missing", "name a file or a hub id, or several in [[data.sets]]")
    elif data.train and data.sets:
        yield no_effect("data.train", "data.sets names the sources")
    if data.system and data.chat == "never":
        yield no_effect("data.system", 'data.chat is "never"')
    margin = () if "margin_B" in spec.objective.reads else ("margin_column",)
    places: dict[str, RowSet | RowsSection] = {f"data.sets.{number}": one for number, one in enumerate(data.sets)}
    for place, one in {"data": data, **places}.items():
        path = one.path if isinstance(one, RowSet) else one.train
        if path and "split" in one.model_fields_set and not is_hub_data(path):
            yield no_effect(f"{place}.split", f"{show(path)} is not a hub data set")
        for name in sorted(one.model_fields_set.intersection(UNREAD[spec.objective.unit] + margin)):
            yield no_effect(f"{place}.{name}", f"no row of {spec.objective.kind} is read from it")
    if len(data.sets) == 1 and "weight" in data.sets[0].model_fields_set:
        yield no_effect("data.sets.0.weight", "there is only one set")
    if spec.eval is not None and "split" in spec.eval.model_fields_set and not is_hub_data(spec.eval.data):
        source = spec.eval.data or next(iter(data.named.values()))
        held_out = "eval.data is empty, so the rows are those that are held out"
        yield no_effect("eval.split", held_out if is_hub_data(source) else f"{show(source)} is not a hub data set")
    if data.sets and spec.eval is not None and not spec.eval.data:
        first, *others = data.sources
        for number, one in enumerate(others, 1):
            if same_source(one.path, first.path) and (one.split == first.split or not is_hub_data(one.path)):
                why = f"the last {spec.eval.rows} rows of data.sets.0 are held out for [eval], and learned here"
                yield Problem(f"data.sets.{number}.path", why, "name other rows in eval.data", show(one.path))
    if isinstance(spec.objective, Kto):
        batches = [("data.rows_per_step", data.rows_per_step), *([("eval.rows", spec.eval.rows)] if spec.eval else [])]
        why = "kto estimates the KL with completions of other rows of the same batch"
        yield from (Problem(key, why, "use 2 or more", str(rows)) for key, rows in batches if rows < 2)
    yield from _objective("objective", spec.objective)
    if isinstance(spec, PreferenceSpec) and spec.ref is not None and not spec.needs_ref_role:
        why = spec.why_no_ref if not spec.needs_ref else "the actor itself is the reference"
        yield no_effect("ref", why)


_OF_LEARNING = ("temperature", "top_p", "top_k", "warn_logprob_gap", "max_logprob_gap", "max_staleness", "in_flight")


def generate_problems(spec: TextSpec) -> Iterator[Problem]:
    """Yield sections of sampling without `[eval.generate]`, what it lacks, and keys of samples that are learned
    from."""
    generate, given = spec.prompt_sets, spec.model_fields_set
    if generate is None:
        for name in ("reward", "reward_model", "rollout", "sync"):
            if name in given:
                yield no_effect(
                    f"[{name}]", "completions are sampled and graded for [eval.generate], which is not there"
                )
        return
    if spec.reward is None:
        hint = 'add it: [reward] with terms = [{ kind = "exact_match" }] or a function of your own'
        yield Problem("[reward]", "is missing, and grades what [eval.generate] samples", hint)
    elif spec.environment_term is not None:
        hint = 'write terms = [{ kind = "exact_match" }] or a function of your own'
        yield Problem("reward.terms", "no environment grades what [eval.generate] samples", hint)
    for name in _OF_LEARNING:
        if name in spec.rollout.model_fields_set:
            why = "no sample is learned from; how an evaluation samples, eval.generate says"
            yield no_effect(f"rollout.{name}", why)
    if spec.reward is not None and "max_failed_share" in spec.reward.model_fields_set:
        yield no_effect("reward.max_failed_share", "no completion is learned from, which too many failures would end")
    if "answer_column" in generate.model_fields_set and not reads_answer(spec.reward_terms):
        yield no_effect("eval.generate.answer_column", "no term of reward.terms compares with it")
    for one in spec.evaluations:
        given = {*one.given, *generate.model_fields_set}
        if spec.eval is not None and not one.data and "prompts" in given and one.prompts > spec.eval.rows:
            message = f"more than eval.rows = {spec.eval.rows}, whose prompts these are"
            yield Problem(f"{one.key}.prompts", message, f"use at most {spec.eval.rows}, or name {one.key}.data")


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
    if isinstance(objective, Kto) and not objective.desirable_weight and not objective.undesirable_weight:
        yield Problem(f"{key}.desirable_weight", "0, as the other one: nothing would be learned", "raise one of them")
    if isinstance(objective, Kto) and objective.precompute_ref:
        message = "its KL compares other pairs of prompts and completions in every step"
        yield Problem(f"{key}.precompute_ref", message, "remove the key")

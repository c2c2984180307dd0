"""Rules of evaluation: prompts that are trained on, completions that are all the same, and what is to pass."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.eval_sets import EvalSection, EvalSet, Evaluation, PromptSets
from specs.schema.recipes import SamplingSpec
from specs.schema.sections import is_hub_data
from specs.schema.table import no_effect
from specs.text import show

_OF_ONE_SET = ("name", "data", "split")  # the other keys hold for sets that leave them out


def eval_problems(spec: SamplingSpec) -> Iterator[Problem]:
    """Yield what of the sets of prompts does nothing, or measures nothing."""
    if spec.prompt_sets is not None and spec.prompt_sets.sets:
        yield from _sets(spec.prompt_sets)
    for one in spec.evaluations:
        yield from _source(one)
        yield from _sampling(one)
        yield from _pass(one, spec)


def _sets(section: PromptSets) -> Iterator[Problem]:
    key = section.key
    for name in EvalSet.model_fields:
        of_each = name in _OF_ONE_SET or all(name in one.model_fields_set for one in section.sets)
        if of_each and name in section.model_fields_set:
            yield no_effect(f"{key}.{name}", f"{key}.sets says it of each set")
    names = [one.name for one in section.sets]
    held_out = [number for number, one in enumerate(section.sets) if not one.data]
    for number, name in enumerate(names):
        if name in names[:number]:
            message = f"{key}.sets.{names.index(name)} has this name already"
            yield Problem(f"{key}.sets.{number}.name", message, "give each set a name of its own")
        if number in held_out[1:] and isinstance(section, EvalSection):
            message = f"rows of data.train are held out for eval.sets.{held_out[0]} already"
            yield Problem(f"{key}.sets.{number}.data", message, "name a source, or remove one of the two")


def _source(one: Evaluation) -> Iterator[Problem]:
    if "split" in one.given and not is_hub_data(one.data):
        held_out = f"{one.key}.data is empty, so the rows are those that are held out"
        yield no_effect(f"{one.key}.split", f"{show(one.data)} is not a hub data set" if one.data else held_out)


def _sampling(one: Evaluation) -> Iterator[Problem]:
    """Yield keys that greedy completions have no use for. What a set leaves out, `[eval]` gives."""
    if one.temperature > 0:
        return
    if one.samples_per_prompt > 1:
        message = "completions are greedy (temperature = 0): those of one prompt are all the same"
        hint, value = f"set {one.key}.temperature above 0, such as 0.6", str(one.samples_per_prompt)
        yield Problem(f"{one.key}.samples_per_prompt", message, hint, value)
    if one.top_p < 1:
        why = "has no effect: completions are greedy (temperature = 0)"
        yield Problem(f"{one.key}.top_p", why, "remove the key", str(one.top_p))


def _pass(one: Evaluation, spec: SamplingSpec) -> Iterator[Problem]:
    """Yield a term that does not exist, or whose right score is not known."""
    terms, key = spec.reward_terms, f"{one.key}.pass_term"
    if one.pass_term is None:
        return
    if one.pass_term >= len(terms):
        known = ", ".join(f"{number}: {term.kind}" for number, term in enumerate(terms))
        message = f"reward.terms has {len(terms)}, counted from 0 ({known})"
        yield Problem(key, message, f"use at most {len(terms) - 1}", str(one.pass_term))
    elif one.passes(terms) is None:
        message = f"it is not known what the kind {terms[one.pass_term].kind} gives a right completion"
        yield Problem(key, message, f"say it: {one.key}.pass_score = 1.0", str(one.pass_term))

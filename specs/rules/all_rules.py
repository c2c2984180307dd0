"""Rules that span several keys: arithmetic that cannot work out, and keys that have no effect under what was chosen.

A key counts as *set* when the spec writes it, whatever the value. A rule names the key; its value is looked up here.
Rules about files are in `rlctl/preflight/file_problems.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specs.errors import Problem
from specs.rules.algorithm_rules import algorithm_problems, algorithm_warnings
from specs.rules.attention_rules import shadowed_attention
from specs.rules.data_rules import data_problems
from specs.rules.environment_rules import environment_problems
from specs.rules.evaluation_rules import eval_problems
from specs.rules.learning_rules import learning_problems, learning_warnings
from specs.rules.node_rules import node_problems
from specs.rules.reward_rules import reward_problems
from specs.rules.role_rules import role_problems
from specs.rules.rows_rules import generate_problems, rows_problems
from specs.rules.run_rules import run_problems
from specs.rules.transport_rules import transport_problems
from specs.schema.recipes import RlSpec, RowsSpec, SamplingSpec, TextSpec
from specs.schema.spec import Spec
from specs.text import show

Rule = Callable[[Any], Iterator[Problem]]

# Rules, each with the recipes that it is about; those of `SamplingSpec` where something is sampled.
RULES: tuple[tuple[type[Spec], Rule], ...] = (
    (Spec, learning_problems),
    (RlSpec, data_problems),
    (RlSpec, environment_problems),
    (RowsSpec, rows_problems),
    (TextSpec, generate_problems),
    (SamplingSpec, reward_problems),
    (RlSpec, algorithm_problems),
    (Spec, role_problems),
    (Spec, run_problems),
    (Spec, node_problems),
    (SamplingSpec, transport_problems),
    (Spec, shadowed_attention),
    (SamplingSpec, eval_problems),
)
# What runs, and certainly does not do what the spec says.
WARNINGS: tuple[tuple[type[Spec], Rule], ...] = ((Spec, learning_warnings), (RlSpec, algorithm_warnings))


def cross_field_problems(spec: Spec) -> list[Problem]:
    """Return everything that is wrong although each key alone is fine."""
    return with_values(spec, _found(spec, RULES))


def cross_field_warnings(spec: Spec) -> list[Problem]:
    """Return what will run, with a key or a role that does nothing."""
    return with_values(spec, _found(spec, WARNINGS))


def _found(spec: Spec, rules: Sequence[tuple[type[Spec], Rule]]) -> Iterator[Problem]:
    for recipe, rule in rules:
        if isinstance(spec, recipe) and (spec.generates or recipe is not SamplingSpec):
            yield from rule(spec)


def with_values(spec: Spec, problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems, those without a value with the one that the spec has at their key."""
    return [one if one.value else replace(one, value=_shown(spec, one.key)) for one in problems]


def _shown(spec: Spec, key: str) -> str:
    node: Any = spec
    for part in key.split("."):
        if isinstance(node, tuple):
            node = node[int(part)] if part.isdecimal() and int(part) < len(node) else None
        else:
            node = node.get(part) if isinstance(node, Mapping) else getattr(node, part, None)
    plain = all(isinstance(one, bool | int | float | str) for one in (node if isinstance(node, tuple) else (node,)))
    return show(node) if plain else ""

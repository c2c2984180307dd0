"""Rules that span several keys: arithmetic that cannot work out, and keys that have no effect under what was chosen.

A key counts as *set* when the spec writes it, whatever the value. Rules about files are in
`rlctl/preflight/file_problems.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from specs.errors import Problem
from specs.rules.algorithm_rules import algorithm_problems, algorithm_warnings
from specs.rules.attention_rules import attention_problems, shadowed_attention
from specs.rules.data_rules import data_problems, reward_section_problems, tracking_problems
from specs.rules.deadline_rules import deadline_problems
from specs.rules.engine_rules import engine_problems
from specs.rules.evaluation_rules import eval_problems
from specs.rules.judge_rules import judge_problems
from specs.rules.kernel_rules import kernel_problems
from specs.rules.learning_rules import learning_problems, learning_warnings
from specs.rules.node_rules import node_problems
from specs.rules.reward_model_rules import reward_model_problems
from specs.rules.role_rules import role_problems
from specs.rules.sequence_rules import sharing_problems
from specs.rules.staleness_rules import run_ahead_problems
from specs.rules.transport_rules import transport_problems
from specs.schema.spec import Spec

Rule = Callable[[Spec], Iterator[Problem]]

RULES: tuple[Rule, ...] = (
    learning_problems,
    sharing_problems,
    data_problems,
    reward_section_problems,
    judge_problems,
    reward_model_problems,
    algorithm_problems,
    role_problems,
    deadline_problems,
    node_problems,
    engine_problems,
    run_ahead_problems,
    transport_problems,
    attention_problems,
    shadowed_attention,
    kernel_problems,
    eval_problems,
    tracking_problems,
)
# What runs, and certainly does not do what the spec says.
WARNINGS: tuple[Rule, ...] = (learning_warnings, algorithm_warnings)


def cross_field_problems(spec: Spec) -> list[Problem]:
    """Return everything that is wrong although each key alone is fine."""
    return [problem for rule in RULES for problem in rule(spec)]


def cross_field_warnings(spec: Spec) -> list[Problem]:
    """Return what will run, with a key or a role that does nothing."""
    return [problem for rule in WARNINGS for problem in rule(spec)]

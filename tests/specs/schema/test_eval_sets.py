"""`[eval]`: one set or several, and what passes."""

from __future__ import annotations

from typing import Any

import pytest

from specs.schema.eval_sets import EvalSection, PassThreshold
from specs.schema.rewards import ExactMatch, Function, MathVerify, Overlong, RewardTerm

MATCH, OWN = ExactMatch(kind="exact_match", partial=True), Function(kind="function", path="a.py:score")
LONG, MATH = Overlong(kind="overlong", buffer_tokens=4), MathVerify(kind="math_verify", weight=0.5)


def test_what_a_set_leaves_out_the_section_has() -> None:
    (one,) = EvalSection(every=5, data="a.jsonl", prompts=7).evaluations
    assert (one.key, one.name, one.data, one.prompts, one.samples) == ("eval", "heldout", "a.jsonl", 7, 7)
    sets = [{"name": "a"}, {"name": "b", "data": "b.jsonl", "temperature": 0.0, "samples_per_prompt": 1}]
    section = EvalSection.model_validate({"every": 5, "temperature": 0.6, "samples_per_prompt": 8, "sets": sets})
    found = [(each.key, each.temperature, each.samples) for each in section.evaluations]
    assert found == [("eval.sets.0", 0.6, 512), ("eval.sets.1", 0.0, 64)]


@pytest.mark.parametrize(
    ("keys", "terms", "wanted"),
    [
        ({}, [MATCH], PassThreshold(0, 1.0)),
        ({}, [LONG, MATH], PassThreshold(1, 1.0)),  # the term's own value, before its weight
        ({}, [OWN], None),
        ({}, [MATCH, MATH], None),
        ({"pass_term": 1}, [OWN, MATH], PassThreshold(1, 1.0)),
        ({"pass_score": 0.5}, [MATCH, OWN], PassThreshold(None, 0.5)),
        ({"pass_score": 0.5}, [MATH], PassThreshold(None, 0.5)),
        ({"pass_term": 0, "pass_score": 2}, [OWN, MATH], PassThreshold(0, 2.0)),
    ],
)
def test_what_passes(keys: dict[str, Any], terms: list[RewardTerm], wanted: PassThreshold | None) -> None:
    (one,) = EvalSection.model_validate({"every": 1, **keys}).evaluations
    assert one.passes(terms) == wanted

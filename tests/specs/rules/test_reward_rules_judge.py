"""What a judge's request may say, as far as a spec alone tells."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import pytest
from small_spec import only_problem, raw_spec

from specs.load.load import spec_from
from specs.schema.rewards import Judge
from workers.grading.judge_score import request_body
from workers.grading.terms import GradeRequest


def spec(body: dict[str, Any]) -> dict[str, Any]:
    term = {"kind": "judge", "base_url": "https://host/v1", "model": "m", "prompt": "{completion}", "body": body}
    raw: dict[str, Any] = raw_spec(reward={"terms": [{**term, "min_score": 0, "max_score": 1}]})
    return raw


def test_lists_and_tables_reach_the_judge_as_they_are_written() -> None:
    said = {"stop": ["\n"], "response_format": {"type": "json_object"}, "top_p": 0.5, "logprobs": False}
    term = spec_from(spec(said)).reward_terms[0]
    assert isinstance(term, Judge)
    sent = json.loads(request_body(term.model_dump(), GradeRequest(0, "", {}, "x", 1), ""))
    assert {name: sent[name] for name in said} == said


@pytest.mark.parametrize("value", [float("nan"), [float("inf")], {"a": date(2024, 1, 1)}])
def test_what_json_does_not_hold_is_refused(value: Any) -> None:
    assert only_problem(spec({"seed": value})).key == "reward.terms.0.body.seed"


@pytest.mark.parametrize("pattern", ["(a{99999999999999999999})", "(" * 5000 + ")" * 5000])
def test_a_pattern_beyond_what_python_compiles_is_a_problem(pattern: str) -> None:
    raw = spec({})
    raw["reward"]["terms"][0]["score_pattern"] = pattern
    assert only_problem(raw).key == "reward.terms.0.score_pattern"

"""Sources and the reward of reasoning-gym, as far as a spec alone tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_spec import only_problem, problems_of, raw_spec

from specs.builtin_tasks import GymSource, gym_entry, gym_entry_as_json
from specs.load.load import spec_from
from specs.schema.sections import is_hub_data
from specs.wire.role_config import DataConfig

GYM = {"kind": "reasoning_gym"}


def spec(train: str, evaluated: str = "") -> dict[str, Any]:
    held = {"eval": {"every": 5, "data": evaluated, "prompts": 20}} if evaluated else {}
    raw: dict[str, Any] = raw_spec(data={"train": train}, reward={"terms": [GYM]}, **held)
    return raw


def test_options_are_json_or_text() -> None:
    source = GymSource.parse('reasoning-gym:sums?seed=7&share=0.5&deep=false&ops=["+","-"]&style=a=b')
    assert source == GymSource("sums", 10_000, 7, {"share": 0.5, "deep": False, "ops": ["+", "-"], "style": "a=b"})
    assert GymSource.parse("reasoning-gym:sums") == GymSource("sums", 10_000, 0, {})
    assert not is_hub_data("reasoning-gym:sums?size=3")


@pytest.mark.parametrize("bad", ["size=0", "size=many", "seed=-1"])
def test_a_size_or_seed_that_is_none_is_refused(bad: str) -> None:
    problem = only_problem(spec(f"reasoning-gym:sums?{bad}"))
    assert problem.key == "data.train"
    assert f"its {bad.partition('=')[0]} is" in problem.message


@pytest.mark.parametrize(
    ("train", "evaluated", "shared"),
    [
        ("sums?size=100", "sums?seed=90", 10),
        ("sums?size=100&seed=5", "sums?size=7", 2),
        ("sums?size=100", "sums?seed=100", 0),
        ("sums?size=100", "sums?terms=3", 0),
    ],
)
def test_no_prompt_is_both_trained_on_and_evaluated(train: str, evaluated: str, shared: int) -> None:
    problems = problems_of(spec(f"reasoning-gym:{train}", f"reasoning-gym:{evaluated}"))
    assert [problem.key for problem in problems] == ["eval.data"] * bool(shared)
    assert all(problem.message.startswith(f"{shared} of its 20 prompts are trained on") for problem in problems)


def test_the_reward_needs_rows_of_reasoning_gym() -> None:
    (problem,) = problems_of(spec("rows.jsonl"))
    assert (problem.key, problem.value) == ("reward.terms.0", 'kind = "reasoning_gym"')
    assert 'data.train is "rows.jsonl"' in problem.message
    (problem,) = problems_of(spec("reasoning-gym:sums", "rows.jsonl"))
    assert 'eval.data is "rows.jsonl"' in problem.message
    assert problems_of(raw_spec(data={"train": "reasoning-gym:sums"})) == [], "other terms may grade its rows"
    assert problems_of(spec("reasoning-gym:sums")) == []
    config = DataConfig.of(spec_from(spec("reasoning-gym:sums")), "tokenizer", Path())
    assert config.needs_columns == ("reasoning_gym",)
    assert config.row_columns == ("answer", "reasoning_gym"), "it travels to the grading processes"


def test_completions_of_a_model_that_learns_from_other_rows_may_be_graded() -> None:
    raw: dict[str, Any] = {
        "schema": 1,
        "run": {"recipe": "sft", "name": "x", "steps": 2},
        "model": {"path": "builtin:tiny-bytes"},
        "data": {"train": "rows.jsonl", "rows_per_step": 4, "max_tokens": 32},
        "reward": {"terms": [GYM]},
        "eval": {"every": 1, "generate": {"max_response_tokens": 4, "data": "reasoning-gym:sums"}},
    }
    assert problems_of(raw) == []
    del raw["eval"]["generate"]["data"]
    assert "data.train" in only_problem(raw).message


def test_an_entry_comes_back_as_it_was() -> None:
    entry = {"a": (1, [2, (3.5, None)]), "b": {1: "x", (1, 2): True}, "c": {"1": []}, "d": ()}
    back = gym_entry(json.loads(json.dumps(gym_entry_as_json(entry))))
    assert back == entry
    assert repr(back) == repr(entry)

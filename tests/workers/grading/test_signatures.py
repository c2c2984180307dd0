"""Reward functions of other libraries are refused, and the line of the hint makes them score."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from workers.grading.signatures import misread

ROW = {"answer": "4", "data_source": "sums"}


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float((data_source, solution_str, ground_truth) == ("sums", "it is 4", "4"))


def openrlhf(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    return [
        float(query == prompt + "it is " + label) for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]


def trl(completions: list[str], answer: list[str], **others: Any) -> list[float]:
    return [float(one.endswith(other)) for one, other in zip(completions, answer, strict=True)]


def verifiers(prompt: str, completion: str, answer: str, state: dict[str, Any]) -> float:
    return float(prompt == "2+2?" and completion.endswith(answer) and not state)


def swapped(completion: str, answer: str, prompt: str) -> float:
    return float(prompt == "2+2?" and completion.endswith(answer))


@pytest.mark.parametrize("function", [verl, openrlhf, trl, verifiers, swapped])
def test_the_hint_is_a_function_that_scores(function: Callable[..., Any]) -> None:
    places = [one for one in inspect.signature(function).parameters.values() if one.kind != one.VAR_KEYWORD]
    found = misread(function.__name__, [one.name for one in places], sum(one.default is one.empty for one in places))
    assert found is not None
    line = re.search(r"def score\(prompt, completion, row\): return .*(?=, and name score)", found[1])
    assert line is not None, found[1]
    names: dict[str, Any] = {function.__name__: function}
    exec(line[0], names)
    assert names["score"]("2+2?", "it is 4", ROW) == 1.0


@pytest.mark.parametrize(
    "parameters",
    ["prompt completion row", "question answer sample", "a b c", "p c r strict", "prompt completion row extra_info"],
)
def test_functions_of_our_own_are_not(parameters: str) -> None:
    assert misread("score", parameters.split(), 3) is None

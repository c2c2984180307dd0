"""What each parameter of a reward function gets, by its name; functions of other libraries are refused with a line that
makes them score."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

from specs.errors import RewardError
from workers.grading.signatures import BoundFunction

ROW = {"question": "2+2?", "answer": "4", "prompt": "raw", "level": 3}
SAMPLE = ("<user>2+2?", "it is 4", ROW)


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float((data_source, solution_str, ground_truth) == ("sums", "it is 4", "4"))


def openrlhf(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    return [
        float(query == prompt + "it is " + label) for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]


def trl(completions: list[str], answer: list[str], **others: Any) -> list[float]:
    return [float(one.endswith(other)) for one, other in zip(completions, answer, strict=True)]


@pytest.mark.parametrize("function", [verl, openrlhf, trl])
def test_the_hint_is_a_function_that_scores(function: Callable[..., Any]) -> None:
    with pytest.raises(RewardError, match=r"as .* calls it") as error:
        BoundFunction(function, function.__name__)
    line = r"(def (\w+)\(prompt, completion, row\): return .*?), and name (\w+)"
    own, defined, name = re.findall(line, error.value.hint)[0]
    assert defined == name == f"{function.__name__}_score", "several of them stand in one file"
    names: dict[str, Any] = {function.__name__: function}
    exec(own, names)
    row = {"answer": "4", "data_source": "sums", "reward_model": {"ground_truth": "4"}}
    assert names[name]("2+2?", "it is 4", row) == 1.0


def returned(*parameters: str) -> Callable[..., Any]:
    """Make a function of these parameters that returns what they were given."""
    names = [one.split("=")[0].strip("*") for one in parameters if one not in "/*"]
    scope: dict[str, Any] = {}
    exec(f"def score({', '.join(parameters)}): return [{', '.join(names)}]", scope)
    return scope["score"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("parameters", "given"),
    [
        ("prompt completion row", [*SAMPLE]),
        ("answer completion", ["4", "it is 4"]),
        ("completion * answer", ["it is 4", "4"]),
        ("completion strict=True / answer=1", ["it is 4", True, "4"]),
        ("p c r", [*SAMPLE]),
        ("x y z other=5", [*SAMPLE, 5]),
        ("*args", [SAMPLE]),
        ("completion **others", ["it is 4", {**ROW, "prompt": "<user>2+2?"}]),
        ("**others", [{**ROW, "prompt": "<user>2+2?", "completion": "it is 4"}]),
    ],
)
def test_a_parameter_gets_what_its_name_says(parameters: str, given: list[Any]) -> None:
    assert BoundFunction(returned(*parameters.split()), "score")(*SAMPLE) == given


@pytest.mark.parametrize(
    ("parameters", "unknown"),
    [
        ("prompt response answer", "response"),
        ("prompt completion ground_truth", "ground_truth"),
        ("a b c d", "a"),
        ("completion * other", "other"),
    ],
)
def test_a_parameter_without_a_meaning_is_named(parameters: str, unknown: str) -> None:
    words = (
        f"{unknown} is not prompt, completion or row, and no column of the data \\(question, answer, prompt, level\\)"
    )
    with pytest.raises(TypeError, match=words):
        BoundFunction(returned(*parameters.split()), "score")(*SAMPLE)


def test_methods_and_partial_functions_are_called_too() -> None:
    class Scorer:
        def score(self, completion: str, answer: str) -> float:
            return float(answer in completion)

    assert BoundFunction(Scorer().score, "score")(*SAMPLE) == 1.0
    partial = functools.partial(returned("completion", "tolerance"), tolerance=2)
    assert BoundFunction(partial, "score")(*SAMPLE) == ["it is 4", 2]

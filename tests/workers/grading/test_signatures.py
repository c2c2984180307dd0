"""What each parameter of a reward function gets, by its name; and functions of other libraries, which are refused with
a line that makes them score."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from workers.grading.signatures import Bound, Uncallable

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


def verifiers(prompt: str, completion: str, answer: str, state: dict[str, Any]) -> float:
    return float(prompt == "2+2?" and completion.endswith(answer) and not state)


@pytest.mark.parametrize("function", [verl, openrlhf, trl, verifiers])
@pytest.mark.parametrize("columns", [("answer",), None])
def test_the_hint_is_a_function_that_scores(function: Callable[..., Any], columns: Sequence[str] | None) -> None:
    if function is verifiers and columns is None:
        pytest.skip("its names may be columns")
    with pytest.raises(Uncallable, match=r"as .* calls it") as error:
        Bound(function, function.__name__, columns)
    line = re.search(r"def score\(prompt, completion, row\): return .*(?=, and name score)", error.value.hint)
    assert line is not None, error.value.hint
    names: dict[str, Any] = {function.__name__: function}
    exec(line[0], names)
    assert names["score"]("2+2?", "it is 4", {"answer": "4", "data_source": "sums"}) == 1.0


def test_a_name_that_is_a_column_is_no_librarys() -> None:
    def grade(completion: str, answer: str, state: str) -> tuple[str, ...]:
        return completion, answer, state

    assert Bound(grade, "grade")("", "it is 4", {"answer": "4", "state": "Ohio"}) == ("it is 4", "4", "Ohio")


def returned(*parameters: str) -> Callable[..., Any]:
    """A function of these parameters that returns what they were given."""
    names = [one.split("=")[0].strip("*") for one in parameters if one not in "/*"]
    scope: dict[str, Any] = {}
    exec(f"def score({', '.join(parameters)}): return [{', '.join(names)}]", scope)
    return scope["score"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("parameters", "given"),
    [
        ("prompt completion row", [*SAMPLE]),
        ("completion answer", ["it is 4", "4"]),
        ("answer completion", ["4", "it is 4"]),
        ("row completion prompt", [ROW, "it is 4", "<user>2+2?"]),
        ("question answer", ["2+2?", "4"]),
        ("completion * answer", ["it is 4", "4"]),
        ("completion answer /", ["it is 4", "4"]),
        ("completion answer level=0 strict=True", ["it is 4", "4", 3, True]),
        ("completion strict=True / answer=1", ["it is 4", True, "4"]),
        ("p c r", [*SAMPLE]),
        ("p c row", [*SAMPLE]),
        ("_ completion row", [*SAMPLE]),
        ("prompt response sample", [*SAMPLE]),
        ("x y z other=5", [*SAMPLE, 5]),
        ("query response sample", [*SAMPLE]),
        ("*sample", [SAMPLE]),
        ("completion **others", ["it is 4", {**ROW, "prompt": "<user>2+2?"}]),
        ("**others", [{**ROW, "prompt": "<user>2+2?", "completion": "it is 4"}]),
    ],
)
def test_a_parameter_gets_what_its_name_says(parameters: str, given: list[Any]) -> None:
    function = returned(*parameters.split())
    assert Bound(function, "score", tuple(ROW))(*SAMPLE) == given
    assert Bound(function, "score")(*SAMPLE) == given, "columns that are known at the first sample alone"


@pytest.mark.parametrize(
    ("parameters", "said", "hint"),
    [
        ("prompt response answer", "response is not prompt, completion or row, and no column", "called completion"),
        ("completion gold", "gold is not prompt, completion or row, and no column of the data (question, ", "column"),
        ("completion anwser", "anwser is not", "did you mean answer?"),
        ("completion sample", "sample is not", "the whole row of the data is called row: rename sample"),
        ("self completion row", "nothing is given as self", "score = SomeClass().score"),
        ("prompt completion gold", "gold would be the whole row", "or name columns"),
        ("a b c d", "a is not", "a default"),
        ("a", "a is not", "a default"),
        ("completion * other", "other is not", "a default"),
        ("response gold question1", "response would be the prompt", "def score(prompt, completion, row)"),
        ("", "takes nothing of a sample", "def score(completion, row)"),
        ("strict=True", "takes nothing of a sample", "def score(completion, row)"),
    ],
)
def test_a_parameter_without_a_meaning_is_named(parameters: str, said: str, hint: str) -> None:
    with pytest.raises(Uncallable) as error:
        Bound(returned(*parameters.split()), "score", tuple(ROW))
    assert said in str(error.value)
    assert hint in error.value.hint


def test_rows_that_lack_the_column_say_so() -> None:
    bound = Bound(returned("completion", "answer"), "score", tuple(ROW))
    with pytest.raises(TypeError, match=r"answer is not prompt, completion or row, and no column of the data \(text\)"):
        bound("", "it is 4", {"text": "4"})


def test_methods_and_partial_functions_are_called_by_name_too() -> None:
    class Scorer:
        def score(self, completion: str, answer: str) -> float:
            return float(answer in completion)

    assert Bound(Scorer().score, "score")(*SAMPLE) == 1.0
    assert Bound(functools.partial(returned("completion", "tolerance"), tolerance=2), "score")(*SAMPLE) == [
        "it is 4",
        2,
    ]
    assert Bound(max, "max").given == {}, "of C: not known, and called by place"


def test_what_is_given_is_told() -> None:
    assert Bound(returned("completion", "answer", "strict=1", "**others"), "score", tuple(ROW)).given == {
        "completion": "what the model wrote",
        "answer": 'column "answer"',
        "strict": "its default",
        "**": "prompt, completion and all other columns",
    }
    given = Bound(returned("p", "c", "r"), "score", tuple(ROW)).given
    assert given == {"p": "the text that the model saw", "c": "what the model wrote", "r": "the whole row of the data"}

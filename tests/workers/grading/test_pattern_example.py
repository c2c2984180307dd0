"""Texts that patterns are found in."""

from __future__ import annotations

import re

import pytest

from workers.grading.pattern_example import example


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"<answer>(.*?)</answer>", "<answer>42</answer>"),
        (r"^<think>(.*?)</think>\s*<answer>(.*?)</answer>$", "<think>a</think> <answer>42</answer>"),
        (r"\\boxed\{([^}]*)\}", "\\boxed{42}"),
        (r"####\s*(-?[\d,\.]+)", "#### 42"),
        (r"(?i)final answer:\s*([A-D])", "final answer: A"),
        (r"<(\w+)>(.*?)</\1>", "<a>42</a>"),
        (r"(?:one|two) (?P<x>\d{2})", "one 42"),
        (r"^\d+$", "7"),
        (r"[^a-z](x*)", "742"),
    ],
)
def test_an_example_holds_the_answer_where_a_group_takes_it(pattern: str, text: str) -> None:
    made = example(pattern, "42")
    assert made is not None
    assert re.search(pattern, made, re.DOTALL)
    assert made == text or pattern.startswith("[^")


@pytest.mark.parametrize("pattern", ["(", r"(?<=x)y", r".{5000}", r"a(?!a)a*b\Bc"])
def test_where_none_is_made_it_says_so(pattern: str) -> None:
    made = example(pattern, "42")
    assert made is None or re.search(pattern, made, re.DOTALL)

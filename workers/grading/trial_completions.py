"""Completions such as a policy writes: right ones in the forms that are in use, and wrong ones."""

from __future__ import annotations

_RIGHT = (
    "The answer is {}.",
    "So it is.\n\\boxed{{{}}}",
    "So it is.\n#### {}",
    "<think>\nSo it is.\n</think>\n<answer>{}</answer>",
    "<think>\nSo it is.\n</think>\n\n<answer>\n\\boxed{{{}}}\n</answer>",
    "Answer: {}",
    "```python\n{}\n```",
    '{{"answer": "{}"}}',
)
_WRONG = (
    "I am not sure.",
    "The question is hard, and I would have to think about it for a long time before I could say anything. " * 3,
    "First 12, then 3.5 and 1/2: that makes 40 %.",
    "<think> \\boxed{ ### < [ ( é 漢 \n",
    "la la la la la la la la",
)


def likely_completions(answer: str | None) -> list[tuple[str, bool]]:
    """(completion, whether it is right) of a row with this answer, besides the answer itself and nothing at all. One
    comes twice."""
    right = [] if answer is None else [(form.format(answer), True) for form in _RIGHT]
    return [*right, *((text, False) for text in (*_WRONG, _WRONG[0]))]

"""Check what a row of a data set cannot hold, before a run and while one reads its data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

GSM8K_MARK = "####"  # of a text, only what follows the last one is the answer


def not_a_value(value: Any) -> str:
    """How a number that is none is called, as JSON writes it; "" of any other value."""
    if not isinstance(value, float) or math.isfinite(value):
        return ""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def gold_answer(value: Any) -> str:
    """A row's answer as text; of `working ... #### 72` (GSM8K) only what follows the last `####`."""
    return str(value).rpartition(GSM8K_MARK)[2].strip()


def blank_answer(value: Any) -> str:
    """Return what is wrong with an answer that is no text at all: silence would be right. Else ""."""
    if gold_answer(value):
        return ""
    after = f" after {GSM8K_MARK}" if GSM8K_MARK in str(value) else ""
    return f"is empty{after}, so that an empty completion would be right"


_ASSISTANTS = ("assistant", "gpt", "model", "bot", "ai", "chatbot")


def ends_with_answer(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation ends with a message of the assistant, by any name: the one that the model is to write."""
    return messages[-1].get("role") in _ASSISTANTS

"""Write the request for one completion, and read the score in the judge's reply.

All that models and rows say is put into the request as JSON text: none of it can end the message or add another.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from specs.schema.row_values import gold_answer
from specs.templates import render_template
from workers.grading.judge_cache import Reply
from workers.grading.judge_client import JudgeError
from workers.grading.terms import GradeRequest

_FENCE = re.compile(r"\A```(?:json)?\s*(.*?)\s*```\Z", re.DOTALL)
_SHOWN = 200


def request_body(table: Mapping[str, Any], sample: GradeRequest, answer_column: str) -> bytes:
    """Return what is sent for a sample. Raises KeyError naming a column that its row lacks."""
    answer = {"answer": gold_answer(sample.row[answer_column])} if answer_column in sample.row else {}
    values = {**sample.row, **answer, "prompt": sample.prompt, "completion": sample.completion}
    system = [{"role": "system", "content": table["system"]}] if table["system"] else []
    messages = [*system, {"role": "user", "content": render_template(table["prompt"], values)}]
    return json.dumps({**table["body"], "model": table["model"], "messages": messages}).encode()


def read_reply(content: bytes) -> Reply:
    """Return the judge's text, "" where it holds none, and its tokens. Raises JudgeError of anything else: another try
    may bring a reply."""
    try:
        body = json.loads(content)
        choice = body["choices"][0]
        text, cut_off = choice["message"]["content"], choice.get("finish_reason") == "length"
        usage = body.get("usage") or {}
        read, written = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        said = content[:_SHOWN].decode("utf-8", "replace")
        raise JudgeError("judge_errors", f"the reply is not a chat completion: {said}", again=True) from None
    return Reply(text if isinstance(text, str) else "", read, written, cut_off)


def _count(value: Any) -> int:
    """Return tokens as the server counts them; 0 of what is no such number."""
    return value if type(value) is int and 0 <= value < 2**40 else 0


def read_score(table: Mapping[str, Any], reply: Reply) -> float:
    """Return the score in the judge's text. Raises JudgeError where there is none within the bounds, and where it may
    be half of one."""
    score = longer = _score(table, reply.text)
    if reply.cut_off:
        with suppress(JudgeError):  # one more digit makes no score of it
            longer = _score(table, f"{reply.text}0")
    if score != longer:
        raise _unreadable(f"{score:g} is cut off at the request's limit of tokens", reply.text)
    return score


def _score(table: Mapping[str, Any], text: str) -> float:
    if not text.strip():
        raise JudgeError("judge_replies", "the reply holds no text", again=False)
    found = _found(table, text)
    try:
        score = float(found)
    except (ValueError, TypeError, OverflowError):
        raise _unreadable(f"{found!r} is not a number", text) from None
    if not math.isfinite(score) or not table["min_score"] <= score <= table["max_score"]:
        raise _unreadable(f"{score:g} is not from {table['min_score']:g} to {table['max_score']:g}", text)
    return score


def _found(table: Mapping[str, Any], text: str) -> str | int | float:
    if table["score_pattern"]:
        matches = [match[1] for match in re.finditer(table["score_pattern"], text, re.DOTALL) if match[1] is not None]
        if not matches:
            raise _unreadable("score_pattern is not found", text)
        return str(matches[-1])
    if table["score_key"]:
        return _value(text, table["score_key"])
    return text.strip()


def _value(text: str, key: str) -> str | int | float:
    """Return the value in the JSON object that the text is, perhaps between the marks of a code block."""
    fenced = _FENCE.match(text.strip())
    try:
        value = json.loads(fenced[1] if fenced else text)[key]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise _unreadable(f"not a JSON object with {key!r}", text) from None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _unreadable(f"{key!r} is not a number", text)
    return value


def _unreadable(why: str, text: str) -> JudgeError:
    return JudgeError("judge_replies", f"no score in the judge's reply: {why}; it said {text[-_SHOWN:]!r}", again=False)

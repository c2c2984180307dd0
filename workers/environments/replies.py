"""Read what users' environments return and raise, and say to the model what is wrong with a call."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any

from workers.grading.child import ERROR_CHARACTERS, as_number, describe, one_line

TEXT_CHARACTERS = 1 << 20  # of a reply; more would not fit into any episode
# What may stand in a schema besides `properties`, and let more names in than these.
_OPEN = {"additionalProperties", "patternProperties", "anyOf", "oneOf", "allOf", "$ref"}
_OURS = str(Path(__file__).parent)


class Lost(Exception):
    """The episode cannot continue."""


def wrong_arguments(name: str, parameters: Mapping[str, Any], arguments: Any) -> str:
    """Return what the model should know about arguments that do not fit; empty if they do."""
    if not isinstance(arguments, dict):
        return f"{name}: the arguments are not a JSON object"
    known = parameters["properties"]
    missing = [each for each in parameters.get("required", ()) if each not in arguments]
    is_open = any(parameters.get(each) for each in _OPEN)
    unknown = [each for each in arguments if each not in known and not is_open]
    if not missing and not unknown:
        return ""
    wrong = [f"{word} {', '.join(names)}" for word, names in (("missing", missing), ("unknown", unknown)) if names]
    return f"{name}: {' and '.join(wrong)}; its arguments are {', '.join(known) or 'none'}"


def has_reward(value: Any) -> bool:
    """Return whether a tool gave `(text, reward)`: a number, or an array or a tensor that is one; no truth value."""
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[0], str):
        return False
    number = value[1].item() if getattr(value[1], "ndim", None) == 0 else value[1]
    return isinstance(number, Real | Decimal) and not isinstance(number, bool)


def as_reward(what: str, value: Any) -> float | None:
    """Return a reward, None if there is none. Raises Lost where it is no finite number."""
    number = None if value is None else as_number(value)
    if number is None and value is not None:
        raise Lost(f"{what} gave {describe(value)}")
    return number


def first(value: Any) -> Any:
    """Return the observation of `(observation, info)`."""
    return value[0] if isinstance(value, tuple) and len(value) == 2 else value


def step_outcome(value: Any) -> tuple[Any, float | None, bool, bool]:
    """Return content, reward, done and truncated of what `step` gave: text, the tuples of gymnasium (five values, four
    in old versions) or the dict of SkyRL-Gym. Raises Lost for others of them and bad rewards."""
    reward: Any = None
    done: Any = False
    truncated: Any = False
    table = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    if "observations" in table:
        value, reward, done = table["observations"], table.get("reward"), table.get("done")
    elif "reward" in table or "done" in table:
        raise Lost(f"step returned {', '.join(map(str, table))}, not observations, reward, done")
    elif isinstance(value, tuple) and len(value) == 5:
        value, reward, done, truncated, _ = value
    elif isinstance(value, tuple) and len(value) == 4:
        value, reward, done, _ = value
    elif isinstance(value, tuple):
        raise Lost(f"step returned {len(value)} values, not (observation, reward, terminated, truncated, info)")
    return as_content(value) or "", as_reward("step", reward), bool(done), bool(truncated)


def as_content(value: Any) -> Any:
    """Return None as it is, a list of messages with texts as their contents, anything else as text."""
    if isinstance(value, list) and all(map(_is_message, value)):
        return [{**message, "content": _said(message.get("content"))} for message in value]
    return value if value is None else as_text(value)


def _said(content: Any) -> str:
    """Return a message's content as text: null, or parts of text, as OpenAI's form has them, become what they say."""
    if isinstance(content, list) and all(isinstance(one, Mapping) and one.get("type") == "text" for one in content):
        return "".join(as_text(one.get("text", "")) for one in content)
    return "" if content is None else as_text(content)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value and ("content" in value or value["role"] == "assistant")


def as_text(value: Any) -> str:
    """Return text as it is, and JSON of anything else; what cannot be JSON, such as a table whose keys are no text, as
    Python shows it."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError):
        text = str(value)
    if len(text) > TEXT_CHARACTERS:
        text = f"{text[:TEXT_CHARACTERS]}… (the first {TEXT_CHARACTERS} of {len(text)} characters)"
    return text


def _plain(value: Any) -> Any:
    """Return the numbers of an array, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def in_one_line(error: BaseException) -> str:
    """Return an exception in one line; the log has its traceback, from the user's code on."""
    if isinstance(error, Lost):
        return " ".join(str(error).split())[:ERROR_CHARACTERS]
    with suppress(BaseException):  # user code: an exception's own __str__
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
    return one_line(error)

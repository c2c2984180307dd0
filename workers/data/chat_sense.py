"""What a chat template does with messages, told by rendering some: what it writes around an answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ANSWER, ASKED = "zq7", "zq8"  # an assistant's answer and a question that no template writes itself
MARKUP = re.compile(r"<[^<>\s]{1,40}>|\[/?\w{1,20}\]")
_SPEAKS = re.compile(r"assistant|model|bot\b|response|answer", re.IGNORECASE)

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str | None]  # None where the template refuses the messages


def around_answer(render: Render) -> tuple[str, str]:
    """What is written behind an assistant's answer, and before the first message; empty where it is refused."""
    said = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWER}]
    whole = render([*said, {"role": "user", "content": "2"}])
    if whole is None:
        return "", ""
    before, _, after = whole.partition(ANSWER)
    return after, before.partition(ASKED)[0]


def unwritten_header(render: Render) -> str:
    """What says who speaks before an answer, where it is left to the model to write it; else ""."""
    user = {"role": "user", "content": ASKED}
    prompt, whole = render([user]), render([user, {"role": "assistant", "content": ANSWER}, user])
    if prompt is None or whole is None:
        return ""
    before = whole.partition(ANSWER)[0]
    header = before.removeprefix(prompt)
    return header if header != before and _SPEAKS.search(header) else ""


def longest_word(content: Any) -> str:
    """The longest word of a message, which a template keeps whatever it does with spaces and quotes."""
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    words = [word for text in texts if isinstance(text, str) for word in re.findall(r"\w+", text)]
    return max(words, key=len, default="").casefold()

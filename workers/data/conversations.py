"""Conversations as text, and which of it is learned: found message by message, and held against the whole template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from specs.schema.rows import LearnFrom
from specs.text import show
from workers.chat.chat_renderer import ChatRenderer, ChatTemplateError
from workers.data.row_source import BadRow

Message = Mapping[str, Any]
ASSISTANT = "assistant"
_WRITTEN = ("system", "developer", "user", ASSISTANT)  # what a tool returns may be anything that a template writes


@dataclass(frozen=True)
class LearnedText:
    """A conversation as its template writes it, and the spans of characters that are learned."""

    text: str
    spans: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class TurnEnds:
    """The special tokens of a model as text. `stops`: those that end what it writes."""

    specials: tuple[str, ...]
    stops: tuple[str, ...] = ()

    def first_of(self, text: str) -> str:
        """Return the stop that a text begins with, or nothing."""
        return next((stop for stop in self.stops if text.startswith(stop)), "")


def checked_messages(value: Any, column: str) -> list[Message]:
    """Return a column's messages. Raises BadRow where it holds none."""
    if not isinstance(value, list) or not value:
        raise BadRow(f"column {column!r} must be a list of messages with role and content")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow(f"column {column!r}, message {number}: no message with role and content")
        if message.get("content") is None and not message.get("tool_calls"):
            raise BadRow(f"column {column!r}, message {number}: no content and no tool calls")
        if message["role"] in _WRITTEN and not _is_text(message.get("content")):
            raise BadRow(f"column {column!r}, message {number}: content is neither text nor a list of parts of text")
        if not isinstance(message.get("train"), bool | None):
            raise BadRow(f"column {column!r}, message {number}: train must be true or false")
        if message.get("weight") not in (None, 0, 1):
            raise BadRow(f"column {column!r}, message {number}: weight must be 0 or 1")
    if all(message.get("weight") is None for message in value):
        return value
    return [  # OpenAI's: an answer of weight 0 does not learn
        {key: one for key, one in message.items() if key != "weight"}
        | {"train": message["role"] == ASSISTANT and message.get("weight") != 0}
        for message in value
    ]


def _is_text(content: Any) -> bool:
    if content is None or isinstance(content, str):
        return True
    parts = content if isinstance(content, list) else [content]
    return all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    )


def tools_of(values: Mapping[str, Any], column: str) -> list[Any] | None:
    """Return the tools of a row: a list, or one as JSON, which is how tables of columns hold it."""
    value = values.get(column)
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise BadRow(f"column {column!r} is no JSON: {error}") from None
    if value is not None and not (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
        raise BadRow(f"column {column!r} must be a list of tools, each a JSON schema")
    return value


def chosen_messages(messages: Sequence[Message], learn_from: LearnFrom, first: int = 0) -> list[int]:
    """Return the numbers of the messages that are learned, of those from `first` on. Raises BadRow where none is."""
    numbers = range(first, len(messages))
    if learn_from == "flagged":
        found = [number for number in numbers if messages[number].get("train") is True]
        lacks = "no message has train = true"
    else:
        found = [number for number in numbers if messages[number]["role"] == ASSISTANT]
        lacks = "no message of the assistant, so nothing to learn"
    found = found[-1:] if learn_from == "last_assistant" else found
    if not found:
        raise BadRow(lacks)
    for number in found:
        if not any(value for key, value in messages[number].items() if key not in ("role", "train")):
            raise BadRow(f"message {number}: it is empty, and is to be learned")
    return found


def no_template(why: str, chat: str) -> BadRow:
    """Return the error of a row that no template can write. `chat`: the key of the spec."""
    if chat == "never":
        return BadRow(f'{why}, and data.chat = "never"', "remove data.chat")
    remedy = "use an instruct model, or put a chat_template.jinja into the model's folder"
    return BadRow(f"{why}, and the tokenizer has no chat template", remedy)


def plain(message: Message) -> Message:
    """Return a message as a template is given it."""
    return {key: value for key, value in message.items() if key != "train"}


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except ChatTemplateError as error:
        raise BadRow(str(error)) from error


def rendered(chats: ChatRenderer, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
    """Return messages as the template writes them, up to where an answer begins. Raises BadRow where it refuses."""
    with _refusals():
        return chats.render(messages, tools=tools)


def learned_text(
    messages: Sequence[Message],
    learned: Sequence[int] | None,
    chats: ChatRenderer,
    ends: TurnEnds,
    tools: Sequence[Any] | None = None,
) -> LearnedText:
    """Return the conversation as text, with the spans of the messages numbered in `learned`; None: all is learned.

    An answer begins where the template, asked for one, stops before it; another message where the conversation before
    it ends. Each ends where the conversation up to it does, but for blanks behind the token that ends the turn, and
    with the token of who speaks next where that ends an answer. Raises BadRow where the template writes a message
    otherwise once others follow, or begins it otherwise than it asks for it: which tokens are the message cannot be
    told then.
    """
    said = [plain(message) for message in messages]
    cuts = [(len(said), False)]
    for number in filter(None, learned or ()):
        cuts += [(number, said[number]["role"] == ASSISTANT), (number + 1, False)]
    texts = chats.beginnings(said, cuts, tools=tools)
    with _refusals():
        whole = next(texts)
    spans = [(0, len(whole))] if learned is None else []
    for number in learned or ():
        if not number:
            raise BadRow("message 0: nothing comes before it, so that what the template puts there would be learned")
        with _refusals():
            before, until = next(texts), next(texts)
        if not whole.startswith(until) and until.endswith(ends.specials):  # of a whole conversation, as Phi's
            until = next(until.removesuffix(end) for end in ends.specials if until.endswith(end))
        if not whole.startswith(until):
            raise BadRow(
                f"message {number}: the chat template writes the conversation up to it otherwise once more messages "
                'follow, so that which tokens learn cannot be proven; data.learn_from = "last_assistant" may do'
            )
        if not until.startswith(before):
            raise BadRow(
                f"message {number}: the chat template begins it otherwise than it asks the model for it "
                f"({show(before[-40:])}), so that which tokens learn cannot be proven"
            )
        text, end = until[len(before) :].rstrip(), len(until)
        if not text:
            raise BadRow(f"message {number}: the chat template writes nothing for it")
        if text.endswith(ends.specials):
            end = len(before) + len(text)
        elif said[number]["role"] == ASSISTANT:
            stop = ends.first_of(whole[end:] or _behind_answer(chats))
            whole = whole if whole[end:] else whole + stop
            end += len(stop)
        spans.append((len(before), end))
    with _refusals():
        chats.check_written(said, tools=tools, learned=learned or ())
    return LearnedText(whole, spans)


@lru_cache(4)
def _behind_answer(chats: ChatRenderer) -> str:
    """Return what the template writes behind an answer that the user replies to; nothing, where it takes no reply."""
    asked, answer = {"role": "user", "content": "Hi"}, "An-answer-to-that"
    with suppress(ChatTemplateError):
        text = chats.render([asked, {"role": ASSISTANT, "content": answer}, asked], begins_answer=False)
        return text.rpartition(answer)[2]
    return ""


def mask_of(offsets: Sequence[tuple[int, int]], learned: LearnedText) -> list[int]:
    """Return 1 for each token within a learned span. Raises BadRow where a token lies across the end of one."""
    mask, spans = [], iter([*learned.spans, (len(learned.text) + 1, len(learned.text) + 1)])
    start, end = next(spans)
    for begin, stop in offsets:
        while begin >= end and start <= len(learned.text):
            start, end = next(spans)
        inside = begin >= start and stop <= end
        if not inside and stop > start and begin < end and stop > begin:
            around = learned.text[max(0, begin - 12) : stop + 12]
            raise BadRow(f"a token lies across the end of what is learned: {learned.text[begin:stop]!r} in {around!r}")
        mask.append(int(inside))
    return mask

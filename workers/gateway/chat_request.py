"""Hold what a client asks for and what it gets, the same for all wires; tell when two conversations are equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from specs.json_file import depth_of, object_of
from workers.chat.chat_turns import split_thought
from workers.chat.tool_calls import MAX_DEPTH, ToolCall

Message = dict[str, Any]
_SCHEMA_DEPTH = 4 * MAX_DEPTH


class RefusedRequest(Exception):
    """A request that cannot be answered; the text is for whoever wrote the client. `status`: HTTP's, by which clients
    know whose fault it is."""

    status = 400


class FailedRequest(RefusedRequest):
    """A request that could have been answered, had the sampler not failed."""

    status = 500


@dataclass(frozen=True)
class ChatRequest:
    """Hold a request. `messages` and `tools` are as chat templates take them. `prompt`: text to be continued, of the
    wire that has no messages. `max_tokens`: 0 without. `seed`: the client's, which only tells requests apart.
    `stream`, `usage`: how to reply. `headers`: the client's."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt: str | None = None
    max_tokens: int = 0
    seed: str = ""
    stream: bool = False
    usage: bool = False
    model: str = ""
    wire: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatReply:
    """Hold what the model wrote, read. `id` is the same however often the reply is sent. `ended`: nothing was drawn,
    for the episode is over."""

    id: str
    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: Literal["stop", "length"] = "stop"
    prompt_tokens: int = 0
    reused_tokens: int = 0
    completion_tokens: int = 0
    ended: str = ""

    @property
    def message(self) -> Message:
        """Return the message that a client sends back as history."""
        calls = {"tool_calls": [call.message() for call in self.calls]} if self.calls else {}
        return {"role": "assistant", "content": self.content, "reasoning_content": self.reasoning, **calls}


def merged(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages as chat templates take them: one of the system, at the beginning. What the system says later is
    the user's: few templates have a place for it. Raises RefusedRequest."""
    systems = next((n for n, one in enumerate(messages) if one["role"] != "system"), len(messages))
    text = "\n\n".join(one["content"] for one in messages[:systems] if one["content"])
    rest = [{**one, "role": "user"} if one["role"] == "system" else one for one in messages[systems:]]
    if not rest:
        raise RefusedRequest("there is no message for the model to answer")
    if rest[-1]["role"] == "assistant":
        raise RefusedRequest(
            "the last message is the assistant's: answers that begin with given text are not supported"
        )
    return (*([{"role": "system", "content": text}] if text else []), *rest)


def text_of(content: Any, where: str = "content") -> str:
    """Return the text of a content: a string, null, or parts of text. Raises RefusedRequest for pictures and such."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RefusedRequest(f"{where} is neither text nor a list of parts")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else table_of(part, where).get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise RefusedRequest(f"{where} has a part of type {part.get('type')}: the model reads text only")
        texts.append(text)
    return "".join(texts)


def table_of(value: Any, where: str) -> Mapping[str, Any]:
    """Return a JSON object. Raises RefusedRequest for anything else."""
    if not isinstance(value, dict):
        raise RefusedRequest(f"{where} is no JSON object")
    return value


def list_of(value: Any, where: str) -> Sequence[Any]:
    """Return a list, an empty one for null. Raises RefusedRequest for anything else."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RefusedRequest(f"{where} is no list")
    return value


def name_of(value: Any, where: str) -> str:
    """Return a text. Raises RefusedRequest for anything else."""
    if not isinstance(value, str):
        raise RefusedRequest(f"{where} is no text")
    return value


def tokens_of(value: Any, where: str) -> int:
    """Return a limit of tokens, 0 for null. Raises RefusedRequest."""
    if value is None:
        return 0
    if type(value) is not int or value < 1:
        raise RefusedRequest(f"{where} is no number of tokens")
    return value


def function_tool(name: Any, description: Any, parameters: Any) -> Mapping[str, Any]:
    """Return a tool as chat templates take it. Raises RefusedRequest."""
    if depth_of(parameters) > _SCHEMA_DEPTH:
        raise RefusedRequest("a tool's parameters are nested too deeply")
    schema = table_of(parameters or {"type": "object", "properties": {}}, "a tool's parameters")
    table_of(schema.get("properties") or {}, "what a tool's parameters have as properties")
    function = {
        "name": name_of(name, "a tool's name"),
        "description": name_of(description or "", "a tool's description"),
        "parameters": schema,
    }
    return {"type": "function", "function": function}


def call_message(name: Any, arguments: Any, id_: Any) -> dict[str, Any]:
    """Return a call as chat templates take it. `arguments`: as an object, or its JSON. Text that is none stays text."""
    if isinstance(arguments, str):
        parsed = object_of(arguments or "{}")
        arguments = {"": arguments} if parsed is None else parsed
    if depth_of(table_of(arguments, "a call's arguments")) > MAX_DEPTH:
        raise RefusedRequest("a call's arguments are nested too deeply")
    function = {"name": name_of(name, "a call's name"), "arguments": arguments}
    return {"type": "function", "id": name_of(id_ or "", "a call's id"), "function": function}


# ── equality ──────────────────────────────────────────────────────────────────────────────────────


def retry_key(request: ChatRequest, found: Sequence[bytes]) -> tuple[bytes, int, str]:
    """Return what a request has in common with its retries. `found`: its digests."""
    return found[-1], request.max_tokens, request.seed


def thoughts(request: ChatRequest) -> tuple[str, ...]:
    """Return what a client says that the model thought, message by message: as such, or in what it said."""
    said = (one if one["role"] == "assistant" else {"content": ""} for one in request.messages)
    return tuple((one.get("reasoning_content") or split_thought(one["content"])[0]).strip() for one in said)


def digests(request: ChatRequest) -> list[bytes]:
    """Return a digest of the tools, and of the conversation up to each message. Equal digests mean equal conversations:
    arguments are compared as JSON, ids of calls by their places; what the model thought is not compared, nor blanks
    around what it said."""
    found = [_digest(b"", [_canonical(tool) for tool in request.tools])]
    if request.prompt is not None:
        return [*found, _digest(found[0], request.prompt)]
    for canonical in _conversation(request.messages):
        found.append(_digest(found[-1], canonical))
    return found


def extended(digest: bytes, reply: ChatReply) -> bytes:
    """Return the digest of a conversation continued by a reply."""
    return _digest(digest, next(_conversation([reply.message])))


def _conversation(messages: Sequence[Message]) -> Iterator[Any]:
    place_of: dict[str, int] = {}
    for message in messages:
        calls = message.get("tool_calls", ())
        place_of |= {call["id"]: place for place, call in enumerate(calls)}
        id_ = message.get("tool_call_id", "")
        called = [[call["function"]["name"], _canonical(call["function"]["arguments"])] for call in calls]
        content = message["content"] if message["role"] != "assistant" else split_thought(message["content"])[1].strip()
        yield [message["role"], content, called, place_of.get(id_, id_)]


def _canonical(value: Any) -> Any:
    """Return JSON without nulls, in which whole numbers are whole."""
    if isinstance(value, Mapping):
        return {key: _canonical(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_canonical(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False).encode(errors="surrogatepass")
    return hashlib.blake2b(before + text, digest_size=16).digest()

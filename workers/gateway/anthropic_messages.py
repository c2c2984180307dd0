"""Anthropic's messages: `POST /v1/messages`, and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from workers.gateway.chat_request import (
    ChatReply,
    ChatRequest,
    Message,
    RefusedRequest,
    call_message,
    function_tool,
    list_of,
    merged,
    name_of,
    table_of,
    text_of,
    tokens_of,
)
from workers.gateway.wire import Wire, data_event

_BILLING = "x-anthropic-billing-header"  # a line of the system's text that changes from request to request
_SIGNATURE = "rlctl"  # of a thought: clients send it back


class AnthropicMessages(Wire):
    """The form in which contents are blocks: of text, of thought, calls and what they gave."""

    name = "messages"

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        system, messages = body.get("system"), list_of(body.get("messages"), "messages")
        before = [{"role": "system", "content": _system(system)}] if system else []
        tools = (table_of(tool, "a tool") for tool in list_of(body.get("tools"), "tools"))
        return ChatRequest(
            messages=merged([*before, *(message for one in messages for message in _messages(one))]),
            tools=tuple(
                function_tool(tool.get("name"), tool.get("description"), tool["input_schema"])
                for tool in tools
                if "input_schema" in tool  # others are run by the provider
            ),
            max_tokens=tokens_of(body.get("max_tokens"), "max_tokens"),
        )

    def write(self, reply: ChatReply, request: ChatRequest) -> dict[str, Any]:
        head = _head(reply.id, request)
        return {**head, "content": _blocks(reply), "stop_reason": _stop(reply), "usage": _usage(reply)}

    def begin(self, id_: str, request: ChatRequest) -> bytes:
        return _event("message_start", message=_head(id_, request))

    def keep_alive(self, id_: str, request: ChatRequest) -> bytes:
        return _event("ping")

    def events(self, reply: ChatReply, request: ChatRequest) -> Iterator[bytes]:
        for place, block in enumerate(_blocks(reply)):
            empty, deltas = _deltas(block)
            yield _event("content_block_start", index=place, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=place, delta=delta)
            yield _event("content_block_stop", index=place)
        delta = {"stop_reason": _stop(reply), "stop_sequence": None}
        yield _event("message_delta", delta=delta, usage=_usage(reply))
        yield _event("message_stop")

    def error(self, status: int, message: str) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def error_event(self, message: str) -> bytes:
        return data_event(self.error(500, message), "error")


def _system(value: Any) -> str:
    if isinstance(value, list):
        value = [part for part in value if not str(table_of(part, "system").get("text", "")).startswith(_BILLING)]
    return text_of(value, "system")


def _messages(value: Any) -> Iterator[Message]:
    """Yield what a message holds: what calls gave becomes messages of their own."""
    given = table_of(value, "a message")
    role, content = name_of(given.get("role"), "a message's role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise RefusedRequest(f"a message has the role {role}, which is unknown here")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list_of(content, "content")
    texts, thoughts, calls = list[Any](), list[str](), list[Any]()
    for block in (table_of(one, "content") for one in blocks):
        match block.get("type"):
            case "tool_result":
                id_ = str(block.get("tool_use_id", ""))
                yield {"role": "tool", "content": text_of(block.get("content"), "a tool's result"), "tool_call_id": id_}
            case "tool_use":
                calls.append(call_message(block.get("name"), block.get("input", {}), block.get("id")))
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass
            case _:
                texts.append(block)
    if role == "assistant" or texts or not blocks:
        message = {"role": role, "content": text_of(texts)}
        message |= {"reasoning_content": "".join(thoughts)} if any(thoughts) else {}
        yield message | ({"tool_calls": calls} if calls else {})


def _blocks(reply: ChatReply) -> list[dict[str, Any]]:
    thought = {"type": "thinking", "thinking": reply.reasoning, "signature": _SIGNATURE}
    calls = [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in reply.calls]
    texts = [{"type": "text", "text": reply.content}] if reply.content or not calls else []
    return [*([thought] if reply.reasoning else []), *texts, *calls]


def _deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as it begins, and what is added to it."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            thought = {"type": "thinking_delta", "thinking": block["thinking"]}
            signature = {"type": "signature_delta", "signature": block["signature"]}
            return {**block, "thinking": "", "signature": ""}, [thought, signature]
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _stop(reply: ChatReply) -> str:
    return "tool_use" if reply.calls else {"stop": "end_turn", "length": "max_tokens"}[reply.finish]


def _usage(reply: ChatReply) -> dict[str, int]:
    return {
        "input_tokens": reply.prompt_tokens - reply.reused_tokens,
        "cache_read_input_tokens": reply.reused_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": reply.completion_tokens,
    }


def _head(id_: str, request: ChatRequest) -> dict[str, Any]:
    return {
        "id": f"msg_{id_}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def _event(name: str, **body: Any) -> bytes:
    return data_event({"type": name, **body}, name)

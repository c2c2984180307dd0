"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import json
import time
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


class OpenAIChat(Wire):
    """The form of most clients. Thoughts travel as `reasoning_content`."""

    name = "chat"

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        if body.get("n") not in (None, 1):
            raise RefusedRequest("n > 1 is not supported: ask once for each answer, one after another")
        if body.get("functions"):
            raise RefusedRequest("functions are not supported: send them as tools")
        options = body.get("stream_options") or {}
        limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        return ChatRequest(
            messages=merged([_message(one) for one in list_of(body.get("messages"), "messages")]),
            tools=tuple(filter(None, map(_tool, list_of(body.get("tools"), "tools")))),
            max_tokens=tokens_of(body.get(limit), limit),
            usage=bool(table_of(options, "stream_options").get("include_usage")),
        )

    def write(self, reply: ChatReply, request: ChatRequest) -> dict[str, Any]:
        calls = {"tool_calls": _calls(reply)} if reply.calls else {}
        thought = {"reasoning_content": reply.reasoning} if reply.reasoning else {}
        content = reply.content or (None if reply.calls else "")
        message = {"role": "assistant", "content": content, "refusal": None, **thought, **calls}
        choice = {"index": 0, "message": message, "finish_reason": _finish(reply), "logprobs": None}
        return {**_head(reply.id, request, "chat.completion"), "choices": [choice], "usage": _usage(reply)}

    def begin(self, id_: str, request: ChatRequest) -> bytes:
        return _chunk(id_, request, {"role": "assistant", "content": ""})

    def events(self, reply: ChatReply, request: ChatRequest) -> Iterator[bytes]:
        if reply.reasoning:
            yield _chunk(reply.id, request, {"reasoning_content": reply.reasoning})
        if reply.content:
            yield _chunk(reply.id, request, {"content": reply.content})
        for place, call in enumerate(_calls(reply)):
            yield _chunk(reply.id, request, {"tool_calls": [{"index": place, **call}]})
        yield _chunk(reply.id, request, {}, _finish(reply))
        if request.usage:
            head = _head(reply.id, request, "chat.completion.chunk")
            yield data_event({**head, "choices": [], "usage": _usage(reply)})
        yield b"data: [DONE]\n\n"


def _message(value: Any) -> Message:
    given = table_of(value, "a message")
    role = name_of(given.get("role"), "a message's role")
    content = text_of(given.get("content"), f"the content of a message of role {role}")
    match role:
        case "system" | "developer":
            return {"role": "system", "content": content}
        case "user":
            return {"role": role, "content": content}
        case "assistant":
            message: Message = {"role": role, "content": content}
            thought = given.get("reasoning_content", given.get("reasoning"))
            if isinstance(thought, str) and thought:
                message["reasoning_content"] = thought
            calls = [
                call_message(called.get("name"), called.get("arguments", ""), call.get("id"))
                for call in (table_of(one, "a call") for one in list_of(given.get("tool_calls"), "tool_calls"))
                for called in [table_of(call.get("function"), "a call's function")]
            ]
            return message | ({"tool_calls": calls} if calls else {})
        case "tool":
            name = {"name": given["name"]} if isinstance(given.get("name"), str) else {}
            return {"role": role, "content": content, "tool_call_id": str(given.get("tool_call_id", "")), **name}
    raise RefusedRequest(f"a message has the role {role}, which is unknown here")


def _tool(value: Any) -> Mapping[str, Any] | None:
    """Return a function; None for what only a provider could run."""
    tool = table_of(value, "a tool")
    if tool.get("type", "function") != "function":
        return None
    function = table_of(tool.get("function"), "a tool's function")
    return function_tool(function.get("name"), function.get("description"), function.get("parameters"))


def _calls(reply: ChatReply) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in reply.calls
    ]


def _finish(reply: ChatReply) -> str:
    return "tool_calls" if reply.calls else reply.finish


def _usage(reply: ChatReply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.reused_tokens},
    }


def _head(id_: str, request: ChatRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{id_}", "object": kind, "created": int(time.time()), "model": request.model}


def _chunk(id_: str, request: ChatRequest, delta: Mapping[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
    return data_event({**_head(id_, request, "chat.completion.chunk"), "choices": [choice]})

"""OpenAI's responses: `POST /v1/responses`."""

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

_STATELESS = "the gateway keeps no conversations: send all items (store = false)"


class OpenAIResponses(Wire):
    """The form in which a conversation is a list of items: messages, thoughts, calls and what they gave."""

    name = "responses"

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        if body.get("previous_response_id") or body.get("conversation"):
            raise RefusedRequest(_STATELESS)
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else list_of(given, "input")
        before = [{"role": "system", "content": text}] if (text := text_of(body.get("instructions"))) else []
        tools = (function for tool in list_of(body.get("tools"), "tools") for function in _tools(tool))
        return ChatRequest(
            messages=merged([*before, *_messages(items)]),
            tools=tuple(tools),
            max_tokens=tokens_of(body.get("max_output_tokens"), "max_output_tokens"),
        )

    def write(self, reply: ChatReply, request: ChatRequest) -> dict[str, Any]:
        cut = reply.finish == "length"
        return {
            **_head(reply.id, request),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _items(reply),
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": reply.reused_tokens, "cache_write_tokens": 0},
                "output_tokens": reply.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            },
        }

    def begin(self, id_: str, request: ChatRequest) -> bytes:
        created = data_event(
            {"type": "response.created", "sequence_number": 0, "response": _head(id_, request)}, "response.created"
        )
        return created + self.keep_alive(id_, request)

    def keep_alive(self, id_: str, request: ChatRequest) -> bytes:
        """Return an event with data: codex takes no comment for a sign of life."""
        name = "response.in_progress"
        return data_event({"type": name, "sequence_number": 1, "response": _head(id_, request)}, name)

    def events(self, reply: ChatReply, request: ChatRequest) -> Iterator[bytes]:
        whole = self.write(reply, request)
        found = [event for place, item in enumerate(whole["output"]) for event in _item_events(place, item)]
        found.append({"type": f"response.{whole['status']}", "response": whole})
        for number, event in enumerate(found, start=2):
            yield data_event({"sequence_number": number, **event}, event["type"])

    def error_event(self, message: str) -> bytes:
        body = {"type": "error", "code": "server_error", "message": message, "param": None, "sequence_number": 2}
        return data_event(body, "error")


def _messages(items: Any) -> list[Message]:
    """Return items as messages: thoughts, text and calls of one turn are one message."""
    found: list[Message] = []
    thought, turn_open = "", False  # of the turn that the last items belong to

    def turn() -> Message:
        nonlocal thought, turn_open
        if not turn_open:
            found.append({"role": "assistant", "content": ""})
        if thought:
            found[-1]["reasoning_content"] = found[-1].get("reasoning_content", "") + thought
        thought, turn_open = "", True
        return found[-1]

    for item in (table_of(one, "an item of input") for one in items):
        kind = item.get("type", "message")
        match kind:
            case "reasoning":
                parts = item.get("content") or item.get("summary") or []
                thought, turn_open = thought + text_of(parts, "a reasoning item"), False
            case "function_call":
                calls = turn().setdefault("tool_calls", [])
                calls.append(call_message(item.get("name"), item.get("arguments", ""), item.get("call_id")))
            case "function_call_output":
                turn_open = False
                id_ = str(item.get("call_id", ""))
                found.append({"role": "tool", "content": text_of(item.get("output"), "an output"), "tool_call_id": id_})
            case "message":
                role = name_of(item.get("role"), "a message's role")
                content = text_of(item.get("content"), f"the content of a message of role {role}")
                if role == "assistant":
                    turn_open = turn_open and "tool_calls" not in found[-1] and not found[-1]["content"]
                    turn()["content"] = content
                elif role in ("user", "system", "developer"):
                    turn_open = False
                    found.append({"role": "user" if role == "user" else "system", "content": content})
                else:
                    raise RefusedRequest(f"a message has the role {role}, which is unknown here")
            case "item_reference":
                raise RefusedRequest(f"{_STATELESS}, not an item_reference")
            case _:
                raise RefusedRequest(f"an item of type {kind} is unknown here")
    return found


def _tools(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield functions, those of a namespace too; nothing for what only a provider could run."""
    tool = table_of(value, "a tool")
    if tool.get("type") == "function":
        yield function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"))
    elif tool.get("type") == "namespace":
        for inner in list_of(tool.get("tools"), "a namespace's tools"):
            yield from _tools(inner)


def _items(reply: ChatReply) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if reply.reasoning:
        summary = [{"type": "summary_text", "text": reply.reasoning}]
        found.append({"id": f"rs_{reply.id}", "type": "reasoning", "summary": summary, "encrypted_content": None})
    if reply.content or not reply.calls:
        content = [{"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}]
        status = "completed" if reply.finish == "stop" else "incomplete"
        message = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant"}
        found.append({**message, "status": status, "content": content})
    for call in reply.calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        item = {"id": f"fc_{call.id}", "type": "function_call", "status": "completed", "call_id": call.id}
        found.append({**item, "name": call.name, "arguments": arguments})
    return found


def _item_events(place: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what is said of an item: that it is begun, its text, that it is done."""
    at: dict[str, Any] = {"item_id": item["id"], "output_index": place}
    match item["type"]:
        case "reasoning":
            empty, part, text = {**item, "summary": []}, item["summary"][0], item["summary"][0]["text"]
            at |= {"summary_index": 0}
            kind, word, ends = "reasoning_summary_text", "reasoning_summary_part", {"text": text}
        case "message":
            empty = {**item, "status": "in_progress", "content": []}
            part, text = item["content"][0], item["content"][0]["text"]
            at |= {"content_index": 0}
            kind, word, ends = "output_text", "content_part", {"text": text, "logprobs": []}
        case _:
            empty, part, text = {**item, "status": "in_progress", "arguments": ""}, None, item["arguments"]
            kind, word, ends = "function_call_arguments", "", {"arguments": text, "name": item["name"]}
    yield {"type": "response.output_item.added", "output_index": place, "item": empty}
    if part is not None:
        yield {"type": f"response.{word}.added", **at, "part": {**part, "text": ""}}
    if text:
        delta = {"type": f"response.{kind}.delta", **at, "delta": text}
        yield delta | ({"logprobs": []} if kind == "output_text" else {})
    yield {"type": f"response.{kind}.done", **at, **ends}
    if part is not None:
        yield {"type": f"response.{word}.done", **at, "part": part}
    yield {"type": "response.output_item.done", "output_index": place, "item": item}


def _head(id_: str, request: ChatRequest) -> dict[str, Any]:
    return {
        "id": f"resp_{id_}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": request.model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "store": False,
        "usage": None,
    }

"""One of the forms in which clients ask for a turn."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from workers.gateway.chat_request import ChatReply, ChatRequest


def data_event(body: Mapping[str, Any], name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(body, ensure_ascii=False)}\n\n".encode(errors="replace")


class Wire(ABC):
    """Reads requests and writes replies in one form. A reply that is streamed is finished text, written as events.
    Errors and signs of life are OpenAI's, unless a form has its own."""

    name: ClassVar[str]

    @abstractmethod
    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        """Return the request that a body of JSON holds, but for what all wires say alike: `stream`, `model` and the
        wire's name. Raises RefusedRequest."""

    @abstractmethod
    def write(self, reply: ChatReply, request: ChatRequest) -> dict[str, Any]:
        """Return a reply as JSON."""

    @abstractmethod
    def begin(self, id_: str, request: ChatRequest) -> bytes:
        """Return the events that a client waits for before there is any text."""

    @abstractmethod
    def events(self, reply: ChatReply, request: ChatRequest) -> Iterator[bytes]:
        """Yield the events of a whole reply, which follow those of `begin`."""

    def keep_alive(self, id_: str, request: ChatRequest) -> bytes:
        """Return an event that says no more than that the model is at work."""
        return b": at work\n\n"

    def error(self, status: int, message: str) -> dict[str, Any]:
        """Return an error as JSON."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}

    def error_event(self, message: str) -> bytes:
        """Return an error as the last event of a stream."""
        return data_event(self.error(500, message))

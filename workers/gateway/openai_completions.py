"""OpenAI's completions of plain text: `POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from workers.gateway.chat_request import ChatReply, ChatRequest, RefusedRequest, tokens_of
from workers.gateway.wire import Wire, data_event


class OpenAICompletions(Wire):
    """Text that the model continues; no chat template is used."""

    name = "completions"

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            (prompt,) = prompt
        if not isinstance(prompt, str) or not prompt:
            raise RefusedRequest("prompt must be one text: ask once for each prompt")
        for key, plain in (("n", 1), ("best_of", 1), ("echo", False), ("suffix", None)):
            if body.get(key) not in (None, plain):
                raise RefusedRequest(f"{key} = {body[key]} is not supported")
        return ChatRequest(prompt=prompt, max_tokens=tokens_of(body.get("max_tokens"), "max_tokens"))

    def write(self, reply: ChatReply, request: ChatRequest) -> dict[str, Any]:
        total = reply.prompt_tokens + reply.completion_tokens
        usage = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
        choice = {"index": 0, "text": reply.content, "finish_reason": reply.finish, "logprobs": None}
        head = {"id": f"cmpl-{reply.id}", "object": "text_completion", "created": int(time.time())}
        return {**head, "model": request.model, "choices": [choice], "usage": {**usage, "total_tokens": total}}

    def begin(self, id_: str, request: ChatRequest) -> bytes:
        return b""

    def events(self, reply: ChatReply, request: ChatRequest) -> Iterator[bytes]:
        yield data_event(self.write(reply, request))
        yield b"data: [DONE]\n\n"

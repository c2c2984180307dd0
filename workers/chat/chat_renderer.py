"""Render chat templates in a process of their own. A template is foreign code: it may loop forever or fill the memory.

The process (`backends/hf/chat_template_process.py`) limits its own time and memory, so that nothing has to watch it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from backends.hf import chat_template_process
from specs.errors import ModelError
from specs.json_file import object_of

if TYPE_CHECKING:
    from backends.hf.tokenizer import TextCodec

RENDER_S = 10.0  # for one conversation
MEMORY_MIB = 1024  # beyond what its libraries take


class ChatTemplateError(ValueError):
    """The chat template refused a list of messages."""


def _with_objects(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]]]:
    """Return messages whose calls have their arguments as objects, which most templates write as JSON, where they were
    JSON as OpenAI's are; and these objects."""
    objects = []

    def called(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            return call
        if (parsed := object_of(function["arguments"] or "{}")) is None:
            return call
        objects.append(parsed)
        return {**call, "function": {**function, "arguments": parsed}}

    given: list[Mapping[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls")
        given.append({**message, "tool_calls": [called(one) for one in calls]} if isinstance(calls, list) else message)
    return given, objects


def _shown_by_python(value: Any, text: str) -> bool:
    """Return whether a template that takes text alone has written a value as Python shows it, and not as JSON."""
    literal = str(value)
    return literal in text and literal != json.dumps(value, ensure_ascii=False, default=str)


class ChatRenderer:
    """A chat template in its process, which starts with the first conversation. Use as a context manager.

    `library`: render as transformers does, for a run. Without it jinja2 alone is imported, for a quick check.
    `tool_template`: the one for conversations with tools, where that is another. `today`: the day that a template
    writes, as 2026-01-31; empty: the day it is.
    """

    def __init__(
        self,
        template: str,
        special_tokens: Mapping[str, Any],
        *,
        library: bool,
        tool_template: str = "",
        today: str = "",
    ) -> None:
        self._setup = {
            "templates": [template, tool_template or template],  # without tools, and with
            "special_tokens": dict(special_tokens),
            "library": library,
            "today": today,
            "seconds": RENDER_S,
            "memory_MiB": MEMORY_MIB,
        }
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> ChatRenderer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, begins_answer: bool = True, tools: Sequence[Any] | None = None
    ) -> str:
        """Return the messages as the text that the model sees, up to where its answer starts (`begins_answer`).

        Raises ChatTemplateError when the template refuses the messages, and ModelError when it cannot be used at all:
        it is no Jinja, does what the sandbox forbids, or takes too long or too much memory.
        """
        given, objects = _with_objects(messages)
        reply = self._ask({"messages": given, "begins_answer": begins_answer, "tools": tools})
        if objects and ("refused" in reply or any(_shown_by_python(one, reply.get("text", "")) for one in objects)):
            reply = self._ask({"messages": list(messages), "begins_answer": begins_answer, "tools": tools})
        if "refused" in reply:
            raise ChatTemplateError(f"the chat template refuses the messages: {reply['refused']}")
        if "broken" in reply:
            raise self._broken(reply["broken"])
        text = str(reply["text"])
        for content in (message.get("content") for message in messages):
            if isinstance(content, list | dict) and _shown_by_python(content, text):
                why = f"the chat template takes no content in parts, and would write {str(content)[:40]}…"
                raise ChatTemplateError(f"{why}: make it one text")
        return text

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request, default=str) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line.endswith("\n"):
            reply: dict[str, Any] = json.loads(line)
            return reply
        code = process.wait()
        self.close()
        slow = code == -signal.SIGALRM
        raise self._broken(f"takes longer than {RENDER_S:g} s" if slow else f"ended its process (exit code {code})")

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            (sys.executable, "-P", chat_template_process.__file__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"},
            text=True,
            encoding="utf-8",
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._setup) + "\n")
        return process

    def _broken(self, why: str) -> ModelError:
        hint = 'repair the template, use that of the model it comes from, or set data.chat = "never"'
        return ModelError(f"the chat template {why}", hint=hint)


def renderer_of(codec: TextCodec) -> ChatRenderer:
    """Return the renderer of a tokenizer's own template. Raises ModelError where it has none to use."""
    names, with_tools = codec.tokenizer.special_tokens_map, codec.chat_template(tools=True)
    return ChatRenderer(codec.chat_template(), names, library=True, tool_template=with_tools, today=codec.today)

"""Render chat templates in a process of their own. A template is foreign code: it may loop forever or fill the memory.

The process (`backends/hf/chat_template_process.py`) limits its own time and memory, so that nothing has to watch it.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
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


def _with_arguments(messages: Sequence[Mapping[str, Any]], write: Callable[[Any], Any]) -> list[Mapping[str, Any]]:
    """Return messages whose calls have their arguments as `write` gives them."""

    def called(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        return {**call, "function": {**function, "arguments": write(function["arguments"])}}

    given: list[Mapping[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls")
        given.append({**message, "tool_calls": [called(one) for one in calls]} if isinstance(calls, list) else message)
    return given


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _shown_by_python(value: Any, text: str) -> bool:
    """Return whether a template that takes text alone has written a value as Python shows it, and not as JSON."""
    literal = str(value)
    return literal in text and literal != json.dumps(value, ensure_ascii=False, default=str)


def _marked(message: Mapping[str, Any], mark: str, learned: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a message with marks in the place of what a template has to write, and what each stands for."""
    found: dict[str, str] = {}

    def put(value: Any, what: str) -> Any:
        if isinstance(value, list):
            return [put(part, what) for part in value]
        if isinstance(value, dict) and "text" in value:
            return {**value, "text": put(value["text"], what)}
        if not isinstance(value, str) or not value.strip():
            return value
        found[text := f"{mark}{len(found)}."] = what
        return text

    def called(call: Any) -> Any:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return call
        what = f"its call of {function.get('name')}: use a model whose template writes it"
        renamed = {**function, "name": put(function.get("name"), what)}
        return {**call, "function": renamed} if "function" in call else renamed

    made, calls, content = {**message}, message.get("tool_calls"), message.get("content")
    if isinstance(calls, list):
        made["tool_calls"] = [called(call) for call in calls]
    if learned or not calls:
        form = f"content as {'one text' if isinstance(content, str) else 'parts'}{', beside calls' if calls else ''}"
        made["content"] = put(content, f"what it says (role {message['role']}, {form}): give it another role or form")
    if learned and (thoughts := [key for key in chat_template_process.THOUGHTS if message.get(key)]):
        thought = put(message[thoughts[0]], f"its {thoughts[0]}, which is to be learned: leave the key out")
        made |= dict.fromkeys(thoughts, thought)
    return made, found


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
        self._written: set[tuple[Any, ...]] = set()

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
        objects = []

        def as_object(arguments: Any) -> Any:
            parsed = object_of(arguments or "{}") if isinstance(arguments, str) else arguments
            if not isinstance(parsed, dict):
                return arguments
            objects.append(parsed)
            return parsed

        # Most templates write arguments as JSON, where they are objects; some take JSON alone, as OpenAI's are.
        given = _with_arguments(messages, as_object)
        reply = self._ask({"messages": given, "begins_answer": begins_answer, "tools": tools})
        if objects and ("refused" in reply or any(_shown_by_python(one, reply.get("text", "")) for one in objects)):
            given = _with_arguments(messages, _as_text)
            reply = self._ask({"messages": given, "begins_answer": begins_answer, "tools": tools})
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

    def check_written(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None, learned: Collection[int] = ()
    ) -> None:
        """Raise ChatTemplateError where the template leaves out what one of the messages says: some know no developer,
        take contents as one text alone or in parts alone, or write a single call. `learned`: the numbers of those whose
        reasoning, and text beside calls, must be there too. Each kind of message is tried once, with marks."""
        marked, found, kinds, mark = [*messages], dict[str, str](), set(), secrets.token_hex(12)
        for n, message in enumerate(messages):
            said, texts = _marked(message, f"{mark}{n}.", n in learned)
            if (kind := (n == 0, *texts.values())) not in self._written:
                marked[n] = said
                found |= {text: f"message {n}: the chat template leaves out {what}" for text, what in texts.items()}
                kinds.add(kind)
        text = self.render(marked, begins_answer=messages[-1]["role"] != "assistant", tools=tools) if found else ""
        if lost := next((why for one, why in found.items() if one not in text), ""):
            raise ChatTemplateError(lost)
        self._written |= kinds

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

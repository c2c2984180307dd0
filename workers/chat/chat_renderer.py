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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from backends.hf import chat_template_process
from specs.errors import ModelError
from specs.json_file import object_of

if TYPE_CHECKING:
    from backends.hf.tokenizer import TextCodec

RENDER_S = 10.0  # for one conversation
MEMORY_MIB = 1024  # beyond what its libraries take
Cut = tuple[int, bool]  # so many messages of a conversation, and whether up to where an answer begins


class ChatTemplateError(ValueError):
    """The chat template refused a list of messages."""


def _with_arguments(messages: Sequence[Mapping[str, Any]], write: Callable[[Any, int], Any]) -> list[Mapping[str, Any]]:
    """Return messages whose calls have their arguments as `write` gives them, which is told the message's number."""

    def called(call: Any, number: int) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        return {**call, "function": {**function, "arguments": write(function["arguments"], number)}}

    given: list[Mapping[str, Any]] = []
    for number, message in enumerate(messages):
        if isinstance(calls := message.get("tool_calls"), list):
            message = {**message, "tool_calls": [called(one, number) for one in calls]}
        given.append(message)
    return given


def _as_text(arguments: Any, _: int) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _shown_by_python(value: Any, text: str) -> bool:
    """Return whether a template that takes text alone has written a value as Python shows it, and not as JSON."""
    literal = str(value)
    return literal in text and literal != json.dumps(value, ensure_ascii=False, default=str)


def _shown(values: Sequence[tuple[int, Any]], count: int, text: str) -> Any:
    """Return the first value, of a message before number `count`, that Python has written, or nothing."""
    return next((value for number, value in values if number < count and _shown_by_python(value, text)), None)


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
    """A chat template in its process, which starts with the first conversation; in several, where threads ask at once.
    Use as a context manager.

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
        self._idle: list[subprocess.Popen[str]] = []  # processes that no thread waits for
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
        return next(self.beginnings(messages, [(len(messages), begins_answer)], tools=tools))

    def beginnings(
        self, messages: Sequence[Mapping[str, Any]], cuts: Sequence[Cut], *, tools: Sequence[Any] | None
    ) -> Iterator[str]:
        """Yield what `render` returns of each cut, or raise what it raises. The conversation travels once."""
        objects = list[tuple[int, Any]]()  # with the number of their message
        parts = [(n, one["content"]) for n, one in enumerate(messages) if isinstance(one.get("content"), list | dict)]

        def as_object(arguments: Any, number: int) -> Any:
            parsed = object_of(arguments or "{}") if isinstance(arguments, str) else arguments
            if not isinstance(parsed, dict):
                return arguments
            objects.append((number, parsed))
            return parsed

        def takes_text(count: int, reply: Mapping[str, Any]) -> bool:
            refused = "refused" in reply and any(number < count for number, _ in objects)
            return refused or bool(_shown(objects, count, reply.get("text", "")))

        # Most templates write arguments as JSON, where they are objects; some take JSON alone, as OpenAI's are.
        replies = self._ask(_with_arguments(messages, as_object), cuts, tools)
        if again := [cut for cut, reply in replies.items() if takes_text(cut[0], reply)]:
            replies |= self._ask(_with_arguments(messages, _as_text), again, tools)
        for count, begins_answer in cuts:
            reply = replies[count, begins_answer]
            if "refused" in reply:
                raise ChatTemplateError(f"the chat template refuses the messages: {reply['refused']}")
            if "broken" in reply:
                raise self._broken(reply["broken"])
            text = str(reply["text"])
            if content := _shown(parts, count, text):
                why = f"the chat template takes no content in parts, and would write {str(content)[:40]}…"
                raise ChatTemplateError(f"{why}: make it one text")
            yield text

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
        while self._idle:
            process = self._idle.pop()
            process.kill()
            process.communicate()

    def _ask(self, messages: Sequence[Any], cuts: Sequence[Cut], tools: Sequence[Any] | None) -> dict[Cut, Any]:
        """Return the reply to each cut. Where one ends the process, it and those behind it are broken."""
        try:
            process = self._idle.pop()
        except IndexError:
            process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        cuts, found, whole = list(dict.fromkeys(cuts)), dict[Cut, Any](), ""
        request = {"messages": messages, "cuts": cuts, "tools": tools}
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request, default=str) + "\n")
            process.stdin.flush()
        for cut in cuts:
            line = process.stdout.readline()
            if not line.endswith("\n"):
                code = process.wait()
                process.communicate()
                slow = code == -signal.SIGALRM
                why = f"takes longer than {RENDER_S:g} s" if slow else f"ended its process (exit code {code})"
                return {one: {"broken": why} for one in cuts} | found
            reply = json.loads(line)
            whole = whole or reply.get("text", "")
            found[cut] = {"text": whole[: reply["same"]]} if "same" in reply else reply
        self._idle.append(process)
        return found

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

"""Turn a conversation into tokens that are only ever appended to: its prompt, a turn as sampled, replies, a turn again.

What was sampled is never tokenised again. Replies become what the model's own chat template writes from the end of the
assistant's turn to the beginning of the next; control tokens in their contents become plain text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from specs.errors import ModelError
from specs.text import show
from workers.chat.chat_renderer import ChatRenderer, ChatTemplateError
from workers.chat.tool_calls import ParsedCalls, ToolCall, call_id, format_of
from workers.joined_text import begun

if TYPE_CHECKING:
    from backends.hf.tokenizer import TextCodec

Message = Mapping[str, Any]

_TOOL_SETS = 64  # with which chat templates are kept
_ASKED: list[Message] = [{"role": "user", "content": "Hi"}]
_PROBE = ' {"a": "é"} \\ \n'  # a reply in which everything shows that a template may do to it
_CHANNELS = "<|channel|>analysis<|message|>"  # in the template of gpt-oss, which writes thoughts as such messages
_ANALYSIS = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>|\Z)", re.DOTALL)
_HEADER = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>\w+<\|message\|>|<\|end\|>")
_WRITES: tuple[Callable[[str], str], ...] = (str, str.strip, lambda text: json.dumps(text, ensure_ascii=False)[1:-1])


@dataclass(frozen=True)
class AssistantTurn:
    """Hold what the model sampled, read. `text`: all of it but `stop`, the special token that ended it, and those with
    which the template closes an answer before that; None: a limit did, or, of a turn that is `finished`, text.
    `error`: why a tool call in it cannot be read, for the model."""

    message: dict[str, Any]
    text: str
    calls: tuple[ToolCall, ...]
    error: str
    stop: int | None
    finished: bool = True


@dataclass(frozen=True)
class TurnProof:
    """A scripted turn and the reply to it, as tokens and as read."""

    prompt_ids: list[int]
    turn_ids: list[int]
    suffix_ids: list[int]
    parsed: AssistantTurn


@dataclass(frozen=True)
class _ReplyStyle:
    """How replies of a role are written: the token that ends the turn before, the one with which the model ends it,
    special ones that stand before that, what becomes of their contents, and whether everything before them stays as it
    was."""

    end: int
    stop: int
    closing: Sequence[int]
    write: Callable[[str], str]
    keeps_history: bool


class ChatTurns:
    """The conversations of one model with the same tools, as tokens."""

    def __init__(self, codec: TextCodec, renderer: ChatRenderer, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`tools`: their JSON schemas. Raises ModelError where the template cannot show them, calls or replies."""
        self._codec, self._renderer, self._tools = codec, renderer, list(tools) or None
        self._template, self._special = codec.chat_template(tools=bool(tools)), codec.special_ids
        self._control = _control_tokens(codec, self._template)
        self._mark = secrets.token_hex(12)  # stands for contents while the template is rendered
        self._format = format_of(self._template) if tools else None
        functions = [tool["function"] for tool in tools]
        self._schemas = {one["name"]: one.get("parameters", {}).get("properties") or {} for one in functions}
        self._asked = renderer.render(_ASKED, tools=self._tools)
        self._opened = self._asked.rstrip().endswith("<think>")
        # A prompt that has closed the model's thinking wants none.
        thinks = "</think>" in self._template and not self._asked.rstrip().endswith("</think>")
        self._channels, thought = _CHANNELS in self._template, f"{self._mark}thought"
        self._thought = thought if self._channels else f"<think>\n{thought}\n</think>" if thinks else ""
        self._styles: dict[str, _ReplyStyle] = {}
        if tools and self._asked == renderer.render(_ASKED):
            raise self._fault("ignores the tools")
        if tools and self._format is None:
            raise self._fault("writes tool calls in no form that is known here")
        self._style("user")
        self._parallel, self._error_role = False, "user"
        if tools:
            self._study_calls()

    # ── what episodes use ─────────────────────────────────────────────────────────────────────────

    @property
    def answer_end(self) -> tuple[int, str]:
        """Return the token with which the template ends an answer, and its text."""
        stop = self._style("user").stop
        return stop, self._text([stop])

    def keeps(self, replies: Sequence[Message]) -> bool:
        """Return whether everything before these replies stays as it was."""
        return all(self._style(reply["role"]).keeps_history for reply in replies)

    def check_history(self, replies: Sequence[Message]) -> None:
        """Raise ModelError where one of these replies changes what stands before it."""
        if rewriter := next((reply for reply in replies if not self.keeps([reply])), None):
            message = f"the chat template rewrites what stands before a reply of role {rewriter['role']}"
            hint = 'write history = "branch", which begins another sample of the rollout there, or repair the template'
            raise ModelError(message, hint=hint)

    def prompt(self, messages: Sequence[Message], *, of_row: int | None = None) -> list[int]:
        """Return the tokens of a conversation up to where the model writes. `of_row`: so many messages are the data's;
        control tokens in replies behind these become plain text."""
        return self._encode(self._render(messages, len(messages) if of_row is None else of_row))

    def read(self, tokens: Sequence[int], *, finished: bool = True) -> AssistantTurn:
        """Read what was sampled. A special token at its end is taken for what ended it, if that is no limit."""
        stop = tokens[-1] if finished and tokens and tokens[-1] in self._special else None
        said = tokens if stop is None else tokens[:-1]
        while stop is not None and said and said[-1] in self._style("user").closing:
            said = said[:-1]
        text = self._text(said)
        thought, rest = self._split(text)
        found = self._format.parse(rest, self._schemas) if self._format else ParsedCalls(rest)
        if len(found.calls) > 1 and not self._parallel:
            found = ParsedCalls(rest, error="Only one tool can be called in a turn: call them one after another.")
        return AssistantTurn(self._message(thought, found), text, found.calls, found.error, stop, finished)

    def _split(self, text: str) -> tuple[str, str]:
        """Return what the model thought, with the tags around it, and what follows."""
        if self._channels:
            return "\n".join(_ANALYSIS.findall(text)), _ANALYSIS.sub("", text)
        thought, closed, rest = text.partition("</think>")
        return (thought + closed, rest) if closed and (self._opened or "<think>" in thought) else ("", text)

    def numbered(self, turn: AssistantTurn, calls: int) -> AssistantTurn:
        """Return a turn whose calls follow so many others: ids that were made here stay unique in a conversation."""
        if not calls or not turn.calls:
            return turn
        renamed = tuple(
            replace(call, id=call_id(calls + n)) if call.id == call_id(n) else call for n, call in enumerate(turn.calls)
        )
        return replace(
            turn, calls=renamed, message={**turn.message, "tool_calls": [call.message() for call in renamed]}
        )

    def plain_prompt(self, text: str) -> list[int]:
        """Return the tokens of text that is no conversation."""
        return begun(self._codec, [text])[0]

    def error_reply(self, words: str) -> dict[str, Any]:
        """Return the message that tells the model of a call that cannot be read, in a role that the template takes."""
        return {"role": self._error_role, "content": words}

    def suffix(self, messages: Sequence[Message], turn: AssistantTurn, replies: Sequence[Message]) -> list[int]:
        """Return the tokens that follow a turn as sampled, up to where the model writes again. `messages`: those before
        the turn. Another token than the template's that ended the turn takes the place of that one; a turn that a limit
        truncated is ended. Raises ChatTemplateError where the template refuses the replies."""
        end = next(self._style(reply["role"]).end for reply in replies)
        pieces = self._render([*messages, turn.message, *replies], len(messages) + 1)
        head = pieces[0]
        if replies[0]["role"] == "assistant":  # its own end stands there too
            head = self._renderer.render([*messages, turn.message], begins_answer=False, tools=self._tools)
        ids = self._encode([pieces[0][head.rindex(self._text([end])) :], *pieces[1:]])
        return ids if turn.stop is None else ids[ids.index(end) + 1 :]

    def prove(self, messages: Sequence[Message], call: ToolCall | None, reply: str, answer: str = "Yes.") -> TurnProof:
        """Take a scripted turn and a reply through template, tokens and parser. Without a call, the turn is `answer`
        and the reply the user's. Raises ModelError where another call is read, or the tokens are not what the template
        writes."""
        said, role = ParsedCalls("", (call,)) if call else ParsedCalls(f"\n\n{answer}"), "tool" if call else "user"
        script = self._message("<think>\nI know how.\n</think>" if self._opened else "", said)
        head = self._render([*messages, script, _reply(role, reply, call)], len(messages) + 1)[0]
        before, end = self._whole(messages), self._text([self._style(role).end])
        if not head.startswith(before):
            raise self._fault("writes what comes before a turn otherwise once the turn is there")
        prompt_ids = self._encode([before])
        turn_ids = self._encode([head[len(before) : head.rindex(end) + len(end)]])
        turn = self.read(turn_ids)
        if [(one.name, one.arguments) for one in turn.calls] != [(one.name, one.arguments) for one in said.calls]:
            raise self._fault(f"writes a tool call that cannot be read back: {show(turn.text)} {turn.error}")
        replies = [_reply(role, reply, turn.calls[0] if call else None)]
        suffix_ids = self.suffix(messages, turn, replies)
        whole = self._whole([*messages, turn.message, *replies])
        if self._text([*prompt_ids, *turn_ids, *suffix_ids]) != self._text(self._encode([whole])):
            raise self._fault("writes a turn and the reply to it otherwise than one after another")
        return TurnProof(prompt_ids, turn_ids, suffix_ids, turn)

    # ── the template ──────────────────────────────────────────────────────────────────────────────

    def _whole(self, messages: Sequence[Message]) -> str:
        return self._renderer.render(messages, tools=self._tools)

    def _render(self, messages: Sequence[Message], first: int) -> list[str]:
        """Return the template's text and contents by turns: the contents of replies from message `first` on."""
        replies = {n for n in range(first, len(messages)) if messages[n]["role"] != "assistant"}
        marks = [{**one, "content": f"{self._mark}{n}."} if n in replies else one for n, one in enumerate(messages)]
        pieces = re.split(rf"{self._mark}(\d+)\.", self._whole(marks))
        if {*map(int, pieces[1::2])} != replies:
            raise self._fault("leaves out what a reply says")
        pieces[1::2] = [self._written(messages[int(number)]) for number in pieces[1::2]]
        return pieces

    def _written(self, reply: Message) -> str:
        content = str(reply["content"]).encode("utf-8", "replace").decode()
        return self._styles[reply["role"]].write(content) if reply["role"] in self._styles else content

    def _message(self, thought: str, said: ParsedCalls) -> dict[str, Any]:
        """Return the assistant's message, with its thought where the template looks for it."""
        message: dict[str, Any] = {"role": "assistant", "content": thought + said.content}
        if self._channels:
            thought, content = _without_headers(thought), _without_headers(said.content).strip()
            # Its template takes calls with thoughts or text, not with both.
            thought, content = ("\n".join(filter(None, (thought, content))), "") if said.calls else (thought, content)
            message |= {"content": content, "reasoning_content": thought}
        elif thought and "reasoning_content" in self._template:
            message |= {"content": said.content.lstrip("\n"), "reasoning_content": split_thought(thought)[0]}
        return message | ({"tool_calls": [call.message() for call in said.calls]} if said.calls else {})

    def _fault(self, what: str) -> ModelError:
        hint = "repair the chat template, or use a model whose template writes tools, their replies and several turns"
        return ModelError(f"the chat template of {self._codec.model_path} {what}", hint=hint)

    # ── what the constructor finds out ────────────────────────────────────────────────────────────

    def _study_calls(self) -> None:
        try:
            self._styles["tool"], self._parallel = self._study("tool", 2), True
        except (ChatTemplateError, ModelError):
            self._style("tool")
        with suppress(ChatTemplateError, ModelError):
            self._study("tool", 0)
            self._error_role = "tool"

    def _style(self, role: str) -> _ReplyStyle:
        if role not in self._styles:
            try:
                self._styles[role] = self._study(role, int(role == "tool" and self._format is not None))
            except ChatTemplateError as error:
                raise self._fault(f"cannot write a reply of role {role}: {error}") from error
        return self._styles[role]

    def _study(self, role: str, number: int) -> _ReplyStyle:
        """Find out how replies of a role follow a turn with so many calls."""
        name, last = next(iter(self._schemas), ""), f"{self._mark}{number}"
        calls = tuple(ToolCall(name, {"value": f"{self._mark}{n + 1}"}, call_id(n)) for n in range(number))
        turn = self._message(self._thought, ParsedCalls("" if calls else f"\n\n{last}", calls))
        replies = [_reply(role, _PROBE, call) for call in calls] or [_reply(role, _PROBE, None)]
        pieces, whole = self._render([*_ASKED, turn, *replies], 2), self._whole([*_ASKED, turn, *replies])
        thought, found, gap = pieces[0].rpartition(last)
        write = next((write for write in _WRITES if _joined(pieces, write) == whole), None)
        if not found or write is None:
            raise self._fault(f"rewrites what the assistant or a reply of role {role} says")
        # What ends an answer ends a call, though another special token may stand before it.
        ends = [token for token in self._encode([gap]) if token in self._special]
        usual = (*(style.end for style in self._styles.values()), self._codec.end_id)
        stops = (token for token in ends if token in self._codec.stop_ids)
        end = next((token for token in chain(usual, stops, ends) if token in ends), None)
        closed = self._renderer.render([*_ASKED, turn], begins_answer=False, tools=self._tools).rpartition(last)[2]
        keeps = thought.startswith(self._asked) and (not self._thought or f"{self._mark}thought" in thought)
        stop = end
        # GLM ends an answer with the first token of who speaks next, gpt-oss the last one otherwise than those before.
        if end is None or not (self._text([end]) in closed or end in self._codec.stop_ids):
            stop, keeps = next((one for one in self._encode([closed]) if one in self._codec.stop_ids), None), False
        if end is None or stop is None:
            raise self._fault("ends the assistant's turn with no token of its own")
        return _ReplyStyle(end, stop, ends[: ends.index(end)], write, keeps)

    # ── tokens ────────────────────────────────────────────────────────────────────────────────────

    def _text(self, tokens: Sequence[int]) -> str:
        return self._codec.decode([tokens], special_tokens=True)[0]

    def _encode(self, pieces: Sequence[str]) -> list[int]:
        """Return the tokens of the template's text and contents by turns: those of the whole text, unless a content
        would make control tokens; then contents are tokenised on their own."""
        text, own, at = "".join(pieces), [], 0
        for number, piece in enumerate(pieces):
            own += [at + found.start() for found in self._control.finditer(piece)] if number % 2 == 0 else []
            at += len(piece)
        if [found.start() for found in self._control.finditer(text)] == own:
            return self._codec.encode([text], rendered=True)[0]
        parts = [part for n, piece in enumerate(pieces) for part in (self._apart(piece) if n % 2 else [piece])]
        return [token for ids in self._codec.encode(parts, rendered=True) for token in ids]

    def _apart(self, content: str) -> Iterator[str]:
        """Return a content in parts, so that none holds a whole control token."""
        at = 0
        while found := self._control.search(content, at):
            yield content[at : found.start() + 1]
            at = found.start() + 1
        yield content[at:]


Chats = Callable[[Sequence[Mapping[str, Any]]], ChatTurns]
"""Gives the chat template with some tools."""


def chats_by_tools(codec: TextCodec, renderer: ChatRenderer) -> Chats:
    """Return what gives a model's chat template with some tools, and raises ModelError where it cannot show them. Of
    the sets of tools that were asked for, the latest are kept: agents bring their own."""
    made = lru_cache(_TOOL_SETS)(lambda tools: ChatTurns(codec, renderer, json.loads(tools)))
    return lambda tools: made(json.dumps(tools))


def split_thought(text: str) -> tuple[str, str]:
    """Return what the model thought and what it said, of a text that may hold both."""
    thought, closed, said = text.partition("</think>")
    return (thought.rpartition("<think>")[2].strip("\n"), said.lstrip("\n")) if closed else ("", text)


def _without_headers(text: str) -> str:
    """Return text without headers of channels, also where taking one out makes another: their template refuses them."""
    while (left := _HEADER.sub("", text)) != text:
        text = left
    return text


def _joined(pieces: Sequence[str], write: Callable[[str], str]) -> str:
    return "".join(write(piece) if number % 2 else piece for number, piece in enumerate(pieces))


def _reply(role: str, content: str, call: ToolCall | None) -> dict[str, Any]:
    return {"role": role, "content": content} | ({"name": call.name, "tool_call_id": call.id} if call else {})


def _control_tokens(codec: TextCodec, template: str) -> re.Pattern[str]:
    """Return what finds the tokens that a content must not make: special ones, and others that the template writes."""
    added = codec.tokenizer.added_tokens_decoder.values()
    found = {one.content for one in added if one.special or (one.content.strip() and one.content in template)}
    return re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True))) or "(?!)")

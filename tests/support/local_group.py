"""A `Group` whose ranks live in this process: the real handlers behind the real wire format, without sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specs.messages import Kind, Message, Verb, parse


class LocalCall:
    def __init__(self, answers: list[Message]) -> None:
        self.answers = answers

    def result(self) -> list[Message]:
        return self.answers


class LocalGroup:
    """`handlers` holds one mapping per rank."""

    def __init__(self, role: str, handlers: Sequence[Mapping[Verb, Any]]) -> None:
        self.role, self.handlers, self.verbs = role, handlers, []

    @property
    def size(self) -> int:
        return len(self.handlers)

    def post(self, verb, body=None, tensors=None, *, step=None, timeout_s=None, on_part=None) -> LocalCall:
        self.verbs.append(verb)
        answers = []
        for rank, handlers in enumerate(self.handlers):
            own_body = body[rank] if isinstance(body, list) else body or {}
            own_tensors = tensors[rank] if isinstance(tensors, list) else tensors or {}
            call = parse(Message(Kind.CALL, own_body, verb, 1, own_tensors).frames())

            def emit(part_body, part_tensors, verb=verb):
                on_part(parse(Message(Kind.PART, part_body, verb, 1, part_tensors).frames()))

            answer_body, answer_tensors = handlers[verb](call, emit)
            answers.append(parse(Message(Kind.ANSWER, answer_body, verb, 1, answer_tensors).frames()))
        return LocalCall(answers)

    def call(self, verb, body=None, tensors=None, *, step=None, timeout_s=None) -> list[Message]:
        return self.post(verb, body, tensors, step=step, timeout_s=timeout_s).result()

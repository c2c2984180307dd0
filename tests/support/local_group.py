"""A `Group` whose ranks live in this process: the real handlers behind the real wire format, without sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

from pydantic import BaseModel

from specs.errors import PeerGone
from specs.wire.messages import Kind, Message, Verb, parse
from workers.serve import Working

AT_THE_SAME_TIME = (Verb.EXPORT_BUCKET, Verb.IMPORT_BEGIN, Verb.IMPORT_BUCKET)  # their ends may wait for each other


class LocalCall:
    failed = ()

    def __init__(self, answers: list[Message], ranks: list[int]) -> None:
        self.answers, self.ranks = answers, ranks

    def result(self) -> list[Message]:
        return self.answers


class ThreadsCall:
    """Answers that are still made, a thread per rank. As in rlctl/processes/failures.py, PeerGone
    follows from what happened at the other end."""

    flying: ClassVar[list[Future[Message]]] = []

    def __init__(self, answers: list[Future[Message]], ranks: list[int]) -> None:
        self.answers, self.ranks = answers, ranks
        self.flying.extend(answers)

    def result(self) -> list[Message]:
        try:
            return [answer.result(60) for answer in self.answers]
        except PeerGone:
            causes = [future.exception(60) for future in self.flying]
            raise next(cause for cause in causes if cause and not isinstance(cause, PeerGone)) from None
        finally:
            if all(future.done() for future in self.flying):
                self.flying.clear()


class LocalGroup:
    """`handlers` holds one mapping per rank; those in `here` take part."""

    def __init__(self, role: str, handlers: Sequence[Mapping[Verb, Any]]) -> None:
        self.role, self.handlers, self.verbs = role, handlers, []
        self.here = list(range(len(handlers)))
        self.processes = len(handlers)
        self._threads = ThreadPoolExecutor(len(handlers))

    @property
    def size(self) -> int:
        return len(self.here)

    @property
    def ready(self) -> list[int]:
        return self.here

    def post(
        self,
        verb,
        body=None,
        tensors=None,
        *,
        step=None,
        timeout_s=None,
        on_part=None,
        ranks=None,
        on_done=None,
        alone=False,
    ):
        ranks = self.here if ranks is None else ranks
        self.verbs.append(verb)
        if isinstance(body, BaseModel):
            body = body.model_dump(mode="json")
        told = [
            (
                self.handlers[rank],
                verb,
                body[place] if isinstance(body, list) else body or {},
                tensors[place] if isinstance(tensors, list) else tensors or {},
                on_part,
            )
            for place, rank in enumerate(ranks)
        ]
        if verb in AT_THE_SAME_TIME:
            return ThreadsCall([self._threads.submit(_answer, *one) for one in told], ranks)
        call = LocalCall([_answer(*one) for one in told], ranks)
        if on_done is not None:
            on_done(call)
        return call

    def call(self, verb, body=None, tensors=None, *, step=None, timeout_s=None, ranks=None) -> list[Message]:
        return self.post(verb, body, tensors, step=step, timeout_s=timeout_s, ranks=ranks).result()


def _answer(handlers, verb, body, tensors, on_part) -> Message:
    call = parse(Message(Kind.CALL, body, verb, 1, tensors).frames())

    def emit(part_body, part_tensors):
        on_part(parse(Message(Kind.PART, part_body, verb, 1, part_tensors).frames()))

    answer_body, answer_tensors = replied(handlers, handlers[verb](call, emit))
    return parse(Message(Kind.ANSWER, answer_body, verb, 1, answer_tensors).frames())


def replied(handlers, reply):
    """Wait for a reply that comes later, as the serve loop does."""
    while isinstance(reply, Future):
        if isinstance(handlers, Working) and handlers.work.pending:
            handlers.work.advance()
        else:
            reply = reply.result(60)
    return reply

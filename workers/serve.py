"""The serve loop of a rank: receive a call, check its body, call its handler, reply with the result or the error.

A handler may reply later: it returns a Future, and the rank receives further calls meanwhile.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from backends import activity
from backends.peer_errors import cause_of
from specs.errors import ChannelError, RlctlError
from specs.wire.batch import Batch
from specs.wire.bodies import ErrorBody, Nothing, read
from specs.wire.messages import UNCOUNTED_VERBS, Kind, Message, Verb

Body = Mapping[str, Any]
Tensors = Mapping[str, NDArray[np.generic]]
Emit = Callable[[Body, Tensors], None]
Reply = tuple[Body, Tensors]
Replied = Reply | Future[Reply]
Handler = Callable[[Message, Emit], Replied]
"""Takes the request, and a function that sends a part of the reply at once, from any thread; returns the reply's body
and tensors, or the future that will have them."""
Handlers = Mapping[Verb, Handler]
B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True)
class Request(Generic[B]):
    """A call with a checked body (`specs/wire/bodies.py`)."""

    body: B
    tensors: Tensors

    @property
    def batch(self) -> Batch:
        return Batch(self.tensors)


TypedHandler = Callable[[Request[Any], Emit], Replied]


class Work(Protocol):
    """Is done by the serving thread between calls, as long as there is any; it ends in futures that handlers gave."""

    @property
    def pending(self) -> bool: ...

    def advance(self) -> None: ...


class Working(dict[Verb, Handler]):
    """Handlers of a rank that has work between calls."""

    def __init__(self, handlers: Handlers, work: Work) -> None:
        super().__init__(handlers)
        self.work = work


def typed(handlers: Mapping[Verb, TypedHandler]) -> Handlers:
    """Return handlers that get a checked body. One that is not of the class that a handler's `Request` names raises
    ChannelError before it is called."""
    return {verb: _typed(handler, body_of(handler)) for verb, handler in handlers.items()}


def body_of(handler: TypedHandler) -> type[BaseModel]:
    """Return the class of body that a handler takes, by the annotation of its first parameter."""
    request, *_ = get_type_hints(handler).values()
    return cast(type[BaseModel], get_args(request)[0])


def _typed(handler: TypedHandler, shape: type[BaseModel]) -> Handler:
    def checked(message: Message, emit: Emit) -> Replied:
        return handler(Request(read(shape, message), message.tensors), emit)

    return checked


class Peer(Protocol):
    """The part of a connection that the loop uses. `send` is called by any thread."""

    def receive(self) -> Message: ...

    def received(self) -> Message | None: ...

    def send(self, message: Message) -> None: ...


def serve(peer: Peer, handlers: Handlers) -> None:
    """Serve calls until `close`. An error of a verb is reported and the loop continues."""
    open_calls: set[int] = set()
    work = handlers.work if isinstance(handlers, Working) else None
    handlers = {**_NOTHING, **handlers}
    while True:
        if work is not None and work.pending:
            if (message := peer.received()) is None:
                work.advance()
                continue
        else:
            message = peer.receive()
        if message.kind is not Kind.CALL or message.verb is None:
            continue
        _reply(peer, handlers, message, open_calls)
        if message.verb is Verb.CLOSE:
            return
        if message.verb is Verb.BUILD:
            # Objects of libraries and models live as long as the process. Every full pass of the garbage collector
            # would walk through all of them: 5 % of the time of decoding on a CPU.
            gc.collect()
            gc.freeze()
            gc.enable()


def _reply(peer: Peer, handlers: Handlers, call: Message, open_calls: set[int]) -> None:
    """Call the handler. `open_calls`: those whose reply is still to come."""

    def emit(body: Body, tensors: Tensors) -> None:
        peer.send(Message(Kind.PART, body, call.verb, call.call, tensors))

    started = time.monotonic()
    assert call.verb is not None
    activity.begin(call.verb, call.call, counted=call.verb not in UNCOUNTED_VERBS)
    open_calls.add(call.call)

    def end(future: Future[Reply]) -> None:
        try:
            body, tensors = future.result()
            busy = (started, time.monotonic())
            peer.send(Message(Kind.ANSWER, body, call.verb, call.call, tensors, busy))  # raises if it is no JSON
        except Exception as error:  # every error is sent to the driver, which decides what to do
            peer.send(error_message(error, call))
        finally:
            open_calls.discard(call.call)
            if not open_calls:
                activity.end()

    future: Future[Reply] = Future()
    try:
        if call.verb not in handlers:
            raise ChannelError(f"this role has no verb {call.verb}")
        reply = handlers[call.verb](call, emit)
    except Exception as error:
        future.set_exception(error)
    else:
        if isinstance(reply, Future):
            future = reply
        else:
            future.set_result(reply)
    future.add_done_callback(end)


def _nothing(call: Request[Nothing], emit: Emit) -> Replied:
    return {}, {}


_NOTHING = typed({Verb.PING: _nothing, Verb.CLOSE: _nothing})


def error_message(error: BaseException, call: Message | None = None) -> Message:
    """Return the ERROR message of an exception, with its typed cause. Write its whole traceback to the log."""
    text = "".join(traceback.format_exception(error))
    with suppress(OSError):  # on a full disk the log cannot be written, but the error must still be sent
        print(text, file=sys.stderr, end="", flush=True)
    body = ErrorBody(cause=cause_of(error), kind=type(error).__name__, message=str(error))
    if isinstance(error, RlctlError):
        body = body.model_copy(update={"message": error.message, "hint": error.hint, "known": True})
    return Message(Kind.ERROR, body.model_dump(), call.verb if call else None, call.call if call else 0)

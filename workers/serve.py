"""The serve loop of a rank: receive a call, check its body, call its handler, reply with the result or the error."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from backends import activity
from backends.peer_errors import cause_of
from specs.errors import ChannelError, RlctlError
from specs.wire.batch import Batch
from specs.wire.bodies import REQUESTS, Nothing, read
from specs.wire.error_body import ErrorBody
from specs.wire.messages import UNCOUNTED_VERBS, Kind, Message, Verb

Body = Mapping[str, Any]
Tensors = Mapping[str, NDArray[np.generic]]
Emit = Callable[[Body, Tensors], None]
Reply = tuple[Body, Tensors]
Handler = Callable[[Message, Emit], Reply]
"""Takes the request, and a function that sends a part of the reply at once; returns the reply's body and tensors."""
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


TypedHandler = Callable[[Request[Any], Emit], Reply]


def typed(handlers: Mapping[Verb, TypedHandler], own: Mapping[Verb, type[BaseModel]] | None = None) -> Handlers:
    """Return handlers that get a checked body. `own` names the body class for verbs that differ by role. A body
    that is not of its class raises ChannelError before the handler is called."""
    return {verb: _typed(handler, _shape(verb, (own or {}).get(verb))) for verb, handler in handlers.items()}


def _shape(verb: Verb, own: type[BaseModel] | None) -> type[BaseModel]:
    known = REQUESTS[verb]
    assert own in known if own else len(known) == 1, f"{verb}: one of {[shape.__name__ for shape in known]}"
    return own or known[0]


def _typed(handler: TypedHandler, shape: type[BaseModel]) -> Handler:
    def checked(message: Message, emit: Emit) -> Reply:
        return handler(Request(read(shape, message), message.tensors), emit)

    return checked


class Peer(Protocol):
    """The part of a connection that the loop uses."""

    def receive(self) -> Message: ...

    def send(self, message: Message) -> None: ...


def serve(peer: Peer, handlers: Handlers) -> None:
    """Serve calls until `close`. An error of a verb is reported and the loop continues."""
    while True:
        message = peer.receive()
        if message.kind is not Kind.CALL or message.verb is None:
            continue
        _reply(peer, handlers, message)
        if message.verb is Verb.CLOSE:
            return
        if message.verb is Verb.BUILD:
            # Objects of libraries and models live as long as the process. Every full pass of the garbage collector
            # would walk through all of them: 5 % of the time of decoding on a CPU.
            gc.collect()
            gc.freeze()


def _reply(peer: Peer, handlers: Handlers, call: Message) -> None:
    def emit(body: Body, tensors: Tensors) -> None:
        peer.send(Message(Kind.PART, body, call.verb, call.call, tensors))

    started = time.monotonic()
    assert call.verb is not None
    activity.begin(call.verb, call.call, counted=call.verb not in UNCOUNTED_VERBS)
    try:
        body, tensors = _handler(handlers, call)(call, emit)
        busy = (started, time.monotonic())
        peer.send(Message(Kind.ANSWER, body, call.verb, call.call, tensors, busy))  # raises if it cannot be encoded
    except Exception as error:  # every error is sent to the driver, which decides what to do
        peer.send(error_message(error, call))
    finally:
        activity.end()


def _handler(handlers: Handlers, call: Message) -> Handler:
    assert call.verb is not None
    if call.verb in handlers:
        return handlers[call.verb]
    if call.verb in (Verb.PING, Verb.CLOSE):
        return _NOTHING[call.verb]
    raise ChannelError(f"this role has no verb {call.verb}")


def _nothing(call: Request[Nothing], emit: Emit) -> Reply:
    return {}, {}


_NOTHING = typed({Verb.PING: _nothing, Verb.CLOSE: _nothing})


def error_message(error: BaseException, call: Message | None = None) -> Message:
    """Return the ERROR message of an exception, with its typed cause. Write its whole traceback to the log."""
    text = "".join(traceback.format_exception(error))
    with suppress(OSError):  # on a full disk the log cannot be written, but the error must still be sent
        print(text, file=sys.stderr, end="", flush=True)
    body = ErrorBody(cause_of(error), type(error).__name__, str(error))
    if isinstance(error, RlctlError):
        body = replace(body, message=error.message, hint=error.hint, known=True)
    return Message(Kind.ERROR, body.to_json(), call.verb if call else None, call.call if call else 0)

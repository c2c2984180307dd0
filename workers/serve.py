"""The serve loop of a rank: take a verb, call its handler, answer. A handler's error is an answer too."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specs.errors import ChannelError, RlctlError
from specs.messages import Kind, Message, Verb

Body = Mapping[str, Any]
Tensors = Mapping[str, NDArray[np.generic]]
Emit = Callable[[Body, Tensors], None]
Reply = tuple[Body, Tensors]
Handler = Callable[[Message, Emit], Reply]
"""Takes the request, and a function that sends a part of the answer at once; returns the answer's body and tensors."""
Handlers = Mapping[Verb, Handler]


class Peer(Protocol):
    """What the loop needs of a connection."""

    def receive(self) -> Message: ...

    def send(self, message: Message) -> None: ...


def serve(peer: Peer, handlers: Handlers) -> None:
    """Answer calls until `close` has been answered. An error of a verb is reported and the loop goes on."""
    while True:
        message = peer.receive()
        if message.kind is not Kind.CALL or message.verb is None:
            continue
        _answer(peer, handlers, message)
        if message.verb is Verb.CLOSE:
            return
        if message.verb is Verb.BUILD:
            # What libraries and models made will live as long as the process. Left to the garbage collector, its every
            # full pass walks through all of it: 5 % of the time of decoding on a CPU.
            gc.collect()
            gc.freeze()


def _answer(peer: Peer, handlers: Handlers, call: Message) -> None:
    def emit(body: Body, tensors: Tensors) -> None:
        peer.send(Message(Kind.PART, body, call.verb, call.call, tensors))

    started = time.monotonic()
    try:
        body, tensors = _handler(handlers, call)(call, emit)
        busy = (started, time.monotonic())
        peer.send(Message(Kind.ANSWER, body, call.verb, call.call, tensors, busy))  # raises on what cannot be carried
    except Exception as error:  # the edge of the process: the driver decides what an error means
        peer.send(error_message(error, call))


def _handler(handlers: Handlers, call: Message) -> Handler:
    assert call.verb is not None
    if call.verb in handlers:
        return handlers[call.verb]
    if call.verb in (Verb.PING, Verb.CLOSE):
        return _nothing
    raise ChannelError(f"this role does not know the verb {call.verb}")


def _nothing(message: Message, emit: Emit) -> Reply:
    return {}, {}


def error_message(error: BaseException, call: Message | None = None) -> Message:
    """The ERROR message of an exception. Its whole traceback also goes to the log."""
    text = "".join(traceback.format_exception(error))
    with suppress(OSError):  # on a full disk the log is full too, and what is wrong must still be told
        print(text, file=sys.stderr, end="", flush=True)
    body: dict[str, Any] = {"kind": type(error).__name__, "message": str(error), "hint": "", "known": False}
    if isinstance(error, RlctlError):
        body |= {"message": error.message, "hint": error.hint, "known": True}
    return Message(Kind.ERROR, body, call.verb if call else None, call.call if call else 0)

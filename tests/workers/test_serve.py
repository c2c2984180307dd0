"""The serve loop without a network, and a rank's place as its environment tells it."""

from __future__ import annotations

import gc
import os
import sys
from collections import deque
from concurrent.futures import Future

import numpy as np
import pytest

from backends import activity
from backends.protocol import Rank
from specs.errors import Cause, DataError, PeerGone, SamplerDied
from specs.wire.bodies import ErrorBody, Sleep
from specs.wire.messages import Kind, Message, Verb, parse
from workers.main import place_from_env
from workers.roles import actor, data, reward, rollout, score_learner
from workers.serve import Emit, Reply, Request, Working, body_of, error_message, serve, typed


class Tape:
    """A peer that plays requests and records answers, through the real wire format."""

    def __init__(self, *requests: Message) -> None:
        self.requests = deque((*requests, Message(Kind.CALL, verb=Verb.CLOSE, call=99)))
        self.answers: list[Message] = []

    def receive(self) -> Message:
        return parse(self.requests.popleft().frames())

    def received(self) -> Message | None:
        return self.receive() if len(self.requests) > 1 else None

    def send(self, message: Message) -> None:
        self.answers.append(parse(message.frames()))


def call(verb: Verb, number: int) -> Message:
    return Message(Kind.CALL, {"n": number}, verb, number)


def test_parts_then_the_answer_then_goodbye() -> None:
    def generate(message: Message, emit: Emit) -> Reply:
        emit({"part": 1}, {"x_T": np.arange(2)})
        return {"n": message.body["n"]}, {}

    tape = Tape(call(Verb.GENERATE, 4))
    serve(tape, {Verb.GENERATE: generate})
    kinds = [(answer.kind, answer.verb, answer.call) for answer in tape.answers]
    assert kinds == [
        (Kind.PART, Verb.GENERATE, 4),
        (Kind.ANSWER, Verb.GENERATE, 4),
        (Kind.ANSWER, Verb.CLOSE, 99),
    ]
    np.testing.assert_array_equal(tape.answers[0].tensors["x_T"], [0, 1])


def test_garbage_is_collected_once_the_role_is_built() -> None:
    seen = []

    def build(message: Message, emit: Emit) -> Reply:
        seen.append(gc.isenabled())
        return {}, {}

    gc.disable()  # as `main` does, for the imports
    try:
        serve(Tape(call(Verb.PING, 3), call(Verb.BUILD, 4)), {Verb.BUILD: build})
        assert (seen, gc.isenabled()) == ([False], True)
    finally:
        gc.unfreeze()
        gc.enable()


class Counting:
    """Work that replies to a call each time it has advanced so many rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.open = rounds, deque[tuple[int, Future[Reply]]]()

    def begin(self, message: Message, emit: Emit) -> Future[Reply]:
        self.open.append((message.body["n"], Future()))
        return self.open[-1][1]

    @property
    def pending(self) -> bool:
        return bool(self.open)

    def advance(self) -> None:
        self.rounds -= 1
        if self.rounds < 0:
            number, future = self.open.popleft()
            if number == 5:
                future.set_exception(DataError("row 5"))
            else:
                future.set_result(({"n": number}, {}))


def test_a_reply_comes_later_while_further_calls_are_received() -> None:
    work = Counting(rounds=3)
    handlers = Working({Verb.GENERATE: work.begin, Verb.PING: lambda message, emit: ({}, {})}, work)
    tape = Tape(call(Verb.GENERATE, 4), call(Verb.GENERATE, 5), call(Verb.PING, 6))
    serve(tape, handlers)
    kinds = [(answer.kind, answer.call) for answer in tape.answers]
    assert kinds == [(Kind.ANSWER, 6), (Kind.ANSWER, 4), (Kind.ERROR, 5), (Kind.ANSWER, 99)]
    assert activity.snapshot() is None, "nothing is served any more"


def test_the_loop_survives_errors_and_reports_them(capsys: pytest.CaptureFixture[str]) -> None:
    def known(message: Message, emit: Emit) -> Reply:
        raise DataError("row 3", hint="look")

    def unknown(message: Message, emit: Emit) -> Reply:
        raise ZeroDivisionError("division by zero")

    def unsendable(message: Message, emit: Emit) -> Reply:
        return {"x": object()}, {}

    tape = Tape(
        call(Verb.SCORE, 1),
        call(Verb.UPDATE, 2),
        call(Verb.SAVE, 3),
        call(Verb.LOAD, 4),
        Message(Kind.CALL, verb=Verb.PING, call=5),
    )
    serve(tape, {Verb.SCORE: known, Verb.UPDATE: unknown, Verb.SAVE: unsendable})
    bodies = [(answer.call, answer.kind, answer.body.get("kind"), answer.body.get("known")) for answer in tape.answers]
    assert bodies == [
        (1, Kind.ERROR, "DataError", True),
        (2, Kind.ERROR, "ZeroDivisionError", False),
        (3, Kind.ERROR, "TypeError", False),
        (4, Kind.ERROR, "ChannelError", True),
        (5, Kind.ANSWER, None, None),
        (99, Kind.ANSWER, None, None),
    ]
    assert (tape.answers[0].body["message"], tape.answers[0].body["hint"]) == ("row 3", "look")
    assert "ZeroDivisionError: division by zero" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("Connection closed by peer"), Cause.RAISED),  # words alone mean nothing
        (DataError("timed out"), Cause.RAISED),
        (PeerGone("rollout 1", "left"), Cause.PEER_GONE),
        (SamplerDied("its server ended"), Cause.ENGINE_DIED),
        (ConnectionResetError(104, "whatever"), Cause.PEER_GONE),
        (TimeoutError("whatever"), Cause.PEER_LATE),
    ],
)
def test_an_error_carries_its_typed_cause(error: Exception, cause: Cause) -> None:
    message = parse(error_message(error, call(Verb.UPDATE, 1)).frames())
    assert ErrorBody.of(message).cause is cause


def test_an_error_is_told_though_the_log_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log lies on the disk that was too full for the checkpoint."""

    def save(message: Message, emit: Emit) -> Reply:
        raise DataError("no space", hint="free some")

    tape = Tape(call(Verb.SAVE, 1), Message(Kind.CALL, verb=Verb.PING, call=2))
    with monkeypatch.context() as patched, open("/dev/full", "w", buffering=1) as full:
        patched.setattr(sys, "stderr", full)
        serve(tape, {Verb.SAVE: save})
        patched.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what is left in its buffer must go somewhere
    assert [answer.kind for answer in tape.answers] == [Kind.ERROR, Kind.ANSWER, Kind.ANSWER]
    assert (tape.answers[0].body["message"], tape.answers[0].body["hint"]) == ("no space", "free some")


def test_a_body_is_checked_before_the_handler_is_called() -> None:
    levels: list[int] = []

    def sleep(request: Request[Sleep], emit: Emit) -> Reply:
        levels.append(request.body.level)
        return {}, {}

    bodies = ({"level": 2}, {"level": "2"}, {}, {"level": 1, "depth": 3})
    tape = Tape(*(Message(Kind.CALL, body, Verb.SLEEP, call) for call, body in enumerate(bodies)), call(Verb.PING, 4))
    serve(tape, typed({Verb.SLEEP: sleep}))
    said = [answer.body["message"] for answer in tape.answers if answer.kind is Kind.ERROR]
    assert levels == [2]
    assert said == [
        "sleep: level: Input should be 1 or 2",
        "sleep: level: missing",
        "sleep: depth: unknown key",
        "ping: n: unknown key",
    ]


def test_every_verb_has_a_body_and_none_takes_a_stranger() -> None:
    roles = (actor.Actor, score_learner.ScoreLearner, rollout.Rollout, data.Data, reward.Reward)
    served = [(verb, getattr(role, verb)) for role in roles for verb in Verb if hasattr(role, verb)]
    assert {verb for verb, _ in served} == set(Verb) - {Verb.PING}, "which the serve loop answers"
    assert all(body_of(handler).model_config.get("extra") == "forbid" for _, handler in served)


@pytest.mark.parametrize(
    ("env", "index", "rank"),
    [
        ({}, 0, Rank(0, 1, 0)),
        ({"RLCTL_RANK": "1", "RLCTL_SIZE": "2", "LOCAL_RANK": "1"}, 1, Rank(1, 2, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "RLCTL_GROUP_SIZE": "2"}, 1, Rank(1, 2, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "RLCTL_GROUP_SIZE": "1"}, 1, Rank(1, 1, 1)),
    ],
)
def test_place(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], index: int, rank: Rank) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RLCTL_RANK", "RLCTL_SIZE", "RLCTL_GROUP_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert place_from_env() == (index, rank)

"""All ranks of a role in one process, which answer at once: the far end of `scripts/simulate.py`.

    _simulated_ranks.py ROLE COUNT

Each has a connection of its own, proves itself, beats and answers as a real rank does. What a verb gives is of the
right shape, and zero.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import zmq

from specs.wire.messages import COLUMNS, Kind, Message, Verb, parse
from workers.connection import BEAT_FRAMES, Dial
from workers.proof import make_nonce, make_proof


class SimulatedRank:
    """One connection. What all ranks are asked alike is answered once for all."""

    asked: ClassVar[list[bytes]] = []
    answer: ClassVar[list[bytes | bytearray | memoryview]] = []

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], dial: Dial) -> None:
        self.dial, self.nonce = dial, make_nonce()
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.SNDHWM, 0)
        self.dealer.setsockopt(zmq.RCVHWM, 0)
        self.dealer.curve_publickey, self.dealer.curve_secretkey = zmq.curve_keypair()
        self.dealer.curve_serverkey = dial.server_key.encode()
        self.dealer.connect(dial.address)
        self.welcome = False

    def greet(self) -> None:
        who = {"role": self.dial.role, "rank": self.dial.rank, "pid": os.getpid(), "host": socket.gethostname()}
        self._send(Message(Kind.HELLO, {**who, "nonce": self.nonce}))

    def serve(self) -> bool:
        """What has arrived. False: the run is over."""
        while True:
            try:
                frames = self.dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            if frames == BEAT_FRAMES:
                continue
            if len(frames) == 1 and frames == SimulatedRank.asked:
                self.dealer.send_multipart(SimulatedRank.answer)
                continue
            message = parse([*frames])
            if message.kind is Kind.CHALLENGE:
                self._send(Message(Kind.PROOF, {"proof": self._proof(str(message.body["nonce"]))}))
            elif message.kind is Kind.WELCOME:
                self.welcome = True
            elif message.kind is Kind.CALL:
                answer = answer_to(message).frames()
                self.dealer.send_multipart(answer, copy=len(answer) == 1)
                if len(frames) == 1 and message.verb is not Verb.CLOSE:
                    SimulatedRank.asked, SimulatedRank.answer = frames, answer
                if message.verb is Verb.CLOSE:
                    return False
            else:
                raise SystemExit(f"unexpected: {message}")

    def _proof(self, driver_nonce: str) -> str:
        bound = {"role": self.dial.role, "rank_nonce": self.nonce, "driver_nonce": driver_nonce}
        return make_proof(self.dial.secret, "rank", rank=self.dial.rank, **bound)

    def _send(self, message: Message) -> None:
        self.dealer.send_multipart(message.frames(), copy=False)


def answer_to(call: Message) -> Message:
    started = time.monotonic()
    assert call.verb is not None
    gives = COLUMNS[call.verb].gives if call.verb in COLUMNS else ()
    tensors = {name: np.zeros(len(call.tensors["tokens_T"]), dtype=np.float32) for name in gives}
    return Message(Kind.ANSWER, {}, call.verb, call.call, tensors, (started, time.monotonic()))


def main() -> None:
    role, count = sys.argv[1], int(sys.argv[2])
    first = Dial.from_env(role, 0)
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, count + 64)
    ranks = [SimulatedRank(context, replace(first, rank=rank)) for rank in range(count)]
    by_socket = {rank.dealer: rank for rank in ranks}
    poller = zmq.Poller()
    for rank in ranks:
        poller.register(rank.dealer, zmq.POLLIN)
    waiting, next_beat = list(reversed(ranks)), time.monotonic() + 1.0
    while True:
        for rank in [waiting.pop() for _ in range(min(32, len(waiting)))]:
            rank.greet()
        for dealer, _ in poller.poll(20 if waiting else 500):
            if not by_socket[dealer].serve():
                time.sleep(0.5)
                os._exit(0)
        if time.monotonic() > next_beat:
            next_beat = time.monotonic() + 1.0
            for rank in ranks:
                if rank.welcome:
                    rank.dealer.send_multipart(BEAT_FRAMES)


main()

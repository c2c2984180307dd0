"""A role that does what the `ping` body names: the ranks of the channel's tests."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from backends import activity
from backends.protocol import Rank
from backends.weights import lost_peers
from specs.errors import DataError, PeerGone
from specs.wire.messages import Message, Verb
from workers.serve import Emit, Handler, Reply


def handlers(rank: Rank) -> Mapping[Verb, Handler]:
    """Handlers of one rank; `{"rank": N}` in a body confines what it asks for to that rank."""

    def ping(message: Message, emit: Emit) -> Reply:
        body = dict(message.body)
        if body.get("rank", rank.rank) != rank.rank:
            return {"rank": rank.rank}, {}
        _misbehave(body)
        for part in range(int(body.get("parts", 0))):
            emit({"part": part, "rank": rank.rank}, message.tensors)
        if body.get("unsendable"):
            return {"set": {1, 2}}, {}
        time.sleep(float(body.get("sleep_s", 0)))
        _misbehave({"do": body.get("then")})
        place = {"rank": rank.rank, "world_size": rank.world_size, "local_rank": rank.local_rank, "pid": os.getpid()}
        wanted = {name: os.environ.get(name) for name in body.get("env", ())}
        return {**place, "env": wanted, "echo": body}, dict(message.tensors)

    return {Verb.PING: ping, Verb.BUILD: ping}


def sync_handlers(rank: Rank) -> Mapping[Verb, Handler]:
    """The same under the names of verbs in which ranks of several roles meet."""
    ping = handlers(rank)[Verb.PING]
    return {Verb.EXPORT_BUCKET: ping, Verb.IMPORT_BUCKET: ping}


def waiting(rank: Rank) -> Mapping[Verb, Handler]:
    """`generate` is answered, from another thread, when `turns` brings its name in the body."""
    open_calls: dict[str, Future[Reply]] = {}

    def generate(message: Message, emit: Emit) -> Future[Reply]:
        future = open_calls[str(message.body["name"])] = Future()
        emit({"begun": message.body["name"]}, {})
        return future

    def turns(message: Message, emit: Emit) -> Reply:
        future = open_calls.pop(str(message.body["name"]))
        threading.Timer(0.05, future.set_result, [({"name": message.body["name"]}, {})]).start()
        return {"open": len(open_calls)}, {}

    return {**handlers(rank), Verb.GENERATE: generate, Verb.TURNS: turns}


def graders(rank: Rank) -> Mapping[Verb, Handler]:
    """They give each sample its id for a score, and note in PROBE_FOLDER whose parts these were. The one of PROBE_LOST
    ends at its second part; the others wait at theirs until it has. The third waits at its first for the gate."""
    folder, lost, seen = Path(os.environ["PROBE_FOLDER"]), int(os.environ["PROBE_LOST"]), []

    def score(message: Message, emit: Emit) -> Reply:
        seen.append(message)
        id_B = message.tensors["id_B"]
        if rank.rank == lost and len(seen) > 1 and not (folder / "died").exists():
            (folder / "died").write_text(str(id_B[0]))
            os.kill(os.getpid(), signal.SIGKILL)
        wanted = [folder / "gate"] if rank.rank == 2 else []
        if rank.rank != lost and len(seen) > 1:
            wanted.append(folder / "died")
        while not all(file.exists() for file in wanted):
            time.sleep(0.02)
        with (folder / f"graded_by_{rank.rank}").open("a") as file:
            file.write(f"{id_B[0]}\n")
        return {"failures": {}, "samples": []}, {"reward_B": id_B, "scored_B": id_B}

    return {**handlers(rank), Verb.SCORE: score}


def gated(rank: Rank) -> Mapping[Verb, Handler]:
    """The second replica cannot be made; the fourth is built when the gate is open."""
    if rank.rank == 1:
        raise ImportError(f"no engine for rank {rank.rank}")
    ping = handlers(rank)[Verb.PING]

    def build(message: Message, emit: Emit) -> Reply:
        while rank.rank == 3 and not os.path.exists(os.environ["PROBE_GATE"]):
            time.sleep(0.05)
        return ping(message, emit)

    return {Verb.PING: ping, Verb.BUILD: build}


def broken(rank: Rank) -> Mapping[Verb, Handler]:
    raise ImportError(f"no engine for rank {rank.rank}")


def _misbehave(body: Mapping[str, object]) -> None:
    match body.get("do"):
        case "raise":
            raise ValueError("seven is not a number")
        case "raise known":
            raise DataError("row 3 has no prompt", hint="drop it")
        case "wait for a peer":
            while True:
                lost_peers.check("the other rank")
                time.sleep(0.02)
        case "lose a peer":
            raise PeerGone("the other rank", "left")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "hang":
            time.sleep(600)
        case "hang in native code":  # the first lets other threads run, the second does not
            ctypes.CDLL(None).sleep(600)
        case "hold the lock":
            sum(range(10**12))
        case "await":
            while not os.path.exists(str(body["file"])):
                pass
        case "crawl":  # slow, but it moves
            activity.describe("ping of many parts", "token", counted=True)
            while not os.path.exists(str(body["file"])):
                time.sleep(0.05)
                activity.count("token")
        case "meet":  # the other ranks of the group, as an engine does
            import torch

            from backends.train.role_group import join_group

            join_group(Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])), "cpu")
            torch.distributed.all_reduce(torch.ones(1))

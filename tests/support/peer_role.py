"""Ranks that wait for each other, really: over gloo in a role, over shared memory between two roles. One may end."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from backends.protocol import Rank
from specs.memory_parts import BLOCK_BYTES, BLOCKS
from specs.wire.messages import Message, Verb
from workers.serve import Emit, Handler, Reply
from workers.transports.base import Readers
from workers.transports.shm import ShmReader, ShmWriter

NBYTES = 4 * BLOCKS * BLOCK_BYTES


def gloo(rank: Rank) -> Mapping[Verb, Handler]:
    """PING: sums over the ranks; `victim` ends in the middle."""

    def ping(message: Message, emit: Emit) -> Reply:
        import torch
        from torch import distributed as dist

        from backends.train.role_group import join_group

        join_group(rank, "cpu")
        total = torch.ones(1000)
        dist.all_reduce(total)
        if message.body.get("victim") == rank.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total)
        return {"total": float(total[0])}, {}

    return {Verb.PING: ping}


def shm(rank: Rank) -> Mapping[Verb, Handler]:
    """The actor's verbs and the rollout's, for one weight of `NBYTES`. The `victim` ends in it."""
    writer, reader = ShmWriter({}), ShmReader({}, rank.rank)

    def export_begin(message: Message, emit: Emit) -> Reply:
        return writer.begin([], 1, Readers([[0]])), {}

    def export_bucket(message: Message, emit: Emit) -> Reply:
        for number, block_U in enumerate(writer.blocks(NBYTES)):
            block_U[:] = number
            _end_after(number, message)
        writer.flush()
        return {}, {}

    def import_begin(message: Message, emit: Emit) -> Reply:
        reader.begin(message.body["offer"])
        return {}, {}

    def import_bucket(message: Message, emit: Emit) -> Reply:
        for number, _ in enumerate(reader.blocks(NBYTES)):
            _end_after(number, message)
        reader.flush()
        return {}, {}

    return {
        Verb.EXPORT_BEGIN: export_begin,
        Verb.EXPORT_BUCKET: export_bucket,
        Verb.IMPORT_BEGIN: import_begin,
        Verb.IMPORT_BUCKET: import_bucket,
    }


def _end_after(number: int, message: Message) -> None:
    if message.body.get("victim") and number == BLOCKS + 1:
        os.kill(os.getpid(), signal.SIGKILL)

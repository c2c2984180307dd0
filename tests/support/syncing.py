"""An actor and rollouts with their real handlers in this process, and a sync between them that can be spoiled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from local_group import LocalGroup
from train_helpers import model_config, train_config

from backends.protocol import Rank
from rlctl.loop.residency import Residency
from rlctl.loop.sync import SHM, WeightSync
from specs.rounding import Tolerance
from specs.schema.engines.ddp_table import DdpTable
from specs.schema.engines.fake_tables import FakeRolloutTable, FakeTrainTable
from specs.schema.engines.torch_rollout_table import TorchRolloutTable
from specs.schema.role_section import Optimizer
from specs.wire.messages import Verb
from specs.wire.role_config import RolloutConfig
from workers.roles import handlers_of
from workers.roles.actor import Actor
from workers.roles.rollout import Rollout
from workers.serve import Working

TINY = Path(__file__).parents[2] / "specs" / "builtin" / "tiny-digits"
ENGINES = {
    "fake": (FakeTrainTable(), FakeRolloutTable()),
    "torch": (DdpTable(), TorchRolloutTable(max_sequences=4)),
}


def build(kind, replicas=1, dtype="fp32"):
    """Build an actor in fp32 and rollouts in `dtype`; return them, their groups and the size of the vocabulary."""
    train, sample = ENGINES[kind]
    actor, rollouts = Actor(Rank()), [Rollout(Rank(rank=rank)) for rank in range(replicas)]
    config = train_config(
        TINY, engine=train, optimizer=Optimizer(lr=0.1), micro_batch_tokens=256,
        model={"seed": 1, "max_sequence_tokens": 24},
    )  # fmt: skip
    model = model_config(TINY, seed=2, dtype=dtype, max_sequence_tokens=24)
    sampler = RolloutConfig(model=model, engine=sample, max_prompt_tokens=12, max_response_tokens=12, stop=())
    samplers = LocalGroup("rollout", [Working(handlers_of(rollout), rollout) for rollout in rollouts])
    groups = LocalGroup("actor", [handlers_of(actor)]), samplers
    vocab = groups[0].call(Verb.BUILD, config.model_dump(mode="json"))[0].body["model"]["vocab_size"]
    groups[1].call(Verb.BUILD, sampler.model_dump(mode="json"))
    return actor, rollouts, groups, vocab


def sync_of(groups, vocab, bucket_bytes=4096, shared=False, transport=SHM):
    actor, rollout = groups
    residency = Residency(shared, [actor, rollout])
    return WeightSync(
        actor, rollout, residency, transport=transport, dtype="fp32", bucket_bytes=bucket_bytes, temperature=0.7,
        tolerance=Tolerance(2e-3), vocab=vocab,
    )  # fmt: skip


def send_instead(weight, bytes_U):
    """Let a weight put other bytes than its own on the transport, of which it has the right checksum."""
    own = weight.copy_to(np.empty(weight.spec.nbytes, dtype=np.uint8))

    def copy_in_blocks(blocks):
        start = 0
        for block_U in blocks:
            block_U[:] = bytes_U[start : start + len(block_U)]
            start += len(block_U)
        return own

    def copy_to(buffer_U):
        digest = type(weight).copy_to(weight, buffer_U)
        memoryview(buffer_U if isinstance(buffer_U, np.ndarray) else buffer_U.numpy())[:] = memoryview(bytes_U)
        return digest

    weight.copy_to, weight.copy_in_blocks = copy_to, copy_in_blocks


def do_not_copy(weight):
    """Let a weight leave on the transport what lies there."""
    own = weight.copy_to(np.empty(weight.spec.nbytes, dtype=np.uint8))

    def copy_in_blocks(blocks):
        for _ in blocks:
            pass
        return own

    weight.copy_to, weight.copy_in_blocks = lambda buffer: own, copy_in_blocks


def wire_bytes(weight):
    buffer_U = np.empty(weight.spec.nbytes, dtype=np.uint8)
    weight.copy_to(buffer_U)
    return buffer_U


class Sabotage:
    """Replaces a handler of a rank by one that does its work and then spoils it."""

    def __init__(self, group, verb, spoil, rank=0):
        inner = group.handlers[rank][verb]

        def handler(message, emit):
            body, tensors = inner(message, emit)
            return spoil(dict(body)), tensors

        group.handlers[rank] = {**group.handlers[rank], verb: handler}

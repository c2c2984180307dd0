"""An actor and rollouts with their real handlers in this process, and a sync between them that can be spoiled."""

from __future__ import annotations

from pathlib import Path

from local_group import LocalGroup

from backends.protocol import Rank
from rlctl.residency import Residency
from rlctl.sync import WeightSync
from specs.messages import Verb
from specs.role_config import ModelConfig, RolloutConfig, TrainConfig
from specs.schema import DdpEngine, FakeRolloutEngine, FakeTrainEngine, Optimizer, TorchRolloutEngine
from workers.actor import Actor
from workers.rollout import Rollout

TINY = Path(__file__).parents[2] / "specs" / "builtin" / "tiny-digits"
ENGINES = {
    "fake": (FakeTrainEngine(), FakeRolloutEngine()),
    "torch": (DdpEngine(), TorchRolloutEngine(max_sequences=4)),
}


def model(seed=1):
    return ModelConfig(
        path=str(TINY), from_scratch=True, seed=seed, dtype="fp32", attn_implementation="auto",
        trust_remote_code=False, device="cpu", max_sequence_tokens=24,
    )  # fmt: skip


def build(kind, replicas=1):
    train, sample = ENGINES[kind]
    actor, rollouts = Actor(Rank()), [Rollout(Rank()) for _ in range(replicas)]
    config = TrainConfig(
        role="actor", model=model(), engine=train, optimizer=Optimizer(lr=0.1), total_optimizer_steps=10,
        micro_batch_tokens=256, gradient_checkpointing=False, temperature=0.7,
    )  # fmt: skip
    sampler = RolloutConfig(model=model(2), engine=sample, max_prompt_tokens=12, max_response_tokens=12, stop=())
    groups = LocalGroup("actor", [actor.handlers()]), LocalGroup("rollout", [r.handlers() for r in rollouts])
    vocab = groups[0].call(Verb.BUILD, config.model_dump(mode="json"))[0].body["model"]["vocab_size"]
    groups[1].call(Verb.BUILD, sampler.model_dump(mode="json"))
    return actor, rollouts, groups, vocab


def sync_of(groups, vocab, bucket_bytes=4096, shared=False):
    actor, rollout = groups
    residency = Residency(shared, [actor], rollout)
    return WeightSync(
        actor, rollout, residency, dtype="fp32", bucket_bytes=bucket_bytes, temperature=0.7, max_gap=2e-3, vocab=vocab
    )


class Sabotage:
    """Replaces a handler of a rank by one that does its work and then spoils it."""

    def __init__(self, group, verb, spoil, rank=0):
        inner = group.handlers[rank][verb]

        def handler(message, emit):
            body, tensors = inner(message, emit)
            return spoil(dict(body)), tensors

        group.handlers[rank] = {**group.handlers[rank], verb: handler}

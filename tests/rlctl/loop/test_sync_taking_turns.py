"""Syncs on shared devices, each after a sleep of level 2: in which order roles move, and that every fault is caught."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from syncing import ENGINES, build, do_not_copy, sync_of

from rlctl.loop.recovery import SteadySync
from rlctl.processes.calls import RanksFailed
from specs.errors import SyncError
from specs.wire.messages import Verb

pytestmark = pytest.mark.slow


class Turns:
    """An actor and two rollouts that share devices, in the middle of a run: one whole cycle is behind them."""

    def __init__(self, kind):
        actor, rollouts, groups, vocab = build(kind, replicas=2)
        self.actor, self.engines, self.groups = actor.engine, [rollout.engine for rollout in rollouts], groups
        self.log = []
        for group in groups:
            group.post = self._logged(group, group.post)
        groups[1].call(Verb.SLEEP, {"level": 2})
        self.sync = sync_of(groups, vocab, shared=True)
        self.cycle()
        self.learn()

    def _logged(self, group, post):
        def logged(verb, body=None, tensors=None, **how):
            self.log.append((group.role, verb, *getattr(body, "tags", ())))
            return post(verb, body, tensors, **how)

        return logged

    def learn(self):
        """The rollouts sleep, level 2; the actor changes every weight."""
        self.sync.residency.enter("train")
        for weight in self.actor_weights():
            weight *= 1.25

    def actor_weights(self):
        if hasattr(self.actor, "flat"):
            return [self.actor.flat.master_P.numpy()]
        return list(self.actor.parameters.values())

    def cycle(self):
        self.sync.residency.enter("sync")
        return self.sync.run()

    def name(self, dims=1):
        """Of a weight."""
        return next(spec.name for spec in self.actor.weight_specs("fp32") if len(spec.shape) >= dims)


def held(engine):
    """What a rollout computes with, as arrays that share its memory."""
    return {name: np.asarray(weight) for name, weight in engine._weights.items()}


@pytest.fixture(params=ENGINES)
def turns(request):
    made = Turns(request.param)
    yield made
    for group in made.groups:
        group.call(Verb.CLOSE)


def test_the_order_of_a_sync(turns):
    """As docs/architecture.md draws it: each side probes while it has the device."""
    turns.log.clear()
    turns.cycle()
    assert turns.log == [
        ("rollout", Verb.WAKE, "weights"),
        ("rollout", Verb.IMPORT_FORM),
        ("actor", Verb.EXPORT_BEGIN),
        ("rollout", Verb.IMPORT_BEGIN),
        ("actor", Verb.EXPORT_BUCKET),
        ("rollout", Verb.IMPORT_BUCKET),
        ("rollout", Verb.IMPORT_END),
        ("actor", Verb.EXPORT_END),
        ("actor", Verb.PROBE),
        ("actor", Verb.OFFLOAD),
        ("rollout", Verb.WAKE, "kv_cache"),
        ("rollout", Verb.PROBE),
    ]
    assert turns.sync.residency.phase == "rollout"
    for engine in turns.engines:
        assert engine._awake == {"weights", "kv_cache"}
    turns.log.clear()
    turns.sync.residency.enter("rollout")
    assert turns.log == [], "a sync ends where sampling begins"


def test_after_a_probe_that_lost_a_replica_for_good_the_actor_has_the_device_again(turns):
    """The run continues without it: nothing is to be restored before the next pass."""
    rollout = turns.groups[1]
    turns.groups[0].settle = rollout.settle = lambda: None
    post = rollout.post

    def loses_a_replica(verb, *given, **how):
        if verb is Verb.PROBE:
            rollout.here, rollout.post = [0], post
            raise RanksFailed(SimpleNamespace(verb=verb, failed={1}))
        return post(verb, *given, **how)

    turns.sync.residency.enter("sync")
    turns.log.clear()
    rollout.post = loses_a_replica
    recovery = SimpleNamespace(due=False, groups=None, ranks=None, restore=lambda *_: None)
    assert SteadySync(turns.sync.residency, turns.sync, recovery).run().weights > 0
    first, again = (at for at, (_, verb, *_) in enumerate(turns.log) if verb is Verb.EXPORT_BEGIN)
    moves = (Verb.OFFLOAD, Verb.ONLOAD, Verb.SLEEP, Verb.WAKE)
    assert [one for one in turns.log[first:again] if one[1] in moves] == [
        ("actor", Verb.OFFLOAD),
        ("rollout", Verb.WAKE, "kv_cache"),
        ("rollout", Verb.SLEEP),
        ("actor", Verb.ONLOAD),
        ("rollout", Verb.WAKE, "weights"),
    ]
    rollout.here = [0, 1]  # to be closed


def test_stale_after_sleep_and_wake(turns):
    """The ring still holds other bytes where one weight should be: its copy was skipped."""
    name, export = turns.name(dims=2), turns.actor.export_weights

    def stale(*asked):
        for weight in export(*asked):
            if weight.spec.name == name:
                do_not_copy(weight)
            yield weight

    turns.actor.export_weights = stale
    with pytest.raises(SyncError, match=f"weight {name} differs after the sync"):
        turns.cycle()


def test_wakes_with_old_weights_though_the_bytes_arrived(turns):
    """Every checksum agreed; with its KV cache the second replica gets back what it had before it slept. A probe that
    asked it before, beside the trainers, would have seen nothing."""
    turns.cycle()
    engine = turns.engines[1]
    old, wake = {name: weight.copy() for name, weight in held(engine).items()}, engine.wake

    def wake_with_old(tags):
        wake(tags)
        if "kv_cache" in tags:
            for name, weight in held(engine).items():
                weight[...] = old[name]

    engine.wake = wake_with_old
    turns.learn()
    with pytest.raises(SyncError, match="right bytes, but rollout 1 does not behave"):
        turns.cycle()

"""Weight sync between real engines through the real handlers: right, and fatal when anything is off."""

import os
from dataclasses import replace

import numpy as np
import pytest
from syncing import ENGINES, Sabotage, build, sync_of

from rlctl.loop.sync import _by_host, _form_for_all
from rlctl.loop.weight_transport import Transport
from specs.errors import NotFiniteError, SyncError
from specs.wire.bodies import WantedForm
from specs.wire.messages import Verb


@pytest.fixture(params=ENGINES)
def built(request):
    actor, rollouts, groups, vocab = build(request.param, replicas=2)
    yield actor, rollouts, groups, vocab
    for group in groups:
        group.call(Verb.CLOSE)


def test_sync_verifies_and_reuses_its_segments(built):
    actor, _, groups, vocab = built
    sync = sync_of(groups, vocab)
    first = sync.run()
    ring = actor.exporter.writer.segment
    second = sync.run()
    assert first.nbytes == second.nbytes == sum(spec.nbytes for spec in actor.engine.weight_specs("fp32"))
    assert first.probe_gap < 1e-4
    metrics = first.metrics()
    assert metrics["sync/verified"] is True
    assert 0 < metrics["sync/checksum_s"] < 2 * first.seconds  # of two ends, each of which takes at most as long
    assert metrics["sync/probe_s"] > 0
    assert actor.exporter.writer.segment is ring
    # unlinked as soon as everybody has them: a crash leaves nothing behind
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"rlctl-{os.getpid()}-")]


def test_weights_are_announced_when_somebody_does_not_know_them(built):
    """Not at every sync: hundreds of names and shapes would be written, read and compared five times each."""
    actor, _, groups, vocab = built
    announced = []
    Sabotage(groups[0], Verb.EXPORT_BEGIN, lambda body: announced.append(body["specs"]) or body)
    sync = sync_of(groups, vocab)
    first, second = sync.run(), sync.run()
    assert (first.weights, first.nbytes) == (second.weights, second.nbytes)
    sync.forget_readers()
    sync.run()
    told = [[spec["name"] for spec in specs or ()] for specs in announced]
    names = [spec.name for spec in actor.engine.weight_specs("fp32")]
    assert told == [names, [], names]

    specs = actor.engine.weight_specs
    actor.engine.weight_specs = lambda dtype, form: [replace(specs(dtype)[0], name="other"), *specs(dtype)[1:]]
    with pytest.raises(SyncError, match=f"weight {names[0]} is held by the rollout but not sent by the actor"):
        sync.run()
    assert announced[-1][0]["name"] == "other"


def test_stale_in_the_rollout(built):
    """The second replica reports a weight as loaded but keeps its own."""
    actor, rollouts, groups, vocab = built
    name, engine = actor.engine.weight_specs("fp32")[0].name, rollouts[1].engine
    engine.import_in_blocks = spoiled(engine.import_in_blocks, name)
    with pytest.raises(SyncError, match=f"weight {name} differs after the sync: .* rollout 1"):
        sync_of(groups, vocab).run()


def spoiled(load, name):
    """A load that reports another checksum for one weight."""

    def with_other(spec, data):
        digest = load(spec, data)
        return "0" * 16 if spec.name == name else digest

    return with_other


@pytest.mark.parametrize("kind", ["shm", "folder", "folder in deltas", "group"])
def test_replicas_keep_their_names_when_others_go_and_come(tmp_path, kind):
    """The first of three is dropped, and one that had not come before joins: the readers have gaps in their ranks, and
    are met anew. Nothing is kept for one that will not come back."""
    actor, rollouts, groups, vocab = build("fake", replicas=4)
    rollout = groups[1]
    kind, _, deltas = kind.partition(" in ")
    folder = {"folder": str(tmp_path), "delta": deltas != ""}
    options = {"folder": folder, "group": {"device": "cpu", "address": "127.0.0.1"}}.get(kind, {})
    sync = sync_of(groups, vocab, transport=Transport(kind, "", options))
    rollout.here = [0, 1, 2]
    sync.run()
    for here in ([1, 2], [1, 2, 3], [1, 3]):
        rollout.here = here
        sync.run()
        sync.run()
        assert not os.listdir(tmp_path)
    name, engine = actor.engine.weight_specs("fp32")[0].name, rollouts[3].engine
    for how in ("import_in_blocks", "import_weight"):
        setattr(engine, how, spoiled(getattr(engine, how), name))
    with pytest.raises(SyncError, match=f"weight {name} differs after the sync: .* rollout 3 0000"):
        sync.run()
    rollout.here = [0, 1, 2, 3]
    for group in groups:
        group.call(Verb.CLOSE)


@pytest.mark.parametrize("off", [-0.01, float("nan")])
def test_right_bytes_wrong_behaviour(built, off):
    """Every checksum agrees, but the sampler computes with something else: only the probe can see that."""
    _, rollouts, groups, vocab = built
    engine = rollouts[0].engine
    score = engine.score
    engine.score = lambda batch, temperature: (score(batch, temperature) + off).astype(np.float32)
    with pytest.raises(SyncError, match="right bytes, but rollout 0 does not behave"):
        sync_of(groups, vocab).run()


def test_an_actor_that_gives_nan_is_to_blame_and_not_the_sampler(built, monkeypatch):
    actor, _, groups, vocab = built
    forward = actor.engine.forward
    monkeypatch.setattr(actor.engine, "forward", lambda batch: forward(batch) * np.float32("nan"))
    with pytest.raises(NotFiniteError, match="the actor's log-probs of the probe are not finite") as caught:
        sync_of(groups, vocab).run()
    assert "actor.optimizer.lr" in caught.value.hint


@pytest.mark.parametrize(
    ("forms", "sent"),
    [
        (("merged", "merged"), "merged"),
        (("adapters", "adapters"), "adapters"),
        (("adapters", "apart"), "apart"),  # one was started anew
    ],
)
def test_what_one_replica_lacks_goes_to_all(forms, sent):
    assert _form_for_all([WantedForm(form=form) for form in forms]) == sent


def test_replicas_are_grouped_by_the_host_that_they_say_they_are_on():
    said = ["a", "b", "a", "", "", "b"]
    answers = [WantedForm(form="merged", replica=replica, host=host) for replica, host in enumerate(said)]
    assert _by_host(answers) == [[0, 2], [1, 5], [3], [4]]

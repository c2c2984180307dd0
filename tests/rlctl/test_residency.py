"""The residency table: who moves when, and in which order."""

from rlctl.residency import Residency
from specs.messages import Verb


class Recorder:
    """Notes verbs; `log` is shared, so that the order between roles shows."""

    def __init__(self, role, log):
        self.role, self.log = role, log

    def post(self, verb, body=None, *, step=None):
        self.log.append((self.role, verb, (body or {}).get("tags") or (body or {}).get("level")))
        return self

    def call(self, verb, body=None, *, step=None):
        self.post(verb, body, step=step)
        return []

    def result(self):
        self.log.append((self.role, "done", None))
        return []


def make(shared):
    log = []
    return Residency(shared, [Recorder("actor", log), Recorder("ref", log)], Recorder("rollout", log)), log


def test_nothing_moves_on_separate_devices():
    residency, log = make(shared=False)
    for phase in ("sync", "generate", "learn", "sync", "generate"):
        residency.enter(phase)
    assert log == []


def test_order_of_a_step_on_shared_devices():
    residency, log = make(shared=True)
    residency.enter("sync")
    log.clear()
    residency.enter("generate")
    assert log == [
        ("actor", Verb.OFFLOAD, None),
        ("ref", Verb.OFFLOAD, None),
        ("actor", "done", None),
        ("ref", "done", None),  # all ranks have offloaded before the KV cache comes back
        ("rollout", Verb.WAKE, ["kv_cache"]),
    ]
    log.clear()
    residency.enter("learn")
    assert [(role, verb) for role, verb, _ in log if verb != "done"] == [
        ("rollout", Verb.SLEEP),
        ("actor", Verb.ONLOAD),
        ("ref", Verb.ONLOAD),
    ]
    assert log[0][2] == 2
    log.clear()
    residency.enter("sync")
    assert log == [("rollout", Verb.WAKE, ["weights"])]
    log.clear()
    residency.enter("sync")
    assert log == []

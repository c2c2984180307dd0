"""The residency table: who moves when, in which order, and what memory that takes and gives."""

from rlctl.residency import Residency
from specs.messages import Kind, Message, Verb


class Recorder:
    """Notes verbs; `log` is shared, so that the order between roles shows. Two ranks, which hold 1 and 2 GiB before
    the first move and a GiB more after each."""

    def __init__(self, role, log):
        self.role, self.log, self.held = role, log, [1.0, 2.0]

    def post(self, verb, body=None, *, step=None):
        self.log.append((self.role, verb, (body or {}).get("tags") or (body or {}).get("level")))
        return self

    def call(self, verb, body=None, *, step=None):
        self.post(verb, body, step=step)
        return self._answers()

    def result(self):
        self.log.append((self.role, "done", None))
        return self._answers()

    def _answers(self):
        bodies = [{"before_GiB": held, "after_GiB": held + 1} for held in self.held]
        self.held = [held + 1 for held in self.held]
        return [Message(Kind.ANSWER, body) for body in bodies]


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


def test_where_adapters_alone_follow_the_weights_stay_in_host_memory():
    log = []
    residency = Residency(True, [Recorder("actor", log)], Recorder("rollout", log), 1)
    for phase in ("sync", "generate", "learn"):
        residency.enter(phase)
    assert [what for role, verb, what in log if (role, verb) == ("rollout", Verb.SLEEP)] == [1]


def test_every_move_is_measured_by_its_largest_rank():
    residency, _ = make(shared=True)
    assert residency.take_memory() == {}
    residency.enter("sync")
    residency.enter("generate")
    residency.enter("learn")
    measured = {"before_offload": 2.0, "offloaded": 3.0, "before_onload": 3.0, "onloaded": 4.0}
    expected = {f"mem/{role}_{what}_GiB": value for role in ("actor", "ref") for what, value in measured.items()}
    # Of the two wakes the last one, of the KV cache.
    slept = {"before_wake": 3.0, "awake": 4.0, "before_sleep": 4.0, "asleep": 5.0}
    expected |= {f"mem/rollout_{what}_GiB": value for what, value in slept.items()}
    assert residency.take_memory() == expected
    assert residency.take_memory() == {}

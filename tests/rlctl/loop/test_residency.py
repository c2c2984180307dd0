"""The residency table: who moves when, in which order, and what memory that takes and gives."""

import pytest

from rlctl.loop.residency import MODEL, MOVES, NOTHING, TABLE, Moves, Residency
from specs.phases import Phase
from specs.schema.roles import ROLES, Role
from specs.wire.messages import Kind, Message, Verb


class Recorder:
    """Notes verbs; `log` is shared, so that the order between roles shows. Two ranks, which hold 1 and 2 GiB before
    the first move and a GiB more after each."""

    def __init__(self, role, log):
        self.role, self.log, self.held = role, log, [1.0, 2.0]
        self.interrupted = False

    def post(self, verb, body=None, *, step=None):
        self.log.append((self.role, verb, getattr(body, "tags", None) or getattr(body, "level", None)))
        return self

    def result(self):
        if self.interrupted:
            raise KeyboardInterrupt
        self.log.append((self.role, "done", None))
        return self._answers()

    def _answers(self):
        bodies = [{"before_GiB": held, "after_GiB": held + 1} for held in self.held]
        self.held = [held + 1 for held in self.held]
        return [Message(Kind.ANSWER, body) for body in bodies]


def make(shared):
    log = []
    return Residency(shared, [Recorder(role, log) for role in ("rollout", "ref", "actor")]), log


def test_nothing_moves_on_separate_devices():
    residency, log = make(shared=False)
    for phase in ("sync", "rollout", "train", "sync", "rollout"):
        residency.enter(phase)
    assert log == []


def test_order_of_a_step_on_shared_devices():
    residency, log = make(shared=True)
    residency.enter("sync")
    log.clear()
    residency.enter("rollout")
    assert log == [
        ("actor", Verb.OFFLOAD, None),
        ("ref", Verb.OFFLOAD, None),
        ("actor", "done", None),
        ("ref", "done", None),  # all ranks have offloaded before the KV cache comes back
        ("rollout", Verb.WAKE, ["kv_cache"]),
        ("rollout", "done", None),
    ]
    log.clear()
    residency.enter("train")
    assert [(role, verb) for role, verb, _ in log if verb != "done"] == [
        ("rollout", Verb.SLEEP),
        ("actor", Verb.ONLOAD),
        ("ref", Verb.ONLOAD),
    ]
    assert log[0][2] == 2
    log.clear()
    residency.enter("sync")
    assert log == [("rollout", Verb.WAKE, ["weights"]), ("rollout", "done", None)]
    log.clear()
    residency.enter("sync")
    assert log == []


def test_roles_that_share_a_device_compute_in_turn_and_each_as_early_as_its_order_allows():
    devices = {"actor": {0, 1}, "ref": {0}, "critic": {1}, "reward_model": {2}}
    groups = [Recorder(role, []) for role in (*devices, "rollout")]  # which is on the CPU
    of_one_host = {role: frozenset((0, device) for device in held) for role, held in devices.items()}
    apart = Residency(False, groups, devices=of_one_host)
    roles = [[group.role for group in turn] for turn in apart.turns(groups)]
    assert roles == [["actor", "reward_model", "rollout"], ["ref", "critic"]]
    assert apart.turns([groups[0], groups[0]]) == [[groups[0]]], "a group that is asked twice"
    assert [len(turn) for turn in Residency(True, groups).turns(groups)] == [1, 1, 1, 1, 1]
    assert [len(turn) for turn in Residency(False, groups).turns(groups)] == [5]


def test_every_move_is_measured_by_its_largest_rank():
    residency, _ = make(shared=True)
    assert residency.take_memory() == {}
    residency.enter("sync")
    residency.enter("rollout")
    residency.enter("train")
    measured = {"before_offload": 2.0, "offloaded": 3.0, "before_onload": 3.0, "onloaded": 4.0}
    expected = {f"mem/{role}_{what}_GiB": value for role in ("actor", "ref") for what, value in measured.items()}
    # Of the two wakes the last one, of the KV cache.
    slept = {"before_wake": 3.0, "awake": 4.0, "before_sleep": 4.0, "asleep": 5.0}
    expected |= {f"mem/rollout_{what}_GiB": value for what, value in slept.items()}
    assert residency.take_memory() == expected
    assert residency.take_memory() == {}


@pytest.fixture
def grader(monkeypatch):
    """A third kind of holder: a model that grades on the device while others sample. Two rows and a role, no code."""
    held = dict.fromkeys(("train", "sync", "save", "build"), NOTHING)
    monkeypatch.setitem(ROLES, "grader", Role("grader", "reward_model", "the grader", wave=1))
    monkeypatch.setitem(TABLE, "reward_model", {**held, "rollout": MODEL})
    moves = Moves(Verb.OFFLOAD, Verb.ONLOAD, "offloaded", "onloaded", after_build=NOTHING)
    monkeypatch.setitem(MOVES, "reward_model", moves)


def test_what_is_built_first_leaves_the_device_for_what_comes_next(grader):
    log = []
    groups = [Recorder(role, log) for role in ("rollout", "grader", "actor")]
    residency = Residency(True, groups)
    residency.leave_after_build(groups)
    moved = [(role, verb) for role, verb, _ in log if verb != "done"]
    assert moved == [("rollout", Verb.SLEEP), ("grader", Verb.OFFLOAD)], "the trainers, built last, stay"
    assert residency.take_memory() == {}, "nothing of a step"
    log.clear()
    residency.enter("train")
    assert log == []


@pytest.mark.parametrize("phase", ["train", "rollout"])
def test_the_table_is_right_when_the_wait_for_a_move_is_broken_off(phase: Phase) -> None:
    """Ctrl-C ends the wait, not the move: the save that follows brings back what is on its way out."""
    residency, log = make(shared=True)
    residency.enter("rollout" if phase == "train" else "train")
    for group in residency.holders:
        group.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        residency.enter(phase)
    for group in residency.holders:
        group.interrupted = False
    log.clear()
    residency.enter("save")
    moves = {(role, verb) for role, verb, _ in log if verb != "done"}
    expected = {("actor", Verb.ONLOAD), ("ref", Verb.ONLOAD)}
    assert moves == expected

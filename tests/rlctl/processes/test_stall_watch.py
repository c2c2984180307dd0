"""Nothing moves: who is named, what is logged, what is started again; and that slow is not stuck."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from hand_clock import HandClock
from probe_groups import doing, judge_silence_of, probe_groups, role_plan, wait_until

import rlctl.processes.failure_watch
from rlctl.processes import stall_watch as module
from rlctl.processes.calls import Call, RanksFailed
from rlctl.processes.failures import Evidence
from rlctl.processes.groups import Groups
from rlctl.processes.rank_states import RestartPolicy
from rlctl.processes.stall_watch import StallWatch
from specs.errors import RoleFailure
from specs.wire.heartbeat import Activity
from specs.wire.messages import Message, Verb

SOON_S = 0.3
GENERATE, UPDATE = (
    Call(verb, number, [], 3, 60.0, [0], tick=lambda: None) for verb, number in ((Verb.GENERATE, 5), (Verb.UPDATE, 9))
)
ROLLOUT, ACTOR, PEER = ("rollout", 3), ("actor", 0), ("actor", 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    clock = HandClock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def generating(tokens: int, **more: object) -> Activity:
    known = {"verb": "generate", "call": 5, "seconds": 50.0, "what": "generate of 12 prompts, longest 8,192 tokens"}
    counted = {"unit": "token", "so_far": tokens, "counts": {"token": 100 + tokens}}
    return Activity.model_validate(known | counted | more)


def updating(**more: object) -> Activity:
    known = {"verb": "update", "call": 9, "seconds": 50.0, "what": "update of 16 samples", "unit": "micro-batch"}
    return Activity.model_validate(known | more)


# ── the table ─────────────────────────────────────────────────────────────────────────────────────


def look_for(watch: StallWatch, clock: HandClock, seconds: float, waiting: dict) -> list[module.Stall]:
    """As the driver does, several times a second."""
    found = []
    for _ in range(int(seconds)):
        clock.now += 1.0
        if stall := watch.look(waiting):
            found.append(stall)
    return found


def test_the_chain_names_who_is_waited_for(clock: HandClock) -> None:
    watch = StallWatch(40.0)
    watch.heard(ROLLOUT, generating(512, where="pump (server.py:7)"))
    (stall,) = look_for(watch, clock, 60, {ROLLOUT: GENERATE})
    assert stall.culprits == (ROLLOUT,)
    assert stall.chain == (
        "step 3 waits for rollout rank 3, which is in generate of 12 prompts, longest 8,192 tokens, 512 tokens so far, "
        "41 s without a token, at pump (server.py:7)"
    )
    watch.heard(ROLLOUT, generating(1, call=4))  # the verb before: it has not taken this one up
    (stall,) = look_for(watch, clock, 41, {ROLLOUT: GENERATE})
    assert stall.chain == "step 3 waits for rollout rank 3, which is in no verb, 41 s after generate was sent to it"


def test_who_says_that_it_waits_is_not_to_blame(clock: HandClock) -> None:
    watch = StallWatch(5.0)
    watch.heard(ACTOR, updating(waits_for="the other ranks, in all_reduce"))
    watch.heard(PEER, updating(where="spin (x.py:1)"))
    (stall,) = look_for(watch, clock, 6, {ACTOR: UPDATE, PEER: UPDATE})
    assert (stall.culprits, stall.is_circle) == ((PEER,), False)
    assert stall.chain.startswith("step 3 waits for actor rank 1, which is in update")
    assert stall.chain.endswith("; actor rank 0 waits for the other ranks, in all_reduce")
    watch.heard(PEER, updating(waits_for="rollout 0"))
    (stall,) = look_for(watch, clock, 6, {ACTOR: UPDATE, PEER: UPDATE})
    assert (stall.culprits, stall.is_circle) == ((ACTOR, PEER), True)


def test_what_moves_anywhere_keeps_everybody_alive(clock: HandClock) -> None:
    watch = StallWatch(5.0)
    for tokens in range(20):
        watch.heard(ROLLOUT, generating(tokens))
        watch.heard(ACTOR, updating())
        assert not look_for(watch, clock, 4, {ROLLOUT: GENERATE, ACTOR: UPDATE})
    assert not look_for(watch, clock, 1, {ROLLOUT: GENERATE})
    watch.moved()  # an answer
    assert not look_for(watch, clock, 5, {ROLLOUT: GENERATE})
    assert look_for(watch, clock, 1, {ROLLOUT: GENERATE})
    assert not look_for(watch, clock, 5, {ROLLOUT: GENERATE}), "reported once"


def test_what_cannot_be_judged_is_not(clock: HandClock) -> None:
    watch = StallWatch(5.0)
    watch.heard(ROLLOUT, generating(0, counted=False))
    assert not look_for(watch, clock, 60, {ROLLOUT: GENERATE, ACTOR: UPDATE})
    assert watch.moving({ROLLOUT: GENERATE}).still_s == 0.0, "nor is it shown"
    assert not look_for(watch, clock, 60, {}), "no reply is pending"
    assert not look_for(watch, clock, 5, {ACTOR: UPDATE})


def test_a_driver_that_was_stopped_blames_nobody(clock: HandClock) -> None:
    watch = StallWatch(10.0)
    assert not look_for(watch, clock, 3, {ACTOR: UPDATE})
    clock.now += 3600
    assert not look_for(watch, clock, 7, {ACTOR: UPDATE})
    assert look_for(watch, clock, 2, {ACTOR: UPDATE})


# ── real processes ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks may take long to come."""
    monkeypatch.setattr(rlctl.processes.failure_watch, "_DUMP_S", 60.0)
    monkeypatch.setattr(rlctl.processes.failure_watch, "_STACKS_S", 60.0)


def come_to(groups: Groups, *conditions: Callable[[], Any]) -> None:
    """Until all ranks are where a test wants them: what follows is judged at once."""
    assert wait_until(lambda: (groups.tick(), all(one() for one in conditions))[1])


def where(groups: Groups, role: str, rank: int) -> str:
    """The function that a rank reports for its main thread; empty before its first report."""
    return activity.where if (activity := doing(groups, role, rank)) is not None else ""


def stalled(groups: Groups, call: Call) -> list[Message]:
    groups.watch.timeout_s = SOON_S
    return call.result()


@pytest.mark.usefixtures("patient", "warm_children")
def test_a_stuck_rollout_is_started_again(tmp_path: Path) -> None:
    failures: list[Evidence] = []
    with probe_groups(tmp_path, role_plan("actor", 1), role_plan("rollout", 2)) as groups:
        groups.ranks.allow_restarts(RestartPolicy("rollout", 1, failures.append))
        call = groups["rollout"].post(Verb.PING, {"do": "hang", "rank": 1}, step=3)
        come_to(groups, lambda: call.missing == [1], lambda: where(groups, "rollout", 1).startswith("_misbehave"))
        with pytest.raises(RanksFailed) as caught:
            stalled(groups, call)
        assert caught.value.call.failed == {1}
        chain = r"step 3 waits for rollout rank 1, which is in ping, \d+ s without a sign of progress, at _misbehave"
        assert re.search(chain, failures[0].message)
        assert "_misbehave" in (tmp_path / "rollout" / "rank1.log").read_text()
        groups.watch.timeout_s = 600.0
        with groups.restart("rollout") as ranks:
            assert ranks == [1]
        assert len(groups["rollout"].call(Verb.PING)) == 2


@pytest.mark.usefixtures("warm_children")
def test_a_driver_that_waits_for_nothing_does_not_do_so_for_ever(tmp_path: Path) -> None:
    with probe_groups(tmp_path, role_plan("reward", 1), stall_timeout_s=0.5) as groups:
        groups["reward"].call(Verb.PING)
        with pytest.raises(RuntimeError, match=r"no call was in flight for 0\.5 s"):
            come_to(groups, lambda: False)


@pytest.mark.usefixtures("patient")
def test_an_actor_that_holds_the_lock_gives_no_sign_of_life_but_its_stacks(tmp_path: Path) -> None:
    with probe_groups(tmp_path, role_plan("actor", 2, group=True)) as groups:
        parts: list[Message] = []
        body = {"parts": 1, "then": "hold the lock", "rank": 1}
        call = groups["actor"].post(Verb.PING, body, step=3, on_part=parts.append)
        come_to(groups, lambda: parts)
        process = psutil.Process(groups.membership.members["actor", 1].pid)
        before = process.cpu_times().user
        come_to(groups, lambda: process.cpu_times().user > before + 0.5)
        judge_silence_of(groups, "actor", 1)
        with pytest.raises(RoleFailure, match="no sign of life") as caught:
            call.result()
        assert (caught.value.role, caught.value.rank, caught.value.step) == ("actor", 1, 3)
        assert "in _misbehave" in caught.value.log_tail


@pytest.mark.usefixtures("warm_children")
def test_slow_is_not_stuck(tmp_path: Path) -> None:
    slow, uncounted = tmp_path / "slow", tmp_path / "uncounted"
    with probe_groups(tmp_path, role_plan("rollout", 1)) as groups:
        call = groups["rollout"].post(Verb.PING, {"do": "crawl", "file": str(slow)})
        seen: dict[int, float] = {}  # tokens → when the last thing moved

        def seen_so_far() -> int:
            seen.setdefault(groups.moving().done.get("token", 0), groups.watch._moved_at)
            return len(seen)

        come_to(groups, lambda: seen_so_far() > 2)
        moved = [*seen.values()]
        assert moved == sorted(set(moved)), "each count is a move"
        slow.touch()
        call.result()
        call = groups["rollout"].post(Verb.BUILD, {"do": "await", "file": str(uncounted)})
        come_to(groups, lambda: doing(groups, "rollout", 0))
        groups.watch.timeout_s = 0.0  # it counts nothing, and need not
        for _ in range(3):
            groups.tick()
        assert groups.moving().still_s == 0.0
        groups.watch.timeout_s = 600.0
        uncounted.touch()
        call.result()
        call = groups["rollout"].post(Verb.PING, {"sleep_s": 600})
        come_to(groups, lambda: doing(groups, "rollout", 0))
        with pytest.raises(RoleFailure, match="nothing has moved"):
            stalled(groups, call)


@pytest.mark.usefixtures("patient")
def test_a_rank_that_does_not_come_to_a_collective(tmp_path: Path) -> None:
    """The others wait in it: they are not to blame, and the last collectives of each are on disk."""
    with probe_groups(tmp_path, role_plan("actor", 2, group=True)) as groups:
        groups["actor"].call(Verb.BUILD, {"do": "meet"})  # imports torch, which may take as long as it likes
        call = groups["actor"].post(Verb.PING, [{"do": "meet"}, {"do": "hang in native code"}], step=3)

        def waits() -> bool:
            activity = doing(groups, "actor", 0)
            return activity is not None and bool(activity.waits_for)

        come_to(groups, waits, lambda: where(groups, "actor", 1).startswith("_misbehave"))
        with pytest.raises(RoleFailure) as caught:
            stalled(groups, call)
        failure = caught.value
        assert (failure.rank, failure.step) == (1, 3)
        assert "nothing has moved" in failure.cause
        assert "in _misbehave" in failure.log_tail
        assert "actor rank 0 waits for the other ranks, in all_reduce" in failure.cause
        dumps = [Path(dump) for dump in failure.dumps]
        assert [dump.name for dump in dumps] == ["flight_recorder_rank0.json", "flight_recorder_rank1.json"]
        assert str(dumps[0]) in failure.message
        recorded = [json.loads(dump.read_text())["entries"] for dump in dumps]
        assert len(recorded[0]) == len(recorded[1]) + 1, "rank 0 is one collective ahead"
        assert "all_reduce" in recorded[0][-1]["profiling_name"]

"""Which rank is blamed, by types alone: whatever the messages say, and among real ranks that lose a peer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import warm
from probe_groups import probe_groups, role_plan, wait_until

from rlctl.processes import failures
from rlctl.processes.failures import Blame, Evidence, Severity, from_end, from_error
from rlctl.processes.launch import Started
from specs.errors import Cause, RoleFailure
from specs.wire.bodies import ErrorBody
from specs.wire.messages import Verb

ENDED = Evidence("actor", 1, Cause.ENDED, "SIGKILL")
REPORT = """\
workers.main FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 4712)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  host      : node
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 4713)
  traceback : Signal 9 (SIGKILL) received by PID 4713
"""
EXITED = Evidence("actor", 1, Cause.ENDED, "exit code 1", Severity.EXIT)


def error_of(rank: int, cause: Cause, message: str, *, alone: bool = False) -> Evidence:
    return from_error(
        "actor", rank, ErrorBody(cause=cause, kind="SomeError", message=message, hint=message), alone=alone
    )


def blamed(*evidence: Evidence) -> Evidence | None:
    blame = Blame()
    for one in evidence:
        blame.add(one, grace_s=60)
    return blame.root_cause()


@pytest.mark.parametrize("cause", Cause)
def test_the_cause_decides_who_is_blamed(cause: Cause) -> None:
    """Whatever the message says."""
    message = "Connection closed by peer"
    from_peer = cause in (Cause.PEER_GONE, Cause.PEER_LATE)
    error = error_of(0, cause, message)
    assert (error.weight is Severity.SECONDARY) == from_peer
    assert blamed(error) is (None if from_peer else error)  # it waits for its root cause
    assert blamed(error, ENDED) is (ENDED if from_peer else error)
    assert blamed(error, EXITED) is (None if from_peer else error)
    assert error_of(0, cause, message, alone=True).weight is Severity.ROOT  # without peers it is the cause


def test_the_end_of_a_part_explains_what_its_rank_raised() -> None:
    blame = Blame()
    blame.add(error_of(0, Cause.PEER_GONE, "Connection closed by peer"), grace_s=0)
    blame.add(error_of(1, Cause.RAISED, "out of memory"), grace_s=0)
    for rank in (0, 1):
        blame.forget_secondary("actor", rank)
    assert (cause := blame.root_cause()) is not None
    assert cause.rank == 1
    blame.add(error_of(0, Cause.PEER_GONE, "Connection closed by peer"), grace_s=60)
    assert blame.root_cause() is None, "what was forgotten shortens no wait"


def test_a_secondary_failure_without_a_root_cause_is_blamed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    blame, error = Blame(), error_of(0, Cause.PEER_LATE, "waited")
    blame.add(error, grace_s=60)
    assert blame.root_cause() is None
    now = time.monotonic()
    monkeypatch.setattr(failures.time, "monotonic", lambda: now + 61)
    assert blame.root_cause() is error
    assert not blame.pending, "it concerned one verb"
    blame.add(ENDED)
    assert (blame.root_cause(), blame.root_cause()) == (ENDED, ENDED), "a rank that ended stays so"


def test_each_weight_has_its_own_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit that a launcher tells is not kept waiting by a peer's error that came before it."""
    now = [100.0]
    monkeypatch.setattr(failures.time, "monotonic", lambda: now[0])
    blame, error = Blame(), error_of(0, Cause.PEER_GONE, "left")
    blame.add(error, grace_s=20)
    now[0] += 5
    blame.add(EXITED, grace_s=0.5)
    assert blame.root_cause() is None
    now[0] += 0.6
    assert blame.root_cause() is EXITED


def test_an_abort_waits_for_a_better_cause_and_torchrun_reports_the_first_rank(tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    (aborted, killed), launcher = [
        [Started("actor", (rank,), None, log) for rank in (0, 1)],
        Started("actor", (0, 1), None, log, "torchrun"),
    ]
    aborted, killed = from_end(aborted, -6), from_end(killed, -9)
    assert blamed(aborted) is None
    assert blamed(aborted, killed) is killed
    assert blamed(error_of(0, Cause.PEER_GONE, "left"), aborted, killed) is killed
    assert (from_end(launcher, 1).message, blamed(from_end(launcher, 1))) == (
        "torchrun: its process ended with exit code 1",
        None,
    )
    log.write_text("rank 7: exitcode  : 3\n" + REPORT)
    reported = from_end(launcher, 1)
    assert (reported.rank, "SIGKILL" in reported.message, blamed(reported)) == (1, True, reported)


@pytest.mark.slow
def test_gloo_the_killed_rank_is_blamed_and_not_the_one_that_lost_it(tmp_path: Path) -> None:
    plan = role_plan("actor", 2, group=True)
    with warm.children(), probe_groups(tmp_path, plan, module="peer_role", factory="gloo") as groups:
        assert [answer.body["total"] for answer in groups["actor"].call(Verb.PING)] == [4.0, 4.0]
        with pytest.raises(RoleFailure, match="SIGKILL") as caught:
            groups["actor"].call(Verb.PING, {"victim": 1})
        assert caught.value.rank == 1
        survivor = tmp_path / "actor" / "rank0.log"
        assert wait_until(lambda: "gloo/transport" in survivor.read_text()), "it lost the other one in a collective"


@pytest.mark.slow
def test_shared_memory_the_killed_end_is_blamed_and_not_the_other(tmp_path: Path) -> None:
    plans = role_plan("actor", 1), role_plan("rollout", 1)
    with probe_groups(tmp_path, *plans, module="peer_role", factory="shm") as groups:
        actor, rollout = groups["actor"], groups["rollout"]

        def send(*, kills_the_rollout: bool) -> None:
            offer = actor.call(Verb.EXPORT_BEGIN)[0].body
            rollout.call(Verb.IMPORT_BEGIN, {"offer": offer})
            calls = [
                actor.post(Verb.EXPORT_BUCKET),
                rollout.post(Verb.IMPORT_BUCKET, {"victim": kills_the_rollout}),
            ]
            for call in calls:
                call.result()

        send(kills_the_rollout=False)
        with pytest.raises(RoleFailure, match="SIGKILL") as caught:
            send(kills_the_rollout=True)
        assert caught.value.role == "rollout"
        assert wait_until(lambda: "PeerGone" in (tmp_path / "actor" / "rank0.log").read_text())

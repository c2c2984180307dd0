"""Groups of real processes: what they answer, and what a person reads when one of them fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from probe_groups import SUPPORT, probe_groups, role_plan, wait_until

import rlctl.processes.failure_watch
from rlctl.processes.calls import Call
from rlctl.processes.group import Channel, Group
from rlctl.processes.rank_states import RankStates
from rlctl.processes.stall_watch import StallWatch
from specs.errors import Interrupted, RoleFailure, SpecError
from specs.wire.messages import COLUMNS, Columns, Kind, Message, Verb
from workers.watchdog import pids_marked

BOUND_S = 60.0  # generous: the machine may be busy


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A better cause, and stacks, may take long to come."""
    monkeypatch.setattr(rlctl.processes.failure_watch, "ROOT_CAUSE_GRACE_S", BOUND_S)
    monkeypatch.setattr(rlctl.processes.failure_watch, "_DUMP_S", BOUND_S)


@pytest.mark.usefixtures("warm_children")
def test_answers_come_by_rank_with_their_tensors(tmp_path: Path) -> None:
    with probe_groups(tmp_path, role_plan("actor", 2, group=True), role_plan("rollout", 2)) as groups:
        actor, rollout = groups["actor"], groups["rollout"]
        tensors: list[dict[str, np.ndarray]] = [{"x_T": np.arange(3)}, {"x_T": np.ones((2, 2), dtype=np.float32)}]
        names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "RLCTL_SECRET", "RLCTL_RUN_ID"]
        answers = actor.call(Verb.PING, [{"env": names}, {"env": []}], tensors)
        assert [answer.body["rank"] for answer in answers] == [0, 1]
        assert [answer.body["world_size"] for answer in answers] == [2, 2]
        for answer, sent in zip(answers, tensors, strict=True):
            np.testing.assert_array_equal(answer.tensors["x_T"], sent["x_T"])
            assert answer.tensors["x_T"].dtype == sent["x_T"].dtype
        env = answers[0].body["env"]
        assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"]) == ("0", "2", "127.0.0.1")
        assert env["RLCTL_RUN_ID"] == groups.launcher.run_id
        assert env["RLCTL_SECRET"] is None  # whatever a rank starts (user code in a grader) must not inherit it
        replicas = rollout.call(Verb.PING, {"env": names})
        assert [(answer.body["rank"], answer.body["world_size"]) for answer in replicas] == [(0, 1), (1, 1)]
        assert replicas[1].body["env"]["RANK"] is None


@pytest.mark.usefixtures("warm_children")
def test_a_rank_serves_many_calls_at_once_and_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come as they are ready. A verb that is not concurrent, or a call that is to be alone, waits for what was
    sent before, and holds up what is posted after."""
    monkeypatch.setitem(COLUMNS, Verb.GENERATE, Columns())
    monkeypatch.setitem(COLUMNS, Verb.TURNS, Columns())
    with probe_groups(tmp_path, role_plan("rollout", 1), factory="waiting") as groups:
        rollout, begun, ended = groups["rollout"], [], []

        def generate(name: str, *, alone: bool = False) -> Call:
            return rollout.post(
                Verb.GENERATE,
                {"name": name},
                on_part=lambda part: begun.append(part.body["begun"]),
                on_done=lambda call: ended.append(name),
                alone=alone,
            )

        calls = [generate("a"), generate("b")]
        assert rollout.call(Verb.TURNS, {"name": "b"})[0].body["open"] == 1, "both are open"
        assert calls[1].result()[0].body["name"] == "b"
        assert (begun, ended) == (["a", "b"], ["b"])
        assert rollout.post(Verb.TURNS, {"name": "a"}).result()
        ping = rollout.post(Verb.PING)
        calls += [generate("c", alone=True), generate("d")]
        ping.result()
        assert (calls[0].done, calls[2].sent, calls[3].sent) == (True, True, False)
        groups.tick(0.2)
        assert begun == ["a", "b", "c"], "d waits for c, which is alone"
        assert [call.number for call in rollout.in_flight] == [calls[2].number]
        groups.close(polite=False)


@pytest.mark.parametrize("begin_s", [0.0, 1e9])
def test_when_a_rank_of_another_host_was_busy_is_said_by_this_clock(begin_s: float) -> None:
    """Each host's monotonic clock begins when it started."""
    states, hub = RankStates(), SimpleNamespace(send=lambda *sent: None)
    states.started("rollout", 1)
    states.joined(("rollout", 0))
    channel = Channel(hub, states, StallWatch(60.0), lambda: None, 60.0)  # type: ignore[arg-type]
    group, started = Group("rollout", 1, channel), time.monotonic()
    call = group.post(Verb.PING)
    group.receive(0, Message(Kind.ANSWER, {}, Verb.PING, call.number, busy=(begin_s, begin_s + 0.25)))
    ((begin, end),) = channel.busy
    assert end - begin == pytest.approx(0.25)
    assert started <= end <= time.monotonic()
    call = group.post(Verb.PING)
    own = time.monotonic(), time.monotonic()
    group.receive(0, Message(Kind.ANSWER, {}, Verb.PING, call.number, busy=own))
    assert channel.busy[1] == own, "where it is this clock, it stays as it was told"


@pytest.mark.usefixtures("patient", "warm_children")
def test_an_error_names_everything_and_the_rank_serves_on_until_its_peer_is_gone(tmp_path: Path) -> None:
    """One of ours needs no traceback, which is in the log alone. What follows from a peer's failure is no cause."""
    with probe_groups(tmp_path, role_plan("actor", 2, group=True)) as groups:
        actor = groups["actor"]
        with pytest.raises(RoleFailure) as caught:
            actor.call(Verb.PING, {"do": "raise", "rank": 1}, step=7)
        failure = caught.value
        assert (failure.role, failure.rank, failure.verb, failure.step) == ("actor", 1, "ping", 7)
        assert failure.cause == "ValueError: seven is not a number"
        assert "Traceback" in failure.log_tail
        assert failure.log_path == str(tmp_path / "actor" / "rank1.log")
        assert failure.exit_code == 1
        with pytest.raises(RoleFailure) as caught:
            actor.call(Verb.PING, {"do": "raise known", "rank": 0})
        failure = caught.value
        assert (failure.cause, failure.remote_kind, failure.hint) == ("row 3 has no prompt", "DataError", "drop it")
        assert (failure.exit_code, failure.log_tail) == (2, "")
        assert "Traceback" in Path(failure.log_path).read_text()
        with pytest.raises(RoleFailure, match="not JSON serializable"):
            actor.call(Verb.PING, {"unsendable": True})
        assert len(actor.call(Verb.PING)) == 2

        with pytest.raises(RoleFailure) as caught:
            actor.call(Verb.PING, [{"do": "lose a peer"}, {"do": "raise"}])
        assert (caught.value.rank, caught.value.remote_kind) == (1, "ValueError")
        with pytest.raises(RoleFailure) as caught:
            actor.call(Verb.PING, [{"do": "lose a peer"}, {"do": "kill"}])
        assert caught.value.rank == 1
        assert "SIGKILL" in caught.value.cause


@pytest.mark.usefixtures("warm_children")
def test_a_dead_rank_is_noticed_while_waiting_for_another_role(tmp_path: Path) -> None:
    with probe_groups(tmp_path, role_plan("actor", 1), role_plan("rollout", 2)) as groups:
        groups["rollout"].post(Verb.PING, {"do": "exit", "rank": 1}, step=3)
        started = time.monotonic()
        with pytest.raises(RoleFailure, match="exit code 3") as caught:
            groups["actor"].call(Verb.PING, {"do": "hang"})
        assert (caught.value.role, caught.value.rank, caught.value.step) == ("rollout", 1, 3)
        assert time.monotonic() - started < BOUND_S


@pytest.mark.usefixtures("patient", "warm_children")
def test_a_tick_that_raises_ends_the_wait_alone_and_a_missed_deadline_shows_where_the_rank_is(tmp_path: Path) -> None:
    pressed: list[bool] = []

    def on_tick() -> None:
        if pressed.pop() if pressed else False:
            raise Interrupted("interrupted")

    with probe_groups(tmp_path, role_plan("actor", 1), on_tick=on_tick) as groups:
        pressed.append(True)
        with pytest.raises(Interrupted):
            groups["actor"].call(Verb.PING, {"sleep_s": 1, "name": "long"})
        assert groups["actor"].call(Verb.PING, {"name": "save"})[0].body["echo"]["name"] == "save"
        parts: list[Message] = []
        call = groups["actor"].post(Verb.PING, {"parts": 1, "then": "hang"}, timeout_s=BOUND_S, on_part=parts.append)
        assert wait_until(lambda: (groups.tick(), parts)[1])
        call._deadline = 0.0
        with pytest.raises(RoleFailure, match="no answer within 60 s") as caught:
            call.result()
        assert "in ping" in caught.value.log_tail


def test_an_interpreter_that_fails_to_start(tmp_path: Path) -> None:
    plan = role_plan("actor", 1)
    crash = replace(plan, command=(sys.executable, "-c", "raise SystemExit('no luck')"))
    with pytest.raises(RoleFailure, match="exit code 1") as caught, probe_groups(tmp_path, crash):
        pass
    assert caught.value.verb == "start"
    assert "no luck" in caught.value.log_tail
    absent = replace(plan, command=(str(tmp_path / "python"),))
    with pytest.raises(SpecError, match=r"actor\.python"), probe_groups(tmp_path, absent):
        pass


DRIVER = """
import sys, time
from pathlib import Path
from probe_groups import probe_groups, role_plan
from specs.wire.messages import COLUMNS, Columns, Message, Verb
from workers.watchdog import pids_marked
with probe_groups(Path(sys.argv[1]), role_plan("rollout", 1), role_plan("actor", 2, "torchrun")) as groups:
    answers = [*groups["rollout"].call(Verb.PING), *groups["actor"].call(Verb.PING)]
    print(groups.launcher.run_id, *[answer.body["pid"] for answer in answers], flush=True)
    groups["rollout"].call(Verb.PING, {"do": "hang"})
"""


def test_nothing_outlives_a_killed_driver(tmp_path: Path, repo_root: Path) -> None:
    env = os.environ | {"PYTHONPATH": f"{repo_root}{os.pathsep}{SUPPORT}"}
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        run_id, *pids = driver.stdout.readline().split()
        assert len(pids) == 3
        driver.send_signal(signal.SIGKILL)
    assert wait_until(lambda: not pids_marked(f"RLCTL_RUN_ID={run_id}"), BOUND_S)


def test_torchrun_group_blames_the_rank_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    plan = role_plan("actor", 2, "torchrun")
    plan = replace(plan, env={**plan.env, "TMPDIR": str(scratch)})
    with probe_groups(tmp_path, plan) as groups:
        answers = groups["actor"].call(Verb.PING)
        assert [(answer.body["rank"], answer.body["world_size"]) for answer in answers] == [(0, 2), (1, 2)]
        started = time.monotonic()
        with pytest.raises(RoleFailure, match="SIGKILL") as caught:
            groups["actor"].call(Verb.PING, {"do": "kill", "rank": 1, "sleep_s": 600})
        assert caught.value.rank == 1
        assert time.monotonic() - started < BOUND_S
    assert (tmp_path / "actor" / "rank1.log").exists()
    assert not [*scratch.iterdir()], "nothing is left in the temporary directory"

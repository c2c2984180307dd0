"""Replicas that are lost and started again: what the calls of their group see, and when it ends the run after all."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from local_hosts import LocalHosts
from probe_groups import probe_groups, role_plan, wait_until

import rlctl.processes.failure_watch
from rlctl.loop.recovery import FailureWarnings, RankRecovery, SteadySync, begin_with_fewer
from rlctl.loop.residency import Residency
from rlctl.processes.calls import RanksFailed
from rlctl.processes.failures import Evidence
from rlctl.processes.groups import Groups
from rlctl.processes.host_check import RemoteHost
from rlctl.processes.launch import tail
from rlctl.processes.placement import RemoteNode
from rlctl.processes.rank_states import RankState, RestartPolicy
from rlctl.processes.remote_check import Questions
from specs.errors import Interrupted, RoleFailure
from specs.wire.messages import Verb

pytestmark = pytest.mark.usefixtures("warm_children")

# In the path of a role's processes: the third replica dials when the gate is open.
WAIT_AT_THE_GATE = """
import os, time
if os.environ.get("RLCTL_RANK") == "2":
    print("waiting for the gate", flush=True)
    while not os.path.exists(os.environ["PROBE_GATE"]):
        time.sleep(0.05)
"""


def restart(groups: Groups) -> list[int]:
    """Start what is lost again; the ranks."""
    with groups.restart("rollout") as ranks:
        assert {groups.ranks["rollout", rank] for rank in ranks} == {RankState.RESTARTING}
    assert {groups.ranks["rollout", rank] for rank in ranks} == {RankState.RUNNING}
    return ranks


def test_a_lost_replica_is_counted_out_and_started_again(tmp_path: Path) -> None:
    failures: list[Evidence] = []
    with probe_groups(tmp_path, role_plan("actor", 1), role_plan("rollout", 2)) as groups:
        rollout, parts = groups["rollout"], []
        groups.ranks.allow_restarts(RestartPolicy("rollout", 2, failures.append))
        first = [answer.body["pid"] for answer in rollout.call(Verb.PING)]

        call = rollout.post(Verb.PING, [{"parts": 1}, {"do": "kill"}], step=3, on_part=parts.append)
        assert groups["actor"].call(Verb.PING, {"sleep_s": 1.5})[0].body["rank"] == 0, "goes on undisturbed"
        with pytest.raises(RanksFailed) as caught:
            call.result()
        assert (caught.value.call, sorted(call.answers), call.failed) == (call, [0], {1})
        assert [part.body["rank"] for part in parts] == [0]
        assert [(one.rank, "SIGKILL" in one.message) for one in failures] == [(1, True)]
        with pytest.raises(RanksFailed):  # until it is back, nothing is sent to it, and nothing waits for it
            rollout.call(Verb.PING)

        assert restart(groups) == [1]
        assert rollout.call(Verb.PING, ranks=[1])[0].body["rank"] == 1
        again = [answer.body["pid"] for answer in rollout.call(Verb.PING)]
        assert again[0] == first[0]
        assert again[1] != first[1]
        assert groups.ranks.restarts["rollout"] == 1
        assert "rollout rank 1 is started again" in (tmp_path / "rollout" / "rank1.log").read_text()

        os.kill(again[0], signal.SIGKILL)  # idle
        assert wait_until(lambda: (groups.tick(), groups.ranks.failed("rollout"))[1])
        assert restart(groups) == [0]
        with pytest.raises(RoleFailure, match=r"SIGKILL.*rollout ranks were started again 2 times before") as failure:
            rollout.call(Verb.PING, {"do": "kill", "rank": 1})
        assert failure.value.rank == 1


def test_nothing_is_sent_to_a_replica_that_is_being_started(tmp_path: Path) -> None:
    """It would be lost, and waited for for ever: by its build, too."""
    calls = []
    with probe_groups(tmp_path, role_plan("rollout", 2)) as groups:
        rollout = groups["rollout"]
        groups.ranks.allow_restarts(RestartPolicy("rollout", 1))
        with pytest.raises(RanksFailed):
            rollout.call(Verb.PING, {"do": "kill", "rank": 1})
        groups._on_tick = lambda: calls.append(rollout.post(Verb.PING, ranks=[1])) if not calls else None
        with groups.restart("rollout") as ranks:
            assert [call.failed for call in calls] == [{1}]
            assert rollout.call(Verb.BUILD, ranks=ranks, timeout_s=60)[0].body["rank"] == 1
        assert [answer.body["rank"] for answer in rollout.call(Verb.PING)] == [0, 1]


def test_after_a_restart_that_was_broken_off_nobody_waits_for_the_replica(tmp_path: Path) -> None:
    """As when a person interrupts: what is saved then may still ask the other replicas."""
    interrupts: list[Interrupted] = []

    def on_tick() -> None:
        if interrupts:
            raise interrupts.pop()

    limits = {"verb_timeout_s": 60.0, "on_tick": on_tick}
    with probe_groups(tmp_path, role_plan("rollout", 2), **limits) as groups:
        rollout, weights = groups["rollout"], None  # which it does not come to
        policy = RestartPolicy("rollout", 1, FailureWarnings(groups, str))
        slow = {"sleep_s": 1.0}  # else it may be there before the driver looks for a Ctrl-C
        recovery = RankRecovery(groups, policy, body=slow, built=[], start_timeout_s=60)
        recovery.begin()
        sync = SteadySync(Residency(False, [rollout]), weights, recovery)
        with pytest.raises(RanksFailed):
            rollout.call(Verb.PING, {"do": "kill", "rank": 1})
        interrupts.append(Interrupted("now"))
        with pytest.raises(Interrupted):
            sync.run()
        with pytest.raises(RanksFailed) as caught:
            rollout.call(Verb.PING)
        assert (caught.value.call.failed, groups.ranks.restarts["rollout"]) == ({1}, 0)
        assert restart(groups) == [1]
        assert [answer.body["rank"] for answer in rollout.call(Verb.PING)] == [0, 1]
        assert len(groups.launcher.started) == 2, "what had begun to start is gone"


def test_broken_connections_during_a_sync_wait_for_the_loss_that_explains_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rlctl.processes.failure_watch, "ROOT_CAUSE_GRACE_S", 60.0)  # the loss may be slow to come
    with probe_groups(tmp_path, role_plan("actor", 1), role_plan("rollout", 1), factory="sync_handlers") as groups:
        groups.ranks.allow_restarts(RestartPolicy("rollout", 1))
        export = groups["actor"].post(Verb.EXPORT_BUCKET, {"do": "lose a peer"})
        groups["rollout"].post(Verb.IMPORT_BUCKET, {"sleep_s": 0.5, "then": "kill"})
        with pytest.raises(RanksFailed):
            export.result()
        groups["actor"].settle()
        restart(groups)
        monkeypatch.setattr(rlctl.processes.failure_watch, "ROOT_CAUSE_GRACE_S", 0.2)
        with pytest.raises(RoleFailure, match="the other rank left"):  # no rank has failed
            groups["actor"].call(Verb.EXPORT_BUCKET, {"do": "lose a peer"})


def test_who_waits_for_a_lost_replica_is_let_go(tmp_path: Path) -> None:
    """Connections to a host whose network is down do not end: the driver releases its peers, also where a verb of a
    pass still counts on one that was dropped before."""
    wait = {"do": "wait for a peer"}
    with probe_groups(tmp_path, role_plan("actor", 1), role_plan("rollout", 2), factory="sync_handlers") as groups:
        groups.ranks.allow_restarts(RestartPolicy("rollout", 0, least=1))
        export = groups["actor"].post(Verb.EXPORT_BUCKET, wait)
        with pytest.raises(RanksFailed):
            groups["rollout"].call(Verb.IMPORT_BUCKET, [wait, {"do": "kill"}])
        with pytest.raises(RanksFailed):
            export.result()
        with pytest.raises(RanksFailed):
            groups["rollout"].call(Verb.IMPORT_BUCKET, wait, ranks=[0, 1])
        assert len(groups["rollout"].call(Verb.IMPORT_BUCKET)) == 1, "the next verb is not of those that were released"


def test_a_replica_that_is_lost_for_good_is_left_out(tmp_path: Path) -> None:
    failures: list[Evidence] = []
    with probe_groups(tmp_path, role_plan("actor", 1), role_plan("rollout", 3)) as groups:
        rollout = groups["rollout"]
        groups.ranks.allow_restarts(RestartPolicy("rollout", 0, failures.append, least=2))
        with pytest.raises(RanksFailed) as caught:
            rollout.call(Verb.PING, [{}, {"do": "kill"}, {}])
        assert (sorted(caught.value.call.answers), caught.value.call.failed) == ([0, 2], {1})
        assert [one.rank for one in failures] == [1]
        assert (groups.ranks.failed("rollout"), groups.ranks.dropped("rollout")) == ([], [1])
        assert (rollout.size, rollout.here) == (2, [0, 2])
        assert [answer.body["rank"] for answer in rollout.call(Verb.PING)] == [0, 2]
        with pytest.raises(RoleFailure, match="not a number"):  # an error of its own is no loss
            rollout.call(Verb.PING, {"do": "raise", "rank": 2})
        with pytest.raises(RoleFailure, match="SIGKILL") as failure:  # fewer would be left than the run needs
            rollout.call(Verb.PING, {"do": "kill", "rank": 2})
        assert failure.value.rank == 2


def test_a_run_begins_with_fewer_replicas_and_takes_in_who_comes_late(tmp_path: Path) -> None:
    """Of four the second cannot be made, the third dials late, the fourth is not built in time."""
    warnings: list[str] = []
    (tmp_path / "sitecustomize.py").write_text(WAIT_AT_THE_GATE)
    plan, gate = role_plan("rollout", 4), tmp_path / "gate"
    path = f"{plan.env['PYTHONPATH']}{os.pathsep}{tmp_path}"
    plan = replace(plan, env={**plan.env, "PYTHONPATH": path, "PROBE_GATE": str(gate)})
    with probe_groups(tmp_path, role_plan("actor", 1), plan, factory="gated", start=False) as groups:
        rollout, ranks = groups["rollout"], groups.ranks
        groups.membership.host_of = lambda role, rank: {2: "node-3"}.get(rank, "")
        begin_with_fewer(groups, RestartPolicy("rollout", 0, FailureWarnings(groups, warnings.append), least=1))

        def hurry() -> None:
            """The deadline passes as soon as the others are there, and the third waits."""
            here = {("actor", 0), ("rollout", 0), ("rollout", 3)} <= groups.membership.members.keys()
            if ranks.dropped("rollout") and here and "waiting" in tail(groups.launcher.log_path("rollout", 2)):
                groups._start_timeout_s = 0.0

        groups._on_tick = hurry
        groups.start()
        assert (ranks.dropped("rollout"), ranks.late("rollout"), rollout.here) == ([1], [2], [0, 3])
        assert "rollout rank 1 failed for good: ImportError: no engine for rank 1" in warnings[0]
        assert "rollout rank 2 on node-3 did not join within" in warnings[1]
        assert "The run continues with 2 of 4 replicas (rollout.min_processes = 1)" in warnings[1]
        assert "rank2.log, which ends in: waiting for the gate" in warnings[1]

        call = rollout.post(Verb.BUILD, timeout_s=60)
        assert wait_until(lambda: (groups.tick(), call.answers)[1])
        call._deadline = 0.0
        with pytest.raises(RanksFailed):
            call.result()
        assert (sorted(call.answers), ranks.dropped("rollout"), groups.arrived("rollout")) == ([0], [1, 3], [])
        assert "rollout rank 3 failed for good: was not built within 60 s" in warnings[2]
        assert [answer.body["rank"] for answer in rollout.call(Verb.PING)] == [0], "prompts go to who is there"

        gate.touch()
        assert wait_until(lambda: (groups.tick(), groups.arrived("rollout") == [2])[1])
        with groups.join("rollout") as came:
            assert (came, rollout.here) == ([2], [0])
            rollout.call(Verb.BUILD, ranks=[2])
        assert [answer.body["rank"] for answer in rollout.call(Verb.PING)] == [0, 2]


def test_a_host_that_comes_late_is_checked_and_its_rank_joins(tmp_path: Path) -> None:
    """One of two is not there when the run begins. A third comes, and cannot take part."""
    warnings: list[str] = []
    gate, model, plan = tmp_path / "gate", tmp_path / "model", role_plan("rollout", 3)
    waits = ("sh", "-c", f"while ! [ -e {gate} ]; do sleep 0.05; done; exec sh")
    pending = dict.fromkeys(("node-2", "node-3"), "is not there: no room")
    hosts = LocalHosts("node-2", "node-3", pending=pending, replaces=True, **{"node-2": waits, "node-3": waits})
    remote = []
    for number, folder in ((1, tmp_path), (2, model)):
        check = RemoteHost(number, hosts.names[number], sys.executable, "").check(Questions("", folders=[str(folder)]))
        remote.append(RemoteNode(hosts.names[number], number, number, plan.command, plan.env, check))
    plan = replace(plan, nodes=3, remote=tuple(remote))
    with probe_groups(tmp_path, plan, cluster=hosts, start=False) as groups:
        rollout, ranks = groups["rollout"], groups.ranks
        begin_with_fewer(groups, RestartPolicy("rollout", 0, FailureWarnings(groups, warnings.append), least=1))
        groups.start()
        assert (ranks.late("rollout"), rollout.here) == ([1, 2], [0])
        assert "rollout rank 1 on node-2 is not there: no room. The run continues with 2 of 3" in warnings[0]
        gate.touch()
        assert wait_until(lambda: (groups.tick(), groups.arrived("rollout") == [1])[1])
        with groups.join("rollout") as came:
            assert came == [1]
        assert wait_until(lambda: (groups.tick(), ranks.dropped("rollout") == [2])[1])
        assert f"node-3 cannot take part: host node-3 has no folder {model} (all hosts need" in warnings[2]
        assert [answer.body["rank"] for answer in rollout.call(Verb.PING)] == [0, 1]

        os.kill(psutil.Process(rollout.call(Verb.PING)[1].body["pid"]).ppid(), signal.SIGKILL)  # with its host
        assert wait_until(lambda: (groups.tick(), ranks.late("rollout") == [1])[1])
        assert "the connection to node-2 ended" in warnings[3]
        assert wait_until(lambda: (groups.tick(), groups.arrived("rollout") == [1])[1]), "on what took its place"
        with groups.join("rollout"):
            pass
        assert [answer.body["rank"] for answer in rollout.call(Verb.PING)] == [0, 1]
    assert hosts.closed

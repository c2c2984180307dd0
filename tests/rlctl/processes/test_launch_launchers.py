"""Launchers other than torchrun, with real processes: DeepSpeed's, SLURM's srun (a stand-in), and a second node."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm
from listeners import listeners
from local_hosts import LocalHosts
from optional import needs_deepspeed
from probe_groups import SUPPORT, probe_groups, wait_until
from running import preset
from strangers import disturb_all
from test_placement import plan as make

from rlctl.presets import write_batch_script
from rlctl.processes.calls import RanksFailed
from rlctl.processes.failures import Evidence
from rlctl.processes.placement import RolePlan, make_plan
from rlctl.processes.rank_states import RestartPolicy
from rlctl.processes.slurm import SlurmJob
from specs.errors import RoleFailure, SpecError
from specs.load.load import load_spec
from specs.packages import package_root
from specs.schema.roles import ROLES
from specs.wire.messages import Verb

BOUND_S = 80.0
TWO = LocalHosts("second")
WANTED = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
# What srun does that matters here: a process per task with its place in SLURM's words; all end when one fails.
SRUN = """#!{python}
import os, subprocess, sys, time
words = sys.argv[1:]
tasks, each = (int(words[words.index(name) + 1]) for name in ("--ntasks", "--ntasks-per-node"))
command = words[words.index("--kill-on-bad-exit=1") + 1:]
def task(n):
    place = {{"SLURM_PROCID": str(n), "SLURM_NTASKS": str(tasks), "SLURM_LOCALID": str(n % each)}}
    return subprocess.Popen(command, env={{**os.environ, **place, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}})
running = [task(n) for n in range(tasks)]
while codes := [p.poll() for p in running]:
    if any(codes):
        [p.kill() for p in running]
        sys.exit(137)
    if None not in codes:
        sys.exit(0)
    time.sleep(0.05)
"""


def probe_plan(launcher: str, **section: Any) -> RolePlan:
    """The actor's plan as rlctl makes it, with the probe role's folder on its path."""
    role = make(actor={"processes": 2, "launcher": launcher, **section}).role("actor")
    return replace(role, env={**role.env, "PYTHONPATH": f"{package_root()}{os.pathsep}{SUPPORT}"})


@pytest.fixture
def port() -> Iterator[int]:
    """A port that no other process on this machine is given, for it is bound, and where torch's stores may listen."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def on_two_nodes(name: str, port: int = 29400, **section: Any) -> RolePlan:
    """Both nodes are this machine."""
    cluster = {"kind": "ray", "port": port}
    made = make(**{name: {"nodes": 2, **section}}, cluster=cluster, names=TWO.names, address=TWO.address).role(name)
    (there,) = made.remote
    env = {**made.env, "PYTHONPATH": probe_plan("torchrun").env["PYTHONPATH"]}
    return replace(made, env=env, remote=(replace(there, env=env),))


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for srun on the PATH."""
    script = tmp_path / "bin" / "srun"
    script.parent.mkdir()
    script.write_text(SRUN.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")


def places(groups: Any) -> list[dict[str, str]]:
    return [answer.body["env"] for answer in groups["actor"].call(Verb.PING, {"env": WANTED})]


def check_places(found: list[dict[str, str]], local: list[str], local_size: str) -> None:
    assert [place["RANK"] for place in found] == ["0", "1"]
    assert [place["WORLD_SIZE"] for place in found] == ["2", "2"]
    assert [place["LOCAL_RANK"] for place in found] == local
    assert [place["LOCAL_WORLD_SIZE"] for place in found] == [local_size] * 2
    assert {place["MASTER_ADDR"] for place in found} == {"127.0.0.1"}
    assert len({place["MASTER_PORT"] for place in found}) == 1
    assert found[0]["MASTER_PORT"].isdecimal()


@needs_deepspeed
def test_deepspeed_starts_ranks_and_a_death_ends_them_all(tmp_path: Path) -> None:
    with probe_groups(tmp_path, probe_plan("deepspeed"), start_timeout_s=160) as groups:
        check_places(places(groups), ["0", "1"], "2")
        started = time.monotonic()
        with pytest.raises(
            RoleFailure, match="deepspeed: its process ended"
        ):  # it does not report which rank was first
            groups["actor"].call(Verb.PING, {"do": "kill", "rank": 1, "sleep_s": 600})
        assert time.monotonic() - started < BOUND_S
    assert (tmp_path / "actor" / "rank1.log").exists()


def test_strangers_reach_loopback_alone_and_change_nothing_there(tmp_path: Path) -> None:
    """The driver, torchrun's agent, gloo."""
    before, plan = set(listeners()), probe_plan("torchrun")
    with warm.children(), probe_groups(tmp_path, plan, module="peer_role", factory="gloo") as groups:

        def sums() -> list[float]:
            return [answer.body["total"] for answer in groups["actor"].call(Verb.PING)]

        assert sums() == [4.0, 4.0]
        assert disturb_all(before, tmp_path, at_least=3) == 0, "torch's store listens, although no rank needs it"
        assert sums() == [4.0, 4.0]


@pytest.mark.usefixtures("srun")
def test_srun_gives_ranks_their_places_and_devices(tmp_path: Path) -> None:
    with probe_groups(tmp_path, probe_plan("srun", devices=[2, 3])) as groups:
        check_places(places(groups), ["0", "1"], "2")
        seen = groups["actor"].call(Verb.PING, {"env": ["CUDA_VISIBLE_DEVICES"]})
        assert [answer.body["env"]["CUDA_VISIBLE_DEVICES"] for answer in seen] == ["2", "3"]


def test_a_second_node_strangers_and_the_death_of_its_rank(tmp_path: Path, port: int) -> None:
    before, plan = set(listeners()), on_two_nodes("actor", port, processes=2, launcher="torchrun")
    with warm.children(), probe_groups(tmp_path, plan, cluster=TWO) as groups:
        check_places(places(groups), ["0", "0"], "1")
        assert wait_until(lambda: disturb_all(before, tmp_path, at_least=2) == 1), "the store of torchrun's agents"
        check_places(places(groups), ["0", "0"], "1")
        with pytest.raises(RoleFailure, match="SIGKILL") as caught:
            groups["actor"].call(Verb.PING, {"do": "kill", "rank": 1, "sleep_s": 600})
        assert (caught.value.rank, caught.value.host) == (1, "second")


def test_replicas_on_a_second_node_are_started_again_alone_or_with_their_connection(tmp_path: Path) -> None:
    with probe_groups(tmp_path, on_two_nodes("rollout", processes=4), cluster=TWO) as groups:
        rollout = groups["rollout"]
        failures: list[Evidence] = []
        groups.ranks.allow_restarts(RestartPolicy("rollout", 3, failures.append))
        first = [answer.body for answer in rollout.call(Verb.PING)]
        assert [body["local_rank"] for body in first] == [0, 1, 0, 1]
        assert len({psutil.Process(body["pid"]).ppid() for body in first}) == 2, "this process, and one supervisor"
        with pytest.raises(RanksFailed) as caught:
            rollout.call(Verb.PING, {"do": "kill", "rank": 3})
        assert caught.value.call.failed == {3}
        with groups.restart("rollout") as ranks:
            assert ranks == [3]
        again = [answer.body["pid"] for answer in rollout.call(Verb.PING)]
        assert [body["pid"] for body in first][:3] == again[:3]
        assert psutil.Process(again[3]).ppid() == psutil.Process(again[2]).ppid(), "the same supervisor"

        os.kill(psutil.Process(again[3]).ppid(), signal.SIGKILL)  # and with it the connection
        assert wait_until(lambda: (groups.tick(), groups.ranks.failed("rollout"))[1] == [2, 3])
        assert "the connection to second ended" in failures[-1].message
        with groups.restart("rollout") as ranks:
            assert ranks == [2, 3]
        assert len(rollout.call(Verb.PING)) == 4
        assert "rollout rank 2 is started again" in (tmp_path / "rollout" / "rank2.log").read_text()
        with pytest.raises(RoleFailure, match="SIGKILL") as failure:
            rollout.call(Verb.PING, {"do": "kill", "rank": 2})
        assert (failure.value.rank, failure.value.host) == (2, "second")


def test_a_host_that_is_cut_off_is_named_and_no_healthy_thread_is_shown(tmp_path: Path) -> None:
    with probe_groups(tmp_path, on_two_nodes("rollout", processes=4), cluster=TWO) as groups:
        pids = [answer.body["pid"] for answer in groups["rollout"].call(Verb.PING)]
        for pid in pids[2:]:
            os.kill(pid, signal.SIGSTOP)
        for peer in groups.hub._peers.values():
            peer.reported = peer.member.rank < 2  # on a busy machine any may be silent for as long
        groups.hub.heartbeat_timeout_s = 1.5
        with pytest.raises(RoleFailure, match="no sign of life from host second for ") as caught:
            groups["rollout"].call(Verb.PING, {"sleep_s": 60})
        assert (caught.value.host, caught.value.log_tail) == ("second", "")


def arguments_from(
    script: Path, folder: Path, nodes: list[str], *options: str, far: tuple[str, ...] = (), **more: str
) -> list[str]:
    """What a batch script tells rlctl in a job on these nodes; with `far`, those of its second part. The environment of
    rlctl is left in `folder`."""
    lists = {"n[0-9]": nodes, "far[0-9]": far}
    cases = "".join(f"'show hostnames {name}') printf '%s\\n' {' '.join(those)};;\n" for name, those in lists.items())
    for name, program in (
        ("rlctl", f'printf "%s\\n" "$@"; env -0 >{folder}/environment'),
        ("scontrol", f'case "$*" in\n{cases}*) exit 1;;\nesac'),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{program}\n")
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_NUM_NODES": str(len(nodes)), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-9]", **more}
    if far:
        job |= {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n[0-9]"}
        job |= {"SLURM_JOB_NODELIST_HET_GROUP_1": "far[0-9]"}
    env = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(folder), **job}
    done = subprocess.run(
        ["bash", str(script), *options], env=env, capture_output=True, text=True, check=True, cwd=folder
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("section", "nodes", "far", "numbers"),
    [
        ("", ["n0", "n1", "n2"], (), [1, 2]),
        ("", ["n0"], (), []),
        ("first_node = 1\nprocesses = 2\n", ["n0"], ("f0", "f1", "f2"), [1, 2, 3]),
        ("first_node = 1\nprocesses = 2\n", ["n0", "n1"], ("f0",), [2]),
    ],
)
def test_replicas_are_on_the_hosts_of_a_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    nodes: list[str],
    far: tuple[str, ...],
    numbers: list[int],
) -> None:
    spec = preset("quickstart", tmp_path)
    if section:
        text = spec.read_text().replace("[rollout]\n", f"[rollout]\n{section}", 1)
        text = text.replace("[reward]\n", "[reward]\nnodes = 2\nprocesses = 2\n", 1)
        spec.write_text(f'{text}\n[cluster]\nkind = "slurm"\n')
    arguments = arguments_from(write_batch_script(spec, force=False), tmp_path, nodes, far=far)
    assert arguments[:2] == ["train", "quickstart.toml"]
    overrides = [word for flag, word in pairwise(arguments) if flag == "--set"]
    assert "actor.launcher=srun" in overrides
    made = make_plan(load_spec(spec, overrides), tmp_path)
    rollout, actor = made.role("rollout"), made.role("actor")
    assert [node.number for node in rollout.remote] == numbers
    assert (rollout.nodes, actor.nodes) == (len(far) or len(nodes), len(nodes))
    assert rollout.processes == rollout.nodes * (2 if far else 1)
    assert len(made.role("reward").remote) == (len([*nodes, *far]) - 1 if section else 0)
    env = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().split("\0") if line)
    monkeypatch.setenv("PATH", env["PATH"])  # with scontrol
    job = SlurmJob(env)
    job.reserve(print)
    assert job.names == [*nodes, *far]
    for node in [*rollout.remote, *made.role("reward").remote]:
        step = job.step(node.number)
        assert (step[0], step[-2:]) == ("srun", (f"--nodelist={job.names[node.number]}", "sh"))
        part = [f"--het-group={int(node.number >= len(nodes))}"] if far else []
        assert [option for option in step if "het" in option] == part
    script = (tmp_path / "quickstart.sbatch").read_text()
    assert script.count("#SBATCH hetjob") == bool(far)
    for option in ("--partition", "--account"):
        assert script.count(f"##SBATCH {option}=NAME") == (2 if far else 1)


def test_a_job_that_was_put_back_into_the_queue_goes_on(tmp_path: Path) -> None:
    script = write_batch_script(preset("quickstart", tmp_path), force=False)
    assert "--resume" not in arguments_from(script, tmp_path, ["n0"], SLURM_RESTART_COUNT="1"), "nothing was begun"
    run = tmp_path / "runs" / "quickstart"
    run.mkdir(parents=True)
    (run / "resolved.json").touch()  # `RunDir.resolved`
    assert "--resume" not in arguments_from(script, tmp_path, ["n0"])
    assert "--resume" in arguments_from(script, tmp_path, ["n0"], SLURM_RESTART_COUNT="1")


def test_a_key_of_another_cluster_is_refused_before_a_job_waits_for_it(tmp_path: Path) -> None:
    spec = preset("quickstart", tmp_path)
    text = spec.read_text().replace("[actor]\n", '[actor]\nnodes = 2\nprocesses = 2\nlauncher = "torchrun"\n', 1)
    spec.write_text(f'{text}\n[cluster]\nkind = "ray"\n')
    write_batch_script(spec, force=False)
    spec.write_text(f'{spec.read_text()}address = "head:6379"\n')
    with pytest.raises(SpecError, match=r"cluster.address = .*: has no effect"):
        write_batch_script(spec, force=True)


@pytest.mark.parametrize("name", ["dpo-cpu", "reward-model-cpu", "ppo-cpu"])
def test_every_trainer_has_all_hosts_of_a_job(tmp_path: Path, name: str) -> None:
    spec = preset(name, tmp_path)
    arguments = arguments_from(write_batch_script(spec, force=False), tmp_path, ["n0", "n1", "n2"])
    overrides = [word for flag, word in pairwise(arguments) if flag == "--set"]
    run = load_spec(spec, overrides)
    plan = make_plan(run, tmp_path)
    trainers = [plan.role(role) for role in run.roles if ROLES[role].is_trainer]
    assert {(one.launcher, one.nodes, one.processes) for one in trainers} == {("srun", 3, 3)}
    assert (run.cluster is None) == ("rollout" not in run.roles), "srun knows the hosts of its job"

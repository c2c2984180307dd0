"""What a host says of itself before a run, through a shell that leads to this machine; and who must reach whom."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from small_spec import raw_spec

from rlctl import __version__
from rlctl.processes.host_check import RemoteHost, check_hosts, one_machine, problem_of
from rlctl.processes.hosts import (
    HostInquiry,
    JoiningHost,
    check_slurm,
    may_begin_without,
    reachability_groups,
    remote_hosts,
)
from rlctl.processes.placement import make_plan, package_root
from rlctl.processes.remote_check import HostReply, Questions, checksum_of, sizes_in
from specs.errors import SpecError
from specs.schema.spec import Spec

FAR = RemoteHost(1, "b", ("sh",), sys.executable, str(package_root()))


def said_of(host: RemoteHost, **changes: Any) -> str:
    plain = Questions(address="127.0.0.1", ports=[0], interface="", folders=[], shared=[], models={}, files={})
    with pytest.raises(SpecError) as caught:
        check_hosts([host], [], cast("Questions", {**plain, **changes}))
    return str(caught.value)


def test_a_host_without_the_interpreter() -> None:
    said = said_of(replace(FAR, python="/nowhere/bin/python"))
    assert "host b cannot be used: exit code 127" in said
    assert "/nowhere/bin/python must exist there" in said
    assert "cannot be used: exit code 3: no bash here" in said_of(
        replace(FAR, shell=("sh", "-c", "echo no bash here; exit 3"))
    )


def test_a_host_without_a_folder(tmp_path: Path) -> None:
    assert f"host b has no folder {tmp_path / 'run'}" in said_of(FAR, folders=[str(tmp_path), str(tmp_path / "run")])
    model = tmp_path / "model"
    assert f"host b has no folder {model}" in said_of(FAR, models={str(model): {}})


def test_a_host_with_other_code_of_the_users(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def score(completion): return 1.0\n")
    checksum = checksum_of(str(file))
    assert not said_of(replace(FAR, files={str(file): checksum})).count("another file")
    file.write_text("def score(completion): return 2.0\n")
    assert f"{file} is not on host b, or another file than here" in said_of(replace(FAR, files={str(file): checksum}))


def test_a_host_without_which_a_run_may_begin() -> None:
    """That its interpreter is missing is an error all the same: there is a way to it."""
    closed = replace(FAR, number=2, name="c", shell=("sh", "-c", "echo no route to host; exit 255"))
    asked = Questions(address="127.0.0.1", ports=[0], interface="", folders=[], shared=[], models={}, files={})
    assert check_hosts([closed], [], asked, {2}.issuperset) == {"c": "exit code 255: no route to host"}
    with pytest.raises(SpecError, match="host c cannot be used: exit code 255: no route to host"):
        check_hosts([closed], [], asked, lambda hosts: False)
    with pytest.raises(SpecError, match="host c cannot be used: exit code 127"):
        check_hosts([replace(closed, shell=("sh",), python="/nowhere/bin/python")], [], asked, {2}.issuperset)


def test_a_host_that_comes_late_is_asked_what_the_others_were(tmp_path: Path) -> None:
    """Its shell leads to this machine, which is refused as the last thing that may be wrong."""
    (tmp_path / "rewards.py").write_text("def score(completion):\n    return 1.0\n")
    (tmp_path / "hosts").write_text("here slots=2\nb slots=2\nc slots=2\n")
    shell, gate = f"[ -e {tmp_path}/{{host}} ] || exit 255; exec sh", tmp_path / "b"
    cluster = {"hostfile": "hosts", "address": "127.0.0.1", "remote_shell": ["sh", "-c", shell]}
    rollout = {"nodes": 2, "first_node": 1, "processes": 2, "min_processes": 1}
    reward = {"terms": [{"kind": "function", "path": "rewards.py:score"}], "nodes": 2, "processes": 2}
    raw = raw_spec(rollout=rollout, reward={**reward, "min_processes": 1}, cluster=cluster, sync={"transport": "group"})
    spec = Spec.model_validate(raw)
    plan = make_plan(spec, tmp_path, address="127.0.0.1")
    hosts, circles = remote_hosts(spec, plan, tmp_path), reachability_groups(spec, plan)
    asking = HostInquiry(spec, tmp_path, tmp_path / "run", plan, hosts, circles)
    late = JoiningHost("b", "exit code 255: no output", asking)
    assert late.check() == late.why
    gate.touch()
    with pytest.raises(SpecError, match="host b is the host where rlctl runs"):
        late.check()
    (tmp_path / "rewards.py").write_text("def score(completion):\n    return 2.0\n")
    with pytest.raises(SpecError, match=r"rewards\.py is not on host b, or another file than here"):
        late.check()
    late.stop()
    assert late.check() != ""
    assert not [*tmp_path.glob(".rlctl-*")]


def test_which_hosts_a_run_may_begin_without() -> None:
    actor = {"nodes": 2, "processes": 2, "launcher": "srun"}
    rollout = {"first_node": 1, "nodes": 3, "processes": 6, "min_processes": 2}
    reward = {"terms": [{"kind": "exact_match"}], "nodes": 3, "processes": 3}

    def may(*hosts: int, **more: Any) -> bool:
        raw = raw_spec(actor=actor, rollout=rollout, reward={**reward, **more})
        return may_begin_without(Spec.model_validate(raw), frozenset(hosts))

    assert may()
    assert may(3)
    assert not may(1), "the actor's second"
    assert not may(2), "all processes of the reward role are needed"
    assert may(2, 3, min_processes=2)
    assert not may(2, min_processes=3)


def test_a_host_with_another_folder_under_the_same_name(tmp_path: Path) -> None:
    assert f"{tmp_path} of host b is another folder" in said_of(FAR, shared=[str(tmp_path / "marker")])
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "weights.safetensors").write_bytes(b"12")
    (tmp_path / "README.md").write_text("no matter")
    assert sizes_in(str(tmp_path)) == {"config.json": 2, "weights.safetensors": 2}
    models = {str(tmp_path): {"config.json": 2, "weights.safetensors": 3}}
    assert f"{tmp_path / 'weights.safetensors'} is not on host b, or of another size" in said_of(FAR, models=models)


def test_one_machine_under_two_names() -> None:
    assert "host b is the host where rlctl runs" in said_of(FAR)
    answer = cast("HostReply", {"machine": "m"})
    (found,) = one_machine([(FAR, answer), (replace(FAR, number=2, name="c"), answer)])
    assert "host c is the same machine as b" in str(found)
    assert not one_machine([(FAR, cast("HostReply", {"machine": ""})), (FAR, cast("HostReply", {"machine": ""}))])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"gpus": 4}, "host b has 4 GPUs, and number 7 is asked for"),
        ({"gpus": 0}, "host b has 0 GPUs"),
        ({"time": 1000.0 + 3600}, "the clock of host b is 3,600 s ahead of this host's"),
        ({"time": 1000.0 - 3600}, "the clock of host b is 3,600 s behind this host's"),
        ({"read_only": ["/runs"]}, "host b cannot write to /runs"),
        ({"dial": "10.0.0.1:29400: timed out"}, "b cannot reach it: 10.0.0.1:29400: timed out"),
        ({"version": "0.0.1"}, "rlctl 0.0.1 is there"),
        ({"gpus": 8, "time": 1030.0}, ""),
        ({"gpus": None}, ""),
    ],
)
def test_an_answer_that_keeps_a_host_from_its_part(answer: dict[str, Any], words: str) -> None:
    host = replace(FAR, devices=frozenset(range(8)))
    plain: dict[str, Any] = {name: [] for name in ("missing", "unshared", "read_only", "different", "changed")}
    plain |= {"version": __version__, "machine": "", "dial": "", "gpus": 8, "door": ("10.0.0.2", 1), "time": 1000.0}
    found = problem_of(host, cast("HostReply", plain | answer), "10.0.0.1", now=1000.0)
    assert (words in str(found)) if words else found is None


def test_who_is_asked_and_who_must_reach_whom(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("".join(f"{name} slots=8\n" for name in "abcd"))
    cluster = {"hostfile": "hosts", "address": "10.0.0.1"}
    actor = {"nodes": 2, "processes": 2, "launcher": "srun", "devices": [0, 1]}
    rollout = {"first_node": 2, "nodes": 2, "processes": 2, "devices": [3]}
    spec = Spec.model_validate(raw_spec(actor=actor, rollout=rollout, cluster=cluster, sync={"transport": "group"}))
    made = make_plan(spec, tmp_path, address="10.0.0.1")
    asked = {host.number: host for host in remote_hosts(spec, made, tmp_path)}
    assert {number: (host.name, host.devices) for number, host in asked.items()} == {
        1: ("1 of the job", {0, 1}),
        2: ("c", {3}),
        3: ("d", {3}),
    }
    assert asked[1].shell == ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--relative=1", "sh")
    assert [circle.hosts for circle in reachability_groups(spec, made)] == [{0, 1}, {0, 2, 3}]

    spec = Spec.model_validate(
        raw_spec(actor={**actor, "launcher": "torchrun"}, rollout={**rollout, "first_node": 0}, cluster=cluster)
    )
    (host,) = remote_hosts(spec, make_plan(spec, tmp_path, address="10.0.0.1"), tmp_path)
    assert (host.name, host.devices) == ("b", {0, 1, 3})


def test_an_allocation_smaller_than_the_spec() -> None:
    spec = Spec.model_validate(raw_spec(actor={"nodes": 3, "processes": 3, "launcher": "srun"}))
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    with pytest.raises(SpecError, match=r"actor\.nodes = 3: the SLURM job has 2: n\[1-2\]"):
        check_slurm(spec, job)
    check_slurm(spec, {**job, "SLURM_JOB_NUM_NODES": "3"})
    parts = {"SLURM_JOB_NUM_NODES_HET_GROUP_0": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "a[1-2]"}
    with pytest.raises(SpecError, match=r"the SLURM job has 2: a\[1-2\]"):
        check_slurm(spec, {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "5", **parts})
    with pytest.raises(SpecError, match="this is not a SLURM job"):
        check_slurm(spec, {})

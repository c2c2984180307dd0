"""What keeps a host from its part, through a shell that leads to this machine; and which hosts are checked."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_spec import raw_spec

from rlctl import __version__
from rlctl.processes import remote_check
from rlctl.processes.host_check import RemoteHost, check_hosts
from rlctl.processes.hosts import check_slurm, may_begin_without, plan_for_hosts, remote_hosts
from rlctl.processes.placement import make_plan, package_root
from rlctl.processes.remote_check import Questions, checksum_of, problem_here, sizes_in
from specs.errors import SpecError
from specs.schema.recipes import RlSpec

FAR = RemoteHost(1, "b", ("sh",), sys.executable, str(package_root()))
PLAIN = Questions(
    version=__version__, machine="", address="127.0.0.1", ports=[0], folders=[], shared=[], models={}, files={},
    host="b", gpus=0,
)  # fmt: skip


def check(host: RemoteHost, *may_lack: int) -> dict[str, str]:
    return check_hosts([host], PLAIN, set(may_lack).issuperset if may_lack else lambda numbers: False)


def test_a_host_that_cannot_be_used_or_reached() -> None:
    """That its interpreter is missing is an error also where the run may begin without it: there is a way to it."""
    assert check(FAR) == {}
    closed = replace(FAR, shell=("sh", "-c", "echo no route to host; exit 255"))
    assert check(closed, 1) == {"b": "exit code 255: no route to host"}
    with pytest.raises(SpecError, match="host b cannot be used: exit code 255: no route to host"):
        check(closed)
    with pytest.raises(SpecError, match=r"(?s)exit code 127.*/nowhere/bin/python must exist there"):
        check(replace(FAR, python="/nowhere/bin/python"), 1)
    with pytest.raises(SpecError, match=r"cluster\.remote_shell"):
        check(replace(FAR, shell=("/nowhere/ssh",)))
    with pytest.raises(SpecError, match=r"rewards\.py is not on host b, or another file than here"):
        check(replace(FAR, files={"/nowhere/rewards.py": "checksum"}), 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "0.0.1"}, f"host b has rlctl {__version__}, and 0.0.1 is here"),
        ({"folders": ["{tmp}", "{tmp}/run"]}, "host b has no folder {tmp}/run"),
        ({"models": {"{tmp}/model": {}}}, "host b has no folder {tmp}/model"),
        ({"shared": ["{tmp}/marker"]}, "{tmp} of host b is another folder"),
        ({"shared": ["/proc/self/stat"]}, "host b cannot write to /proc/self"),
        ({"models": {"{tmp}": {"config.json": 3}}}, "{tmp}/config.json is not on host b, or of another size"),
        ({"models": {"{tmp}": {"config.json": 2}}}, ""),
        ({"files": {"{tmp}/config.json": "checksum"}}, "{tmp}/config.json is not on host b, or another file"),
        ({"gpus": 8}, "host b has 4 GPUs, and the spec names number 7"),
        ({"gpus": 4}, ""),
        ({"machine": remote_check.this_machine()}, "host b is the host where rlctl runs"),
    ],
)
def test_what_keeps_a_host_from_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("no matter")
    assert sizes_in(str(tmp_path)) == {"config.json": 2}
    monkeypatch.setattr(remote_check, "gpu_count", lambda: 4)
    asked = Questions(**json.loads(json.dumps({**PLAIN, **changes}).replace("{tmp}", str(tmp_path))))
    found = problem_here(asked)
    assert (words.replace("{tmp}", str(tmp_path)) in str(found)) if words else found is None


def test_a_host_that_comes_late_is_checked_before_its_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def score(completion):\n    return 1.0\n")
    (tmp_path / "hosts").write_text("here slots=2\nb slots=2\n")
    cluster = {"hostfile": "hosts", "address": "127.0.0.1", "remote_shell": ["false"]}
    terms = [{"kind": "function", "path": "rewards.py:score"}]
    reward = {"terms": terms, "nodes": 2, "processes": 2, "min_processes": 1}
    plan = plan_for_hosts(RlSpec.model_validate(raw_spec(reward=reward, cluster=cluster)), tmp_path, tmp_path / "run")
    assert plan.unreached == {"b": "exit code 1: no output"}
    (node,) = plan.role("reward").remote
    assert checksum_of(str(tmp_path / "rewards.py")) in node.check[-1]
    assert node.check[:-1] == (sys.executable, "-m", "rlctl.processes.remote_check")
    assert not [*tmp_path.glob(".rlctl-*")]


def test_which_hosts_a_run_may_begin_without() -> None:
    actor = {"nodes": 2, "processes": 2, "launcher": "srun"}
    rollout = {"first_node": 1, "nodes": 3, "processes": 6, "min_processes": 2}
    reward = {"terms": [{"kind": "exact_match"}], "nodes": 3, "processes": 3}

    def may(*hosts: int, **more: Any) -> bool:
        raw = raw_spec(actor=actor, rollout=rollout, reward={**reward, **more})
        return may_begin_without(RlSpec.model_validate(raw), frozenset(hosts))

    assert may()
    assert may(3)
    assert not may(1), "the actor's second"
    assert not may(2), "all processes of the reward role are needed"
    assert may(2, 3, min_processes=2)
    assert not may(2, min_processes=3)


def test_which_hosts_are_checked(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("".join(f"{name} slots=8\n" for name in "abcd"))
    cluster = {"hostfile": "hosts", "address": "10.0.0.1"}
    actor = {"nodes": 2, "processes": 2, "launcher": "srun", "devices": [0, 1]}
    rollout = {"first_node": 2, "nodes": 2, "processes": 2, "devices": [3]}
    spec = RlSpec.model_validate(raw_spec(actor=actor, rollout=rollout, cluster=cluster))
    found = {host.number: host for host in remote_hosts(spec, make_plan(spec, tmp_path, address="10.0.0.1"), tmp_path)}
    named = {number: (host.name, host.devices) for number, host in found.items()}
    assert named == {1: ("1 of the job", {0, 1}), 2: ("c", {3}), 3: ("d", {3})}
    assert found[1].shell == ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--relative=1", "sh")
    together = {"actor": {**actor, "launcher": "torchrun"}, "rollout": {**rollout, "first_node": 0}}
    spec = RlSpec.model_validate(raw_spec(**together, cluster=cluster))
    (host,) = remote_hosts(spec, make_plan(spec, tmp_path, address="10.0.0.1"), tmp_path)
    assert (host.name, host.devices) == ("b", {0, 1, 3})


def test_an_allocation_smaller_than_the_spec() -> None:
    spec = RlSpec.model_validate(raw_spec(actor={"nodes": 3, "processes": 3, "launcher": "srun"}))
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    with pytest.raises(SpecError, match=r"actor\.nodes = 3: the SLURM job has 2: n\[1-2\]"):
        check_slurm(spec, job)
    check_slurm(spec, {**job, "SLURM_JOB_NUM_NODES": "3"})
    parts = {"SLURM_JOB_NUM_NODES_HET_GROUP_0": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "a[1-2]"}
    with pytest.raises(SpecError, match=r"the SLURM job has 2: a\[1-2\]"):
        check_slurm(spec, {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "5", **parts})
    with pytest.raises(SpecError, match="this is not a SLURM job"):
        check_slurm(spec, {})

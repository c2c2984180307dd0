"""Check a host for its part through a shell on this machine; and which hosts are checked."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_hosts import LocalHosts
from small_spec import raw_spec

from rlctl import __version__
from rlctl.processes import host_check, remote_check
from rlctl.processes.host_check import RemoteHost, check_hosts
from rlctl.processes.hosts import host_needs, may_begin_without, on_fewer_nodes, remote_hosts
from rlctl.processes.placement import make_plan
from rlctl.processes.remote_check import Questions, checksum_of, problem_here, sizes_in
from rlctl.processes.slurm import check_slurm
from specs.errors import SpecError
from specs.load.load import spec_from
from specs.packages import package_root
from specs.schema.recipes import RlSpec

FAR = RemoteHost(1, "b", sys.executable, str(package_root()))
PLAIN = Questions("127.0.0.1", ports=[0], host="b")


def check(host: RemoteHost, *shell: str, within_s: float = 300.0) -> list[str]:
    said: list[str] = []
    check_hosts([host], LocalHosts("b", **({"b": shell} if shell else {})), PLAIN, within_s, said.append)
    return said


def test_a_host_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    check(FAR)
    with pytest.raises(SpecError, match="host b cannot be used: exit code 255: no route to host"):
        check(FAR, "sh", "-c", "echo no route to host; exit 255")
    with pytest.raises(SpecError, match=r"(?s)exit code 127.*/nowhere/bin/python must exist there"):
        check(replace(FAR, python="/nowhere/bin/python"))
    with pytest.raises(SpecError, match=r"rewards\.py is not on host b, or another file than here"):
        check(replace(FAR, files={"/nowhere/rewards.py": "checksum"}))
    with pytest.raises(SpecError, match=r"(?s)no answer within 0\.1 s.*raise run\.start_timeout_s"):
        check(FAR, "sh", "-c", "exec sleep 60", within_s=0.1)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SpecError, match=r"cluster\.kind.*srun cannot be started"):
        check(FAR, "srun")


def test_a_host_that_is_slow_is_waited_for_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy node, or a first import from a shared file system, takes longer than half a minute."""
    monkeypatch.setattr(host_check, "_SAID_S", 0.3)
    assert check(FAR, "sh", "-c", "sleep 1; exec sh") == ["waiting for an answer from b"]


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
    ],
)
def test_what_keeps_a_host_from_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("no matter")
    assert sizes_in(str(tmp_path)) == {"config.json": 2}
    monkeypatch.setattr(remote_check, "gpu_count", lambda: 4)
    found = problem_here(replace(PLAIN, ports=(), **json.loads(json.dumps(changes).replace("{tmp}", str(tmp_path)))))
    assert (words.replace("{tmp}", str(tmp_path)) in str(found)) if words else found is None


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
    # Replicas that span two nodes: either is lost with one of them, or with both.
    del actor["nodes"], actor["processes"], actor["launcher"]
    engine = {"kind": "vllm", "tensor_parallel": 2}
    rollout = {"nodes": 4, "first_node": 1, "processes": 2, "min_processes": 1, "engine": engine}
    rollout["allow_pickle_between_nodes"] = True
    reward = {"terms": [{"kind": "exact_match"}]}
    assert may(3)
    assert may(3, 4)
    assert not may(2, 3)


def test_a_run_begins_on_the_nodes_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers, and who shares their nodes, keep as many processes on each; replicas beside them move up."""
    actor = {"nodes": 4, "processes": 8, "launcher": "torchrun", "min_nodes": 2}
    rollout = {"first_node": 4, "nodes": 2, "processes": 2, "min_processes": 1}
    reward = {"terms": [{"kind": "exact_match"}], "nodes": 4, "processes": 4}
    raw = raw_spec(actor=actor, rollout=rollout, reward=reward, cluster={"kind": "slurm"})
    found = {}
    for there in (6, 5, 4, 3, 2):
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", str(there))
        settings = found[there] = on_fewer_nodes(RlSpec.model_validate(raw))
        assert spec_from(copy.deepcopy(raw), settings).lead_section.processes in (4, 6, 8)
    assert found[6] == found[5] == []
    actors = [[setting for setting in found[there] if "actor" in setting] for there in (4, 3)]
    assert actors == [["actor.nodes=3", "actor.processes=6"], ["actor.nodes=2", "actor.processes=4"]]
    assert found[3][2:] == ["rollout.first_node=2", "reward.nodes=2", "reward.processes=2"]
    assert found[2] == [], "fewer than actor.min_nodes: what is missing is said"
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    engine = {"kind": "vllm", "tensor_parallel": 2}
    raw["rollout"] = {"nodes": 4, "processes": 2, "engine": engine, "allow_pickle_between_nodes": True}
    assert on_fewer_nodes(RlSpec.model_validate(raw)) == [], "three nodes hold no two replicas of two"
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert "rollout.processes=1" in on_fewer_nodes(RlSpec.model_validate(raw))


def test_what_each_host_takes_and_which_are_checked(tmp_path: Path) -> None:
    actor = {"nodes": 2, "processes": 2, "launcher": "srun", "devices": [0, 1]}
    rollout = {"first_node": 2, "nodes": 2, "processes": 2, "devices": [3], "min_processes": 1}
    (tmp_path / "rewards.py").write_text("def score(completion):\n    return 1.0\n")
    terms = [{"kind": "function", "path": "rewards.py:score"}]
    reward = {"terms": terms, "nodes": 4, "processes": 4, "min_processes": 3}
    spec = RlSpec.model_validate(raw_spec(actor=actor, rollout=rollout, reward=reward, cluster={"kind": "slurm"}))
    needs = host_needs(spec)
    assert [(each.gpus, each.required) for each in needs] == [(2, True), (2, True), (4, True), (4, False)]
    assert needs[2].bundle == {"CPU": 1.0, "GPU": 4.0}
    plan = make_plan(spec, tmp_path, address="10.0.0.1", names="abcd")
    found = {host.number: host for host in remote_hosts(spec, plan, tmp_path, "abcd")}
    named = {number: (host.name, host.devices) for number, host in found.items()}
    assert named == {1: ("b", {0, 1}), 2: ("c", {3}), 3: ("d", {3})}
    assert {*found[3].files.values()} == {checksum_of(str(tmp_path / "rewards.py"))}


def test_an_allocation_smaller_than_the_spec() -> None:
    spec = RlSpec.model_validate(raw_spec(actor={"nodes": 3, "processes": 3, "launcher": "srun"}))
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    with pytest.raises(SpecError, match=r"actor\.nodes = 3: the SLURM job has 2: n\[1-2\]"):
        check_slurm(spec, job)
    check_slurm(spec, {**job, "SLURM_JOB_NUM_NODES": "3"})
    parts = {"SLURM_JOB_NUM_NODES_HET_GROUP_0": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "a[1-2]"}
    with pytest.raises(SpecError, match=r"the SLURM job has 2: a\[1-2\]"):
        check_slurm(spec, {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "5", **parts})
    apart = {"rollout": {"first_node": 1, "nodes": 2, "processes": 2}, "cluster": {"kind": "slurm"}}
    on_its_own = RlSpec.model_validate(raw_spec(**apart))
    with pytest.raises(SpecError, match=r"rollout\.nodes = 2: the SLURM job has 2: n\[1-2\]"):
        check_slurm(on_its_own, job)
    check_slurm(on_its_own, {**job, **parts, "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2"})
    with pytest.raises(SpecError, match="this is not a SLURM job"):
        check_slurm(spec, {})

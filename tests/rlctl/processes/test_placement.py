"""The plan: commands, threads, devices, environments. Nothing is started."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_spec import only_problem, raw_spec

from rlctl.processes import placement
from rlctl.processes.placement import Plan, make_plan, usable_cores
from specs.errors import SpecError
from specs.packages import package_root
from specs.schema.recipes import RlSpec


def plan(cores: int = 8, *, names: Sequence[str] = (), address: str = "", **sections: Any) -> Plan:
    spec = RlSpec.model_validate(raw_spec(**sections))
    with pytest.MonkeyPatch.context() as patch:
        if cores:
            patch.setenv("RLCTL_CPU_CORES", str(cores))
        return make_plan(spec, Path("/specs"), names=names, address=address)


@pytest.fixture(autouse=True)
def _no_devices_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "RLCTL_CPU_CORES", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)


def test_cores_are_shared_out_by_process_and_by_roles_that_work_at_the_same_time() -> None:
    def threads(**sections: Any) -> list[int]:
        return [role.threads for role in plan(8, **sections).roles]  # data, reward, rollout, actor

    assert threads(actor={"processes": 2}, rollout={"processes": 16}) == [8, 1, 1, 4]
    assert threads(actor={"threads": 3}) == [8, 1, 8, 3]
    assert threads(rollout={"max_staleness": 1, "processes": 2}) == [4, 1, 2, 4]
    assert threads(actor={"devices": [0]}, rollout={"max_staleness": 1}) == [8, 1, 8, 8], "the actor computes elsewhere"
    assert plan(1, rollout={"max_staleness": 1}).role("actor").threads == 1
    env = plan(8, actor={"processes": 2}).role("actor").env
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "4"


def test_environment_and_what_the_user_adds() -> None:
    env = plan(rollout={"env": {"OMP_NUM_THREADS": "5", "MINE": "x", "PYTHONPATH": "/mine"}}).role("rollout").env
    assert (env["OMP_NUM_THREADS"], env["MINE"]) == ("5", "x")
    assert env["PYTHONPATH"] == f"{package_root()}{os.pathsep}/mine"  # ours stays: without it no rank starts
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert env["PYTHONSAFEPATH"] == "1"
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert plan(actor={"env": {"NCCL_SOCKET_IFNAME": "ib0"}}).role("actor").env["NCCL_SOCKET_IFNAME"] == "ib0"
    assert "HF_HUB_OFFLINE" not in env


def test_devices_count_what_this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(actor={"devices": [1]}).role("actor").env["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    role = plan(actor={"devices": [1]}).role("actor")
    assert (role.devices, role.env["CUDA_VISIBLE_DEVICES"]) == ((1,), "5")
    assert "OMP_WAIT_POLICY" not in role.env
    with pytest.raises(SpecError, match=r"actor\.devices = 2"):
        plan(actor={"devices": [2]})


def test_colocated_when_a_gpu_is_shared_or_as_asked() -> None:
    assert not plan().colocated
    assert plan(actor={"devices": [0, 1], "processes": 2}, rollout={"devices": [1]}).colocated
    assert not plan(actor={"devices": [0]}, rollout={"devices": [1]}).colocated
    assert plan(run={"colocate": "always"}).colocated
    assert not plan(run={"colocate": "never"}, actor={"devices": [0]}, rollout={"devices": [0]}).colocated


def test_usable_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5})
    monkeypatch.setattr(placement, "_CGROUP_LIMIT", tmp_path / "no-quota")
    monkeypatch.setattr(placement, "_SIBLINGS", str(tmp_path / "{}"))
    assert usable_cores() == 4, "where no file says which are threads of one core"
    for thread in range(6):
        (tmp_path / str(thread)).write_text(f"{thread % 4},{thread % 4 + 4}\n")
    assert usable_cores() == 3, "1 and 5 are one"
    monkeypatch.setenv("RLCTL_CPU_CORES", "7")
    assert usable_cores() == 7
    assert plan(0).role("actor").threads == 7
    monkeypatch.setenv("RLCTL_CPU_CORES", "many")
    with pytest.raises(SpecError, match="RLCTL_CPU_CORES = many"):
        usable_cores()


def test_nodes_of_a_torchrun_group() -> None:
    role = _two_nodes("torchrun", devices=[0, 1]).role("actor")
    place = ("--rdzv-endpoint", "10.0.0.1:29400", "--nnodes", "2", "--rdzv-conf", "node=0")
    worker = ("--nproc-per-node", "2", "-m", "workers.main", "--role", "actor")
    assert role.command == (sys.executable, "-m", "backends.torchrun", *place, *worker)
    (there,) = role.remote
    assert there.command == tuple("node=1" if word == "node=0" else word for word in role.command)
    assert (there.host, there.number) == ("b", 1)
    assert there.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "GLOO_SOCKET_IFNAME" not in role.env  # each host finds its own
    rollout = _two_nodes("torchrun", devices=[0, 1]).role("rollout")
    assert (rollout.env["GLOO_SOCKET_IFNAME"], rollout.env.get("NCCL_SOCKET_IFNAME")) == ("lo", None)
    assert [role.host_of(rank) for rank in range(4)] == ["", "", "b", "b"]
    alone = plan(actor={"processes": 2, "launcher": "torchrun"}).role("actor").command
    assert alone == (*role.command[:4], "127.0.0.1:{port}", *worker)
    assert role.ranks_of(1) == (2, 3)


def test_nodes_of_a_deepspeed_group_know_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    role = _two_nodes("deepspeed", devices=[0, 1]).role("actor")
    words = role.command
    info = json.loads(base64.urlsafe_b64decode(words[words.index("--world_info") + 1]))
    assert info == {"a": ["6", "7"], "b": ["0", "1"]}  # what a scheduler left this host says nothing of the other
    assert words[-5:] == ("--module", "--no_local_rank", "workers.main", "--role", "actor")
    assert role.env["LOCAL_WORLD_SIZE"] == "2"
    alone = plan(actor={"processes": 2, "launcher": "deepspeed"}).role("actor")
    assert alone.env["DS_ACCELERATOR"] == "cpu"
    assert alone.command[alone.command.index("--master_port") + 1] == "{port}"


def test_srun_starts_all_nodes_with_one_command() -> None:
    made = plan(actor={"processes": 8, "nodes": 2, "launcher": "srun", "devices": [0, 1, 2, 3]})
    role = made.role("actor")
    words = " ".join(role.command)
    assert words.startswith("srun --nodes 2 --ntasks 8 --ntasks-per-node 4 --relative 0 --distribution block")
    assert words.endswith(f"--kill-on-bad-exit=1 {sys.executable} -m workers.main --role actor")
    assert role.remote == ()
    assert role.env["RLCTL_DEVICES"] == "0,1,2,3"
    assert made.address == "{address}"
    assert plan().address == ""


def test_replicas_on_the_trainers_nodes() -> None:
    engine = {"kind": "vllm", "tensor_parallel": 2}
    rollout = {"processes": 2, "nodes": 2, "devices": [0, 1], "engine": engine, "python": "vllm/bin/python"}
    made = _two_nodes("torchrun", devices=[0, 1], rollout=rollout)
    role = made.role("rollout")
    python = "/specs/vllm/bin/python"
    assert role.command == (python, "-m", "workers.main", "--role", "rollout")
    (there,) = role.remote
    assert (there.host, there.command) == ("b", role.command)
    assert (role.here, role.ranks_of(1), role.host_of(1)) == ((0,), (1,), "b")
    assert there.env["CUDA_VISIBLE_DEVICES"] == role.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert there.env["GLOO_SOCKET_IFNAME"] == "lo", "a replica is on one host"
    assert made.colocated


def test_replicas_that_span_nodes() -> None:
    engine = {"kind": "vllm", "tensor_parallel": 4}
    rollout = {"processes": 2, "nodes": 4, "devices": [0, 1], "engine": engine, "allow_pickle_between_nodes": True}
    role = plan(rollout=rollout, cluster={"kind": "ray"}, names="abcd").role("rollout")
    assert [(node.host, role.ranks_of(node.node_rank)) for node in role.remote] == [
        ("b", (0,)),
        ("c", (1,)),
        ("d", (1,)),
    ]
    assert (role.here, role.host_of(0), role.host_of(1)) == ((0,), "", "c")
    assert [[node.host for node in role.remotes_of(rank)] for rank in (0, 1)] == [["b"], ["c", "d"]]
    assert {node.command for node in role.remote} == {role.command}
    assert {node.env["CUDA_VISIBLE_DEVICES"] for node in role.remote} == {"0,1"}
    assert "GLOO_SOCKET_IFNAME" not in role.env, "each host finds its own"


def test_replicas_on_nodes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")  # of this host, which has no replica
    rollout = {"processes": 4, "nodes": 2, "first_node": 1, "devices": [0, 1]}
    cluster = {"kind": "ray"}
    made = plan(actor={"devices": [0]}, rollout=rollout, cluster=cluster, names="abc")
    role = made.role("rollout")
    assert [(node.host, role.ranks_of(node.node_rank)) for node in role.remote] == [("b", (0, 1)), ("c", (2, 3))]
    assert [node.env["CUDA_VISIBLE_DEVICES"] for node in role.remote] == ["0,1", "0,1"]
    assert (role.here, made.address) == ((), "{address}")
    assert not made.colocated, "GPU 0 of another host"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert plan(actor={"devices": [0]}, rollout={**rollout, "first_node": 0}, cluster=cluster).colocated


def test_judges_keys_reach_the_reward_role_on_other_nodes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    judge = {"kind": "judge", "base_url": "http://h", "model": "m", "prompt": "{completion}", "min_score": 0}
    terms = [{**judge, "max_score": 1, "key_env": name} for name in ("JUDGE_KEY", "NOT_SET", "")]
    two_nodes = {"nodes": 2, "processes": 2}
    made = plan(reward={"terms": terms, **two_nodes}, rollout=two_nodes, cluster={"kind": "ray"}, names="ab")
    given = {role.role: [{*node.env} & {"JUDGE_KEY", "NOT_SET", ""} for node in role.remote] for role in made.roles}
    assert given == {"data": [], "reward": [{"JUDGE_KEY"}], "rollout": [set()], "actor": []}


def test_memory_that_another_process_maps_is_not_in_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    one_gpu = {"actor": {"devices": [0]}, "rollout": {"devices": [0]}}
    asked = "max_split_size_mb:64, expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", asked)
    shared = plan(**one_gpu, sync={"transport": "cuda_ipc"})
    assert shared.role("actor").env["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in shared.role("rollout").env
    assert "PYTORCH_CUDA_ALLOC_CONF" not in plan(**one_gpu).role("actor").env
    own = {"actor": {"devices": [0], "env": {"PYTORCH_CUDA_ALLOC_CONF": asked}}, "rollout": {"devices": [0]}}
    found = only_problem(raw_spec(**own, sync={"transport": "cuda_ipc"}))
    assert found.key == "actor.env.PYTORCH_CUDA_ALLOC_CONF"


def test_a_part_of_a_gpu_is_not_shared_by_cuda_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    one_gpu = {"actor": {"devices": [1]}, "rollout": {"devices": [1]}}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,MIG-3f1e")
    with pytest.raises(SpecError) as raised:
        plan(**one_gpu, sync={"transport": "cuda_ipc"})
    (found,) = raised.value.problems
    assert (found.key, found.value) == ("sync.transport", "cuda_ipc on MIG-3f1e")
    assert "MIG" in found.message
    assert "shm" in found.hint
    plan(**one_gpu)


def _two_nodes(launcher: str, devices: Any = (), **sections: Any) -> Plan:
    actor = {"processes": 4, "nodes": 2, "launcher": launcher, "devices": devices}
    return plan(actor=actor, cluster={"kind": "ray"}, names="ab", address="10.0.0.1", **sections)

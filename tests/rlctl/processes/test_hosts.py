"""Roles on several hosts, for real: a Ray cluster whose nodes are network namespaces, and what goes wrong there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import crashing
import psutil
import pytest
import warm
from optional import VLLM_PYTHON, needs_vllm
from running import REPO, environment, finish, metrics, preset, settings, steps_done, trajectory, wait_for, workers_of
from some_hosts import Hosts, left_in, ray_hosts
from talking_runs import counted
from talking_runs import write as write_talking

from rlctl.processes.ray_cluster import RayCluster
from specs.errors import SpecError

LATE_S = 400  # for runs to start and train: on a busy machine they take many times as long

pytestmark = [pytest.mark.slow(minutes=10), pytest.mark.timeout(900)]

SMALL = settings(
    *("run.steps=10", "data.prompts_per_step=4", "algorithm.group_size=4", "algorithm.mini_batches_per_step=1"),
    *("actor.optimizer.warmup_steps=0", "eval.every=1000000", "eval.prompts=2", "actor.micro_batch_tokens=256"),
)
FAR = settings("actor.processes=2", "actor.nodes=2", "actor.launcher=torchrun")
PPO = settings("algorithm.kind=ppo", "algorithm.kl_coef=0.1", 'critic={engine={kind="fsdp2"}, optimizer={lr=1e-3}}')
COLOCATED = settings(
    *("critic.processes=2", "critic.nodes=2", "critic.launcher=torchrun", "rollout.processes=2", "rollout.nodes=2"),
    *("run.colocate=always", "run.heartbeat_timeout_s=20"),
)
# In the pass of the third sync the second replica dies. When the group is formed anew the first one is slow, and its
# cable is cut.
IN_A_SYNC = [
    {"role": "rollout", "rank": 1, "method": "receive", "call": 3},
    {"role": "rollout", "rank": 0, "method": "begin", "call": 1, "after": 0, "how": "sleep"},
]
GROUP_READER = {"rollout": [["workers.transports.process_group", "GroupReader", ["begin", "receive"]]]}
# As `exact_match` with `partial`, and it says so, by which one sees where it was called.
OWN_REWARD = """
def score(completion, answer):
    print("graded", flush=True)
    given, gold = completion.strip(), str(answer).strip()
    return sum(a == b for a, b in zip(given, gold)) / max(len(given), len(gold), 1)
"""
APART = settings(
    *("rollout.processes=2", "rollout.nodes=2", "rollout.first_node=1", "rollout.min_processes=1"),
    *("run.heartbeat_timeout_s=10", 'sync.transport="group"'),
    *("reward.processes=3", "reward.nodes=3", "reward.min_processes=1"),
    'reward.terms=[{kind="function", path="own_reward.py:score"}]',
)


@pytest.fixture(scope="module")
def hosts():
    with ray_hosts() as made:
        yield made


@pytest.fixture
def spec(hosts: Hosts, tmp_path: Path) -> Path:
    return on_hosts(hosts, preset("quickstart", tmp_path))


def on_hosts(hosts: Hosts, spec: Path) -> Path:
    """Give a spec the hosts."""
    with spec.open("a") as file:
        file.write(f'\n[cluster]\nkind = "ray"\naddress = "{hosts.ray_address}"\n')
    return spec


def train(hosts: Hosts, spec: Path, run: Path, *options: str, path: Path = REPO) -> subprocess.Popen[str]:
    """`rlctl train` on the first host."""
    command = hosts.command(sys.executable, "-m", "rlctl", "train", str(spec), "--run-dir", str(run), *options)
    env = environment(PYTHONPATH=f"{path}:{REPO}", OMP_NUM_THREADS="1")
    return subprocess.Popen(
        command, cwd=REPO, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def replicas_of(run: Path) -> dict[str, str]:
    """Name → process of the replicas that have begun."""
    return {
        name: str(one.pid)
        for one in workers_of(run).get("rollout", [])
        if (name := one.name()).startswith("rlctl-rollout")
    }


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one host."""
    folder = tmp_path_factory.mktemp("near")
    finish("train", preset("quickstart", folder), "--run-dir", folder / "run", *SMALL)
    return folder / "run"


@contextmanager
def cable_to_be_cut(hosts: Hosts, process: subprocess.Popen[str]) -> Iterator[Callable[[str, float], str]]:
    """Gives what cuts that of a host and returns what the run says until it ends, within so many seconds."""
    cuts = []

    def cut(host: str, within_s: float) -> str:
        cuts.append(host)
        hosts.plug(host, "down")
        return process.communicate(timeout=within_s)[0]

    try:
        yield cut
    finally:
        process.kill()
        for host in cuts:
            hosts.plug(host, "up")
            hosts.leave(host)  # Ray has given it up by then
            hosts.join(host)


def test_trainers_and_replicas_on_two_hosts_train_as_on_one_until_a_cable_is_cut(
    hosts: Hosts, spec: Path, tmp_path: Path
) -> None:
    """PPO, in turns. The trainers need one another: the run ends, and names the host; it continues without it. (Its
    ranks are forks; those of the other tests are really started.)"""
    near, run, folder = tmp_path / "near", tmp_path / "far", tmp_path / "one"
    folder.mkdir()
    finish("train", preset("quickstart", folder), "--run-dir", near, *SMALL, *PPO, "--set", "run.steps=3")
    endless = settings("run.steps=100000", "checkpoint.every=1", "actor.min_nodes=1")
    path = tmp_path / "path"
    forks = warm.on_hosts(path, ("actor", "critic", "ref", "rollout", "reward"))
    process = train(hosts, spec, run, *SMALL, *PPO, *FAR, *COLOCATED, *endless, *forks, path=path)
    with cable_to_be_cut(hosts, process) as cut:
        wait_for(lambda: steps_done(run) >= 3 or process.poll() is not None, LATE_S, "the third step")
        assert process.poll() is None, process.communicate()[0]
        (there,) = [host for host in hosts.names[1:] if left_in(host)]
        output = cut(there, 100)
        assert process.returncode == 1, output
        built = json.loads((run / "as_built.json").read_text())
        (other,) = {*hosts.names[1:]} - {there}
        hosts.leave(other)
        try:
            done, resumed = steps_done(run), "lacks nodes"
            while "lacks nodes" in resumed:  # Ray has not noticed that they are gone
                process = train(hosts, run, run, "--resume", "--set", f"run.steps={done + 2}", path=path)
                resumed = process.communicate(timeout=LATE_S)[0]
                assert "(raylet)" not in resumed, "what Ray says of nodes that are gone"
        finally:
            hosts.join(other)
    assert [[rank["rank"] for rank in built[role]] for role in ("actor", "rollout")] == [[0, 1], [0, 1]]
    assert process.returncode == 0, resumed
    assert "the cluster has fewer nodes than actor.nodes: " in resumed
    assert "resumed with another actor.nodes: 2 → 1" in resumed
    assert steps_done(run) == done + 2
    assert re.search(r"(actor|critic|ref|rollout) rank 1 on node 1 \(", output), output
    assert "no sign of life " in output, "of the rank, or of its host"
    wait_for(lambda: hosts.idle, 150, "the end of all hosts' processes")
    for one, two in [*zip(metrics(near), metrics(run), strict=False)][:3]:  # rounding grows with the steps
        if one["step"] > 0:
            assert two["reward/mean"] == pytest.approx(one["reward/mean"], abs=1e-6)
            for role in ("actor", "critic"):
                assert two[f"{role}/loss"] == pytest.approx(one[f"{role}/loss"], abs=1e-5)
                assert two[f"{role}/grad_norm"] == pytest.approx(one[f"{role}/grad_norm"], rel=1e-3)


def test_replicas_on_hosts_of_their_own_sample_what_one_beside_the_trainer_does_and_come_back_or_not(
    hosts: Hosts, spec: Path, near: Path, tmp_path: Path
) -> None:
    """Weights go by a process group, of which each loss takes a member in the middle of a sync. That of the last
    one has a gap in its ranks. All three grade, until one of them is gone."""
    (tmp_path / "own_reward.py").write_text(OWN_REWARD)
    run, plot = tmp_path / "run", tmp_path / "plot"
    process = train(hosts, spec, run, *SMALL, *APART, *crashing.install(plot, IN_A_SYNC, GROUP_READER))
    with cable_to_be_cut(hosts, process) as cut:
        wait_for(lambda: len(replicas_of(run)) == 2 or process.poll() is not None, LATE_S, "both replicas")
        replicas = replicas_of(run)
        (there,) = [host for host in hosts.names if replicas["rlctl-rollout0"] in left_in(host)]
        wait_for(lambda: crashing.happened(plot) == [1, 1] or process.poll() is not None, LATE_S, "the group's forming")
        output = cut(there, 150)
    assert process.returncode == 0, output
    assert "weight transport: group" in output
    flat = " ".join(output.split())
    assert "rollout rank 1 on node 2" in flat
    assert re.search(r"rollout rank \d on node \d \(\S+ no sign of life from host .* joins at the sync after", flat), (
        flat
    )
    assert re.search(r"reward rank \d on node \d \(\S+ no sign of life from host .* joins at the step after", flat), (
        flat
    )
    last = metrics(run)[-1]
    assert last["rollout/restarts"] >= 1
    for rank in ("", "_rank1", "_rank2"):
        assert "graded" in (run / "logs" / f"reward_output{rank}.log").read_text()
    # All but the last, the gap: the last bits of a sampler's own log-probs depend on what else was in its batch.
    assert [line[:-1] for line in trajectory(run)] == [line[:-1] for line in trajectory(near)]
    wait_for(lambda: hosts.idle, 150, "the end of all hosts' processes")


def test_a_replica_whose_node_is_lost_comes_back_on_another_until_the_driver_dies(hosts: Hosts, tmp_path: Path) -> None:
    """A node that joins. No other has room, for each has a part of the run. With the driver everything ends. Samplers
    and environments of the episodes are on all three, which changes no number while they are there."""
    run, near = tmp_path / "run", tmp_path / "near"
    spec = write_talking(tmp_path)
    finish("train", spec, "--run-dir", near)
    far = [f"{role}.{key}" for role in ("rollout", "reward") for key in ("processes=3", "nodes=3", "min_processes=1")]
    far += ["reward.max_restarts=0", "run.steps=100000", "run.heartbeat_timeout_s=10"]
    process = train(hosts, on_hosts(hosts, spec), run, *settings(*far))
    try:
        wait_for(lambda: steps_done(run) >= 4 or process.poll() is not None, LATE_S, "four steps")
        assert process.poll() is None, process.communicate()[0]
        for one, two in zip(counted(near), counted(run), strict=False):
            assert two == {**one, **{key: value for key, value in two.items() if key not in one}}
        wait_for(lambda: len(replicas_of(run)) == 3 or process.poll() is not None, LATE_S, "three replicas")
        assert len({host for host in hosts.names if left_in(host)}) == 3
        hosts.leave(hosts.third)
        wait_for(lambda: not left_in(hosts.third), 30, "the end of its processes")
        wait_for(lambda: last_replicas(run) == 2 or process.poll() is not None, 60, "a run without it")
        hosts.join(hosts.third)
        wait_for(lambda: last_replicas(run) == 3 or process.poll() is not None, LATE_S, "another replica")
        assert process.poll() is None, process.communicate()[0]
        replica = replicas_of(run)["rlctl-rollout1"]
        (there,) = [host for host in hosts.names[1:] if replica in left_in(host)]
        secret = psutil.Process(int(replica)).environ()["RLCTL_CURVE_KEY"]
        lines = [" ".join(other.cmdline()) for other in map(psutil.Process, map(int, left_in(there)))]
        assert not any(secret in line for line in lines)  # keys travel through pipes only
    finally:
        process.kill()
        process.communicate(timeout=200)
    wait_for(lambda: hosts.idle, 150, "the end of all hosts' processes")


@needs_vllm
def test_a_replica_spans_two_nodes_and_comes_back_when_a_worker_of_the_other_is_killed(
    hosts: Hosts, tmp_path: Path
) -> None:
    """In turns with the actor, so that both nodes' workers give their memory back."""
    run = tmp_path / "run"
    span = ("nodes=2", "engine.tensor_parallel=2", "allow_pickle_between_nodes=true", "threads=1")
    more = ("run.steps=3", "run.colocate=always", "eval.every=100", "eval.prompts=2", "data.prompts_per_step=16")
    options = settings(f"rollout.python={VLLM_PYTHON}", *(f"rollout.{key}" for key in span), *more)
    process = train(hosts, on_hosts(hosts, preset("vllm-cpu", tmp_path)), run, *options)
    try:
        wait_for(lambda: steps_done(run) >= 1 or process.poll() is not None, LATE_S, "the first step")
        names = {one: psutil.Process(int(one)).name() for host in hosts.names[1:] for one in left_in(host)}
        (worker,) = [int(one) for one, name in names.items() if name.startswith("VLLM::Worker")]
        psutil.Process(worker).kill()
        output = process.communicate(timeout=LATE_S)[0]
    finally:
        process.kill()
    assert process.returncode == 0, output
    failed = r"rollout rank 0 on \S+ failed: its part on node 1 \(\S+\): its process ended with exit code"
    assert re.search(failed, output), output
    lines = [line for line in metrics(run) if line["step"] > 0]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["rollout/restarts"] == 1
    for line in lines:
        assert line["sync/verified"] is True
        assert 0 < line["rollout/logprob_gap_max"] < 1e-4
        assert line["actor/grad_norm"] > 0
    assert json.loads((run / "as_built.json").read_text())["rollout"][0]["model"]["mesh"] == {"tensor": 2}
    wait_for(lambda: hosts.idle, 60, "the end of all hosts' processes")


def last_replicas(run: Path) -> int:
    rows = metrics(run) if (run / "metrics.jsonl").exists() else []
    return int(rows[-1].get("rollout/replicas", 0)) if rows else 0


def test_what_a_cluster_lacks_is_said_at_once(hosts: Hosts, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no Ray cluster is there"):
        RayCluster("127.0.0.1:1", []).reserve(print)
    spec = on_hosts(hosts, preset("fake", tmp_path))
    far = settings("rollout.processes=4", "rollout.nodes=4")
    process = train(hosts, spec, tmp_path / "runs" / "run", *far)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 2, output
    assert "the run needs 3 besides this one with a CPU each (2 of them: 0 GPUs" in " ".join(output.split())
    assert not (tmp_path / "runs").exists()


def test_a_run_waits_for_room_and_a_host_is_checked_before_its_ranks_start(hosts: Hosts, tmp_path: Path) -> None:
    """All CPUs of the other nodes are taken at first. Then the interpreter of a role is missing there."""
    (tmp_path / "hold.py").write_text(
        "import ray, sys\n"
        "from ray.util.placement_group import placement_group\n"
        f"ray.init(address='{hosts.ray_address}', log_to_driver=False)\n"
        "group = placement_group([{'CPU': 4}] * 2, strategy='STRICT_SPREAD')\n"
        "assert group.wait(30)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    holds = subprocess.Popen(
        hosts.command(sys.executable, str(tmp_path / "hold.py")),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert holds.stdin is not None and holds.stdout is not None  # noqa: PT018
    assert any(line == "held\n" for line in holds.stdout)
    spec = on_hosts(hosts, preset("fake", tmp_path))
    here = tmp_path / "bin"
    here.mkdir()
    (here / "python").write_text(
        f'#!/bin/sh\n[ -n "$RAY_JOB_ID$RAY_RAYLET_PID" ] && exit 127\nexec {sys.executable} "$@"\n'
    )
    (here / "python").chmod(0o755)
    far = ("rollout.processes=2", "rollout.nodes=2", f'rollout.python="{here}/python"')
    process = train(hosts, spec, tmp_path / "run", *settings(*far))
    assert process.stdout is not None
    queued = next(line for line in process.stdout if "queued" in line)
    assert "Ray has no room yet for 1 more hosts (a CPU)" in queued
    assert psutil.Process(process.pid).cpu_percent(interval=2) < 50  # it waits, maybe for hours
    holds.stdin.close()
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 2, output
    assert "node 1 (" in output
    assert "cannot be used: exit code 127" in " ".join(output.split())
    holds.wait(30)

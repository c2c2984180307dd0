"""Roles on several hosts, for real: two network namespaces joined by a cable, and what goes wrong there."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import crashing
import psutil
import pytest
from running import REPO, environment, finish, metrics, preset, steps_done, trajectory, wait_for, workers_of
from some_hosts import REMOTE_SHELL, Hosts, left_in, some_hosts

from rlctl.presets import write_manifest

pytestmark = pytest.mark.slow

SMALL = (
    *("--set", "run.steps=10", "--set", "data.prompts_per_step=4", "--set", "algorithm.group_size=4"),
    *("--set", "algorithm.mini_batches_per_step=1", "--set", "actor.optimizer.warmup_steps=0"),
    *("--set", "eval.every=1000000", "--set", "eval.prompts=2", "--set", "actor.micro_batch_tokens=256"),
)
FAR = ("--set", "actor.processes=2", "--set", "actor.nodes=2", "--set", "actor.launcher=torchrun")
COLOCATED = (
    *("--set", "rollout.processes=2", "--set", "rollout.nodes=2", "--set", "run.colocate=always"),
    *("--set", "run.heartbeat_timeout_s=10"),
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
APART = (
    *("--set", "rollout.processes=2", "--set", "rollout.nodes=2", "--set", "rollout.first_node=1"),
    *("--set", "rollout.min_processes=1", "--set", "run.heartbeat_timeout_s=10"),
    *("--set", 'sync.transport="group"'),
    *("--set", "reward.processes=3", "--set", "reward.nodes=3", "--set", "reward.min_processes=1"),
    *("--set", 'reward.terms=[{kind="function", path="own_reward.py:score"}]'),
)


@pytest.fixture(scope="module")
def hosts():
    with some_hosts() as made:
        yield made


@pytest.fixture
def spec(hosts: Hosts, tmp_path: Path) -> Path:
    return on_hosts(hosts, preset("quickstart", tmp_path))


def on_hosts(hosts: Hosts, spec: Path) -> Path:
    """Give a spec the hosts."""
    (spec.parent / "hosts").write_text("".join(f"{name} slots=2\n" for name in hosts.names))
    with spec.open("a") as file:
        file.write(f'\n[cluster]\nhostfile = "hosts"\naddress = "{hosts.address}"\nremote_shell = {REMOTE_SHELL}\n')
    return spec


def train(hosts: Hosts, spec: Path, run: Path, *options: str) -> subprocess.Popen[str]:
    """`rlctl train` on the first host."""
    command = hosts.command(sys.executable, "-m", "rlctl", "train", str(spec), "--run-dir", str(run), *options)
    env = environment(PYTHONPATH=str(REPO), OMP_NUM_THREADS="1")
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
def cable_to_be_cut(hosts: Hosts, process: subprocess.Popen[str]) -> Iterator[Callable[[float], str]]:
    """Gives what cuts it and returns what the run says until it ends, within so many seconds."""

    def cut(within_s: float) -> str:
        hosts.plug(hosts.there, "down")
        return process.communicate(timeout=within_s)[0]

    try:
        yield cut
    finally:
        hosts.plug(hosts.there, "up")
        process.kill()


def test_trainers_and_replicas_on_two_hosts_train_as_on_one_until_a_cable_is_cut(
    hosts: Hosts, spec: Path, near: Path, tmp_path: Path
) -> None:
    """In turns. The trainers need one another: the run ends, and names the host."""
    run = tmp_path / "far"
    process = train(hosts, spec, run, *SMALL, *FAR, *COLOCATED, "--set", "run.steps=100000")
    with cable_to_be_cut(hosts, process) as cut:
        wait_for(lambda: steps_done(run) >= 3 or process.poll() is not None, 150, "the third step")
        output = cut(100)
    assert process.returncode == 1, output
    assert f"actor rank 1 on {hosts.there}" in output
    assert "no sign of life " in output, "of the rank, or of its host"
    wait_for(lambda: hosts.idle, 150, "the end of all hosts' processes")
    for one, two in [*zip(metrics(near), metrics(run), strict=False)][:3]:  # rounding grows with the steps
        if one["step"] > 0:
            assert two["reward/mean"] == pytest.approx(one["reward/mean"], abs=1e-6)
            assert two["actor/loss"] == pytest.approx(one["actor/loss"], abs=1e-5)
            assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-3)
    built = json.loads((run / "as_built.json").read_text())
    assert [[rank["rank"] for rank in built[role]] for role in ("actor", "rollout")] == [[0, 1], [0, 1]]


def test_replicas_on_hosts_of_their_own_sample_what_one_beside_the_trainer_does_and_come_back_or_not(
    hosts: Hosts, spec: Path, near: Path, tmp_path: Path
) -> None:
    """Weights go by a process group, of which each loss takes a member in the middle of a sync. That of the last
    one has a gap in its ranks. All three grade, until one of them is gone."""
    (tmp_path / "own_reward.py").write_text(OWN_REWARD)
    run, plot = tmp_path / "run", tmp_path / "plot"
    process = train(hosts, spec, run, *SMALL, *APART, *crashing.install(plot, IN_A_SYNC, GROUP_READER))
    with cable_to_be_cut(hosts, process) as cut:
        wait_for(lambda: len(replicas_of(run)) == 2 or process.poll() is not None, 150, "both replicas")
        replicas = replicas_of(run)
        there = [replicas[f"rlctl-rollout{rank}"] in left_in(host) for rank, host in enumerate(hosts.names[1:])]
        assert there == [True, True]
        wait_for(lambda: crashing.happened(plot) == [1, 1] or process.poll() is not None, 200, "the group's forming")
        output = cut(150)
    assert process.returncode == 0, output
    assert "weight transport: group" in output
    assert f"rollout rank 1 on {hosts.third} failed" in output
    assert f"rollout rank 0 on {hosts.there} failed for good: no sign of life from host " in output.replace("\n", " ")
    assert f"reward rank 1 on {hosts.there} failed for good: no sign of life from host " in output.replace("\n", " ")
    last = metrics(run)[-1]
    assert [last[f"rollout/{name}"] for name in ("restarts", "dropped", "replicas")] == [1, 1, 1]
    assert [last[f"reward/{name}"] for name in ("restarts", "dropped", "processes")] == [0, 1, 2]
    for rank in ("", "_rank1", "_rank2"):
        assert "graded" in (run / "logs" / f"reward_output{rank}.log").read_text()
    # All but the last, the gap: the last bits of a sampler's own log-probs depend on what else was in its batch.
    assert [line[:-1] for line in trajectory(run)] == [line[:-1] for line in trajectory(near)]
    wait_for(lambda: hosts.idle, 150, "the end of all hosts' processes")


def test_the_death_of_the_driver_ends_the_run_on_both_hosts(hosts: Hosts, tmp_path: Path) -> None:
    run = tmp_path / "run"
    spec = on_hosts(hosts, preset("fake", tmp_path))
    far = ("--set", "rollout.processes=2", "--set", "rollout.nodes=2")
    process = train(hosts, spec, run, *far, "--set", "run.steps=100000")
    try:
        wait_for(lambda: steps_done(run) > 0 or process.poll() is not None, 150, "the first step")
        assert process.poll() is None, process.communicate()[0]
        replica = replicas_of(run)["rlctl-rollout1"]
        assert replica in left_in(hosts.there)
        secret = psutil.Process(int(replica)).environ()["RLCTL_CURVE_KEY"]
        lines = [" ".join(other.cmdline()) for other in map(psutil.Process, map(int, left_in(hosts.there)))]
        assert not any(secret in line for line in lines)  # keys travel through pipes only
        process.kill()
        process.communicate(timeout=200)
        wait_for(lambda: hosts.idle, 150, "the end of both hosts' processes")
    finally:
        process.kill()


def test_a_host_that_cannot_take_part_is_found_before_the_start(hosts: Hosts, spec: Path, tmp_path: Path) -> None:
    hosts.plug(hosts.there, "down")
    try:
        process = train(hosts, spec, tmp_path / "runs" / "run", *SMALL, *FAR)
        output = process.communicate(timeout=200)[0]
    finally:
        hosts.plug(hosts.there, "up")
    assert process.returncode == 2, output
    assert "cannot reach it" in output
    assert "hint:" in output
    assert not (tmp_path / "runs").exists()
    assert not [*tmp_path.glob(".rlctl-*")]
    wait_for(lambda: hosts.idle, 150, "the end of all hosts' processes")


def test_a_driver_pod_enters_the_others(hosts: Hosts, tmp_path: Path) -> None:
    """The script of a Kubernetes manifest, with hosts for pods and a kubectl that knows `exec` alone. One pod is there,
    where completions are written and graded; the other is not."""
    spec, claim, bin_folder = preset("fake", tmp_path), tmp_path / "claim", tmp_path / "bin"
    text = spec.read_text().replace("steps = 6\n", "steps = 2\n")
    text = text.replace("[rollout]\n", "[rollout]\nfirst_node = 1\nnodes = 2\nprocesses = 2\nmin_processes = 1\n")
    text = text.replace("[reward]\n", "[reward]\nnodes = 2\nprocesses = 2\n")
    spec.write_text(f'{text}\n[cluster]\nhostfile = "hosts"\n')
    manifest = write_manifest(spec, force=False).read_text()
    jobset = [*importlib.import_module("yaml").safe_load_all(manifest)][-1]  # comes with transformers
    pod = jobset["spec"]["replicatedJobs"][-1]["template"]["spec"]["template"]["spec"]
    script = pod["containers"][0]["command"][2]
    for folder in (claim, bin_folder):
        folder.mkdir()
    pods = {"job/rlctl-fake-samplers-0": hosts.there}
    cases = "".join(f"'exec -i {pod} -- sh') exec ip netns exec {host} sh;;\n" for pod, host in pods.items())
    programs = {"kubectl": f'case "$*" in\n{cases}esac\nexit 64', "rlctl": f'exec {sys.executable} -m rlctl "$@"'}
    for name, program in programs.items():
        (bin_folder / name).write_text(f"#!/bin/sh\n{program}\n")
        (bin_folder / name).chmod(0o755)
    script = script.replace("/shared", str(claim)).replace("/etc/rlctl/spec.toml", str(spec))
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    env = environment(PYTHONPATH=str(REPO), OMP_NUM_THREADS="1", POD_IP=hosts.address, PATH=path)
    done = subprocess.run(
        hosts.command("bash", "-c", script),
        cwd=claim,
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps_done(claim / "runs" / "fake") == 2
    built = json.loads((claim / "runs" / "fake" / "as_built.json").read_text())
    assert [len(built[role]) for role in ("rollout", "reward")] == [1, 2]
    assert "rollout rank 1 on rlctl-fake-samplers-1 is not there: exit code 64" in done.stdout
    last = metrics(claim / "runs" / "fake")[-1]
    assert [last[name] for name in ("rollout/replicas", "rollout/late", "reward/processes")] == [1, 1, 2]
    wait_for(lambda: hosts.idle, 150, "the end of all hosts' processes")

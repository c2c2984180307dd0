"""A real SLURM whose nodes are network namespaces: the scripts that `rlctl init --launcher slurm` writes, submitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import finish, metrics, preset, settings, steps_done, trajectory, wait_for
from slurm_hosts import SlurmCluster, slurm_hosts

pytestmark = pytest.mark.slow

SMALL = settings(
    *("run.steps=100000", "data.prompts_per_step=4", "algorithm.group_size=4", "algorithm.mini_batches_per_step=1"),
    *('actor.optimizer.schedule="constant"', "actor.optimizer.warmup_steps=0"),
    *("eval.every=1000000", "eval.prompts=2", "checkpoint.every=1"),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    with slurm_hosts(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one host."""
    folder = tmp_path_factory.mktemp("near")
    finish("train", preset("quickstart", folder), "--run-dir", folder / "run", *SMALL, "--set", "run.steps=4")
    return folder / "run"


def batch(folder: Path, **tables: dict[str, object]) -> Path:
    """Return the script of a quickstart with these keys."""
    spec = preset("quickstart", folder)
    text = spec.read_text()
    for name, keys in tables.items():
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        text = text if f"[{name}]\n" in text else f"{text}\n[{name}]\n"
        text = text.replace(f"[{name}]\n", f"[{name}]\n{lines}")
    spec.write_text(text)
    finish("init", spec, "--launcher", "slurm", cwd=folder)
    return spec.with_suffix(".sbatch")


def log_of(script: Path, job: str) -> str:
    file = script.with_name(f"{script.stem}-{job}.out")
    return file.read_text() if file.exists() else ""


def test_a_job_that_loses_a_node_goes_back_into_the_queue_and_goes_on_with_the_other(
    cluster: SlurmCluster, near: Path, tmp_path: Path
) -> None:
    """Trainers by srun, replicas by shells. At last a rank is killed, which srun names."""
    two = {"nodes": 2, "processes": 2}
    script = batch(tmp_path, actor={**two, "launcher": "srun", "min_nodes": 1}, rollout=two, cluster={"kind": "slurm"})
    run, here = tmp_path / "runs" / "quickstart", cluster.hosts.here
    job = cluster.submit(script, *SMALL)
    wait_for(lambda: steps_done(run) >= 2 or cluster.ended(job), 100, "two steps")
    assert len(cluster.nodes(job) - {here}) == 1, log_of(script, job)
    built = json.loads((run / "as_built.json").read_text())
    assert [rank["rank"] for rank in built["actor"]] == [0, 1]

    def goes_on(done: int) -> bool:
        cluster.start_now(job)
        return steps_done(run) >= done + 2 or cluster.ended(job)

    for host in cluster.hosts.names[1:]:
        cluster.leave(host)
    try:
        wait_for(lambda: cluster.state(job) == "PENDING", 60, "SLURM to see it")
        done = steps_done(run)
        wait_for(lambda: goes_on(done), 100, "two steps on one node")
        cluster.kill(here, "rlctl-actor0")
        wait_for(lambda: cluster.ended(job), 60, "the end of the job")
    finally:
        for host in cluster.hosts.names[1:]:
            cluster.join(host)
    log = log_of(script, job)
    assert "resumed with another actor.nodes: 2 → 1" in log, log
    assert "error: actor rank 0" in log
    assert f"srun: error: {here}: task 0: Killed" in log
    wait_for(lambda: cluster.hosts.idle, 20, "the end of all hosts' processes")
    one, other = (next(row for row in metrics(folder) if row["step"] == 1) for folder in (near, run))
    assert other["reward/mean"] == pytest.approx(one["reward/mean"], abs=1e-6)
    assert other["actor/loss"] == pytest.approx(one["actor/loss"], abs=1e-5)


def test_replicas_have_the_second_part_of_a_job_to_themselves(
    cluster: SlurmCluster, near: Path, tmp_path: Path
) -> None:
    """They sample what one on the trainer's host does, until the job's time is nearly up."""
    wait_for(cluster.ready, 60, "SLURM's nodes")
    script = batch(tmp_path, rollout={"first_node": 1, "nodes": 2, "processes": 2}, cluster={"kind": "slurm"})
    run = tmp_path / "runs" / "quickstart"
    job = cluster.submit(script, *SMALL)
    wait_for(lambda: steps_done(run) >= 4 or cluster.ended(job), 100, "four steps")
    cluster.ask("scancel", "--batch", "--signal=TERM", job)
    wait_for(lambda: cluster.ended(job), 60, "the end of the job")
    assert "interrupted (SIGTERM)" in log_of(script, job), log_of(script, job)
    assert "continue with the same command and --resume" in log_of(script, job)
    built = json.loads((run / "as_built.json").read_text())
    assert {rank["host"] for rank in built["rollout"]} == {*cluster.hosts.names[1:]}
    sampled, known = trajectory(run), trajectory(near)
    assert [line[:-1] for line in sampled[: len(known)]] == [line[:-1] for line in known]
    wait_for(lambda: cluster.hosts.idle, 20, "the end of all hosts' processes")

"""Real runs for end-to-end tests: `python -m rlctl …` in a process of its own, watched and never left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import warm
from declared_metrics import undeclared
from listeners import none_beyond_loopback

REPO = Path(__file__).resolve().parents[2]


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "COLUMNS": "120", **extra}


def rlctl(*args: str | Path, cwd: Path = REPO, timeout_s: float = 400, **env: str) -> subprocess.CompletedProcess[str]:
    """Run to the end; nothing of it may listen where another host could reach it."""
    command = [sys.executable, "-m", "rlctl", *map(str, args)]
    env = environment(PYTHONPATH=env.pop("PYTHONPATH", str(REPO)), **env)
    with none_beyond_loopback():
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)


def warm_rlctl(
    *args: str | Path, cwd: Path = REPO, timeout_s: float = 400, **env: str
) -> subprocess.CompletedProcess[str]:
    """The same in a fork of a process that has imported torch (see `warm.py`)."""
    command = [sys.executable, "-m", "rlctl", *map(str, args)]
    env = environment(PYTHONPATH=env.pop("PYTHONPATH", str(REPO)), **env)
    with none_beyond_loopback():
        return warm.run(command, cwd=cwd, env=env, timeout_s=timeout_s)


def finish(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run warm to the end; it must succeed."""
    done = warm_rlctl(*args, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def train(spec: Path, run: Path, *options: str | Path) -> str:
    """Train to the end; return what was printed."""
    return finish("train", spec, "--run-dir", run, *options).stdout


def settings(*pairs: str) -> tuple[str, ...]:
    """Return `--set` for each."""
    return tuple(word for pair in pairs for word in ("--set", pair))


def warm_python(script: Path, *args: str | Path, timeout_s: float = 400) -> str:
    """A script of ours that imports torch, run to the end; it must succeed. Returns what it printed."""
    done = warm.run([sys.executable, script, *args], env=environment(PYTHONPATH=str(REPO)), timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def warm_torchrun(processes: int, worker: str, *args: str | Path, timeout_s: float = 400) -> None:
    """torchrun with as many ranks of `tests/support/<worker>`; they must succeed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = warm.run([*launcher, Path(__file__).with_name(worker), *args], env=env, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr[-6000:]


def start(*args: str | Path, cwd: Path = REPO, **env: str) -> subprocess.Popen[str]:
    """Start and return at once."""
    command = [sys.executable, "-m", "rlctl", *map(str, args)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment(PYTHONPATH=str(REPO), **env), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def preset(name: str, folder: Path) -> Path:
    path = folder / f"{name}.toml"
    path.write_text((REPO / "specs" / "presets" / f"{name}.toml").read_text())
    return path


def listing(folder: Path) -> dict[str, float]:
    """Return when each file was written: the same, where nothing has been."""
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def metrics(run_dir: Path) -> list[dict]:
    """Lines of a run that may still be writing one. What it writes must be declared."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    missing = undeclared(dict.fromkeys(key for line in found for key in line))
    assert not missing, f"docs/spec.md would not have {missing}: declare them in METRICS where they are made"
    return found


def trained(run_dir: Path) -> list[dict]:
    """Lines of the steps: not that of the evaluation before them."""
    return [line for line in metrics(run_dir) if line["step"] > 0]


def trajectory(run_dir: Path) -> list[tuple]:
    """What must repeat bit for bit."""
    keys = ("step", "reward/mean", "actor/loss", "actor/grad_norm", "rollout/logprob_gap")
    return [tuple(line[key] for key in keys) for line in trained(run_dir)]


def wait_for(condition: Callable[[], bool], timeout_s: float = 120, what: str = "condition") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s"
        time.sleep(0.05)


def steps_done(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return max((line["step"] for line in metrics(run_dir)), default=0) if file.is_file() else 0


def workers_of(run_dir: Path) -> dict[str, list[psutil.Process]]:
    """Living role processes that log into this run directory, by role."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        try:
            if str(run_dir) not in (place := os.readlink(f"/proc/{process.pid}/fd/1")):
                continue
            command, name = process.cmdline(), process.name()
        except (psutil.Error, OSError):
            continue
        forked = name.startswith("rlctl-") and name != "rlctl-node"
        if forked or "workers.main" in command:
            found.setdefault(Path(place).parent.name, []).append(process)
    return found

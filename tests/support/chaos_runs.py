"""The faults of `scripts/chaos`. A run is held at the beginning of a verb, one of its processes is hit, and the run
is watched to its end, resumed, and judged."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from probe_groups import wait_until
from running import REPO, environment, trajectory, warm_rlctl

from workers.watchdog import kill_marked, pids_marked

BOUND_S = 150.0  # from the fault to the end of the run, restarts included; on a busy machine
GONE_S = 60.0  # until the last process is gone
ONE_AT_A_TIME = threading.Lock()  # there is one warm process to fork from
SPEC = """
schema = 1
run = { name = "chaos", steps = 5, heartbeat_timeout_s = 6, stall_timeout_s = 8, start_timeout_s = 45 }
model = { path = "builtin:tiny-digits", from_scratch = true }
data = { train = "builtin:sort-digits", prompts_per_step = 8, max_prompt_tokens = 8, max_response_tokens = 6 }
reward = { terms = [{ kind = "exact_match", partial = true }], timeout_s = 3, workers = 1 }
algorithm = { kind = "grpo", group_size = 4, mini_batches_per_step = 1 }
checkpoint = { every = 2 }
"""
SAMPLER, TRAINERS = "rollout = { processes = 2, threads = 1 }\n", "processes = 2, threads = 1"
ENGINES = {
    "fake": """rollout = { processes = 2, threads = 1, engine = { kind = "fake" } }
actor = { optimizer = { lr = 0.05 }, engine = { kind = "fake" } }""",
    "ddp": SAMPLER + f'actor = {{ {TRAINERS}, engine = {{ kind = "ddp" }} }}',
    "fsdp2": SAMPLER + f'actor = {{ {TRAINERS}, launcher = "torchrun", engine = {{ kind = "fsdp2" }} }}',
    "zero": SAMPLER + f'actor = {{ {TRAINERS}, launcher = "torchrun", engine = {{ kind = "zero3" }} }}',
}
# The call of a verb in which the run is held. In the last three a checkpoint of the second step is there.
PHASES = {
    "build": ("actor", "build", 1),
    "save": ("actor", "save", 1),
    "rollout": ("rollout", "generate", 3),
    "train": ("actor", "update", 3),
    "sync": ("rollout", "import_begin", 4),
}
HOLD = """
import json, os, sys, time
from functools import wraps
from importlib import import_module
from pathlib import Path

HERE, CALLS = Path(__file__).parent, []
HELD, METHOD, CALL, KIND = json.loads((HERE / "hold.json").read_text())
ROLE = next((word for before, word in zip(sys.orig_argv, sys.orig_argv[1:]) if before == "--role"), "")
if (ROLE, os.environ.get("RLCTL_RANK", os.environ.get("RANK"))) == (HELD, "0"):
    owner = getattr(import_module(f"workers.roles.{ROLE}"), ROLE.title())
    inner = getattr(owner, METHOD)

    @wraps(inner)
    def method(self, call, emit):
        CALLS.append(1)
        if len(CALLS) == CALL and not (HERE / "held").exists():
            (HERE / "held").touch()
            while KIND == "spin":
                pass
            while not (HERE / "go").exists():
                time.sleep(0.005)
        return inner(self, call, emit)

    setattr(owner, METHOD, method)
"""


@dataclass(frozen=True)
class Fault:
    """`kind`: a signal, or "sleep" or "spin" of the rank that is held. `victim`: "driver", "launcher", "grader", or a
    role and its rank."""

    engine: str
    phase: str
    kind: str
    victim: str

    @property
    def goes_on(self) -> bool | None:
        """Whether the run must reach its end by itself. None: it may."""
        if self.victim in ("grader", "launcher"):
            return None
        return self.kind == "SIGSTOP" if self.victim == "driver" else self.is_restart

    @property
    def is_restart(self) -> bool:
        return self.victim.startswith(("rollout", "reward")) and self.phase != "build"


@dataclass
class Line:
    """How a fault ended. `bad`: what is not as it must be; empty is good."""

    fault: Fault
    outcome: str = ""
    seconds: float = 0.0
    named: str = ""
    bad: list[str] = field(default_factory=list)


def chosen(engines: Sequence[str], count: int, seed: int) -> list[Fault]:
    """Return `count` faults of these engines in random order."""
    found = []
    for engine, phase in itertools.product(engines, PHASES):
        ranks = ["data 0", "reward 0", "grader", "rollout 0", "rollout 1", "actor 0"]
        ranks += ["actor 1"] * (engine != "fake") + ["launcher"] * (engine in ("fsdp2", "zero"))
        signals = ("SIGKILL", "SIGTERM", "SIGSTOP")
        found += [Fault(engine, phase, kind, victim) for kind, victim in itertools.product(signals, ranks)]
        found += [Fault(engine, phase, kind, "driver") for kind in (*signals, "SIGINT", "SIGHUP")]
        if phase not in ("build", "save"):  # which count nothing
            found += [Fault(engine, phase, kind, f"{PHASES[phase][0]} 0") for kind in ("sleep", "spin")]
    return random.Random(seed).sample(found, min(count, len(found)))


class Stage:
    """An engine's spec, and what its run gives when nothing disturbs it."""

    def __init__(self, engine: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.spec = folder / "spec.toml"
        self.spec.write_text(SPEC + ENGINES[engine])
        done = warm_rlctl("train", self.spec, "--run-dir", folder / "plain")
        assert done.returncode == 0, done.stdout + done.stderr
        self.plain = trajectory(folder / "plain")

    def same(self, run_dir: Path) -> bool:
        """Bit for bit; the sampler's own log-probs are rounded as its batch fell, which a restart changes."""
        return [step[:-1] for step in trajectory(run_dir)] == [step[:-1] for step in self.plain]


def try_fault(stage: Stage, fault: Fault, folder: Path) -> Line:
    """Return the line of a fault. Its files stay where the line is bad."""
    line, mark = Line(fault), f"CHAOS_RUN={uuid.uuid4().hex}"
    role, method, call = PHASES[fault.phase]
    plot, run = folder / "plot", folder / "run"
    plot.mkdir(parents=True)
    (plot / "sitecustomize.py").write_text(HOLD)
    (plot / "hold.json").write_text(json.dumps([role, method, call, fault.kind]))
    command = [sys.executable, "-m", "rlctl", "train", str(stage.spec), "--run-dir", str(run)]
    env = environment(PYTHONPATH=str(REPO), CHAOS_RUN=mark.partition("=")[2])
    try:
        with (folder / "out").open("wb") as out:
            command += ["--set", f'{role}.env.PYTHONPATH="{plot}"']
            driver = subprocess.Popen(command, cwd=REPO, env=env, stdout=out, stderr=out, start_new_session=True)
        if wait_until(lambda: (plot / "held").exists() or driver.poll() is not None, 240) and driver.poll() is None:
            pids = {one.pid for one in psutil.Process(driver.pid).children(recursive=True)}
            _hit(driver, fault, plot / "go")
            began = time.monotonic()
            if not wait_until(lambda: driver.poll() is not None, BOUND_S):
                line.bad.append(f"still running after {BOUND_S:g} s")
                driver.kill()
            code, line.seconds = driver.wait(), time.monotonic() - began
            wait_until(lambda: not pids_marked(mark), GONE_S)
            shared = [name for name in os.listdir("/dev/shm") if name.startswith("rlctl-")]
            left = [name for name in shared if name.split("-")[1] in {str(pid) for pid in (*pids, driver.pid)}]
            if left or pids_marked(mark):
                line.bad.append(f"leftovers: {left} {pids_marked(mark)}")
            _judge(line, stage, run, code, (folder / "out").read_text(errors="replace"))
        else:
            line.bad.append(f"not in {fault.phase}")
    finally:
        kill_marked(mark, GONE_S)
    if not line.bad:
        shutil.rmtree(folder)
    return line


def _hit(driver: subprocess.Popen[bytes], fault: Fault, go: Path) -> None:
    if fault.kind.startswith("SIG"):
        found: list[int] = []
        assert wait_until(lambda: found.extend(_victims(driver.pid, fault.victim)) or found, 60), fault
        with suppress(ProcessLookupError):
            os.kill(found[0], signal.Signals[fault.kind])
    if fault.kind != "sleep":
        go.touch()
    if (fault.victim, fault.kind) == ("driver", "SIGSTOP"):
        time.sleep(1.5)
        driver.send_signal(signal.SIGCONT)


def _victims(driver: int, wanted: str) -> list[int]:
    found = {"driver": driver}
    for process in psutil.Process(driver).children(recursive=True):
        with suppress(psutil.Error, OSError):
            words = process.cmdline()
            if "workers.grading.child" in words:
                found.setdefault("grader", process.pid)
            elif "workers.main" in words:
                below = any("workers.main" in child.cmdline() for child in process.children())
                rank = Path(os.readlink(f"/proc/{process.pid}/fd/1")).stem.removeprefix("rank")
                found["launcher" if below else f"{words[words.index('--role') + 1]} {rank}"] = process.pid
    return [found[wanted]] if wanted in found else []


def _judge(line: Line, stage: Stage, run: Path, code: int, text: str) -> None:
    fault, words = line.fault, " ".join(text.split())
    who = {"launcher": "actor rank", "grader": "reward rank 0"}.get(fault.victim, fault.victim.replace(" ", " rank "))
    lost = [
        one for one in text.splitlines() if one.startswith("error:") or " failed: " in one or "not be graded" in one
    ]
    line.named = lost[-1] if lost else ""
    causes = {"sleep": "nothing has moved", "spin": "nothing has moved", "SIGSTOP": "no sign of life"}
    causes |= {"SIGTERM": "got signal: 15"} if fault.victim == "launcher" else {}
    cause = causes.get(fault.kind, fault.kind)

    def must(holds: bool, otherwise: str) -> None:
        line.bad += [] if holds else [otherwise]

    must("Traceback" not in text and "fault in rlctl" not in text, "a traceback")
    must(fault.goes_on is None or fault.goes_on == (code == 0), f"exit code {code}")
    if fault.victim == "driver":
        must(code in {"SIGKILL": (-9,), "SIGSTOP": (0,)}.get(fault.kind, (130,)), f"exit code {code}")
    elif code != 0 or fault.is_restart:
        must(who in words, f"{who} is not named")
        must(cause in words or (fault.victim == "grader" and "no answer within" in words), "the cause is not named")
    if code == 0:
        line.outcome = "went on"
        # A grade that was lost is reported, and its sample left out; everything else repeats.
        must(stage.same(run) or "could not be graded" in text, "other numbers")
    else:
        with ONE_AT_A_TIME:
            done = warm_rlctl("train", stage.spec, "--run-dir", run, "--resume", timeout_s=120)
        line.outcome = f"ended ({code}), resumed ({done.returncode})"
        must(done.returncode == 0, done.stderr[-300:])
        must(done.returncode != 0 or stage.same(run), "other numbers after --resume")

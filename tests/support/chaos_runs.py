"""One fault in one real run: started, held in a phase, hit, watched to its end, resumed, and judged."""

from __future__ import annotations

import fcntl
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from chaos_faults import REWARD_CODE, REWARDS, SIGNALS, Fault, write_hold
from running import REPO, environment, trajectory, warm_rlctl

from workers.watchdog import kill_marked, pids_marked

START_S = 240.0  # until the run is held
BOUND_S = 150.0  # from the fault to the end of the run, restarts included; on a busy machine
FOUND_S = 60.0  # until the process that is to be hit is there
GONE_S = 60.0  # until the last process is gone
STOPPED_S = 1.5  # how long a stopped driver is stopped

ONE_AT_A_TIME = threading.Lock()  # there is one warm process to fork from
STEPS = 5
COMMON = f"""
schema = 1
[run]
name = "chaos"
steps = {STEPS}
heartbeat_timeout_s = 6
stall_timeout_s = 8
start_timeout_s = 45
[model]
path = "builtin:tiny-digits"
from_scratch = true
[data]
train = "builtin:sort-digits"
prompts_per_step = 8
max_prompt_tokens = 8
max_response_tokens = 6
[reward]
terms = [{{reward}}]
timeout_s = 3
workers = 1
[algorithm]
kind = "grpo"
group_size = 4
mini_batches_per_step = 1
[checkpoint]
every = 2
[rollout]
processes = 2
threads = 1
"""
ENGINES = {
    "fake": '[actor]\noptimizer = { lr = 0.05 }\nengine = { kind = "fake" }\n[rollout.engine]\nkind = "fake"\n',
    "ddp": '[actor]\nprocesses = 2\nthreads = 1\nengine = { kind = "ddp" }\n',
    "fsdp2": '[actor]\nprocesses = 2\nthreads = 1\nlauncher = "torchrun"\nengine = { kind = "fsdp2" }\n',
    "zero": '[actor]\nprocesses = 2\nthreads = 1\nlauncher = "torchrun"\nengine = { kind = "zero3" }\n',
}
LAUNCHED = ("fsdp2", "zero")  # by torchrun
EXACT = '{ kind = "exact_match", partial = true }'


@dataclass
class Line:
    """How a fault ended. `bad`: what is not as it must be; empty is good."""

    fault: Fault
    outcome: str = ""
    seconds: float = 0.0
    named: str = ""
    leftovers: str = ""
    bad: list[str] = field(default_factory=list)


class Stage:
    """An engine's spec, and what its run gives when nothing disturbs it."""

    def __init__(self, engine: str, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        folder.mkdir(parents=True)
        self.spec = self.write_spec(folder, EXACT)
        done = warm_rlctl("train", self.spec, "--run-dir", folder / "plain")
        assert done.returncode == 0, done.stdout + done.stderr
        self.plain = trajectory(folder / "plain")
        assert len(self.plain) == STEPS

    def write_spec(self, folder: Path, reward: str) -> Path:
        path = folder / "spec.toml"
        path.write_text(COMMON.format(reward=reward) + ENGINES[self.engine])
        return path

    def same(self, run_dir: Path) -> bool:
        """Bit for bit; the sampler's own log-probs are rounded as its batch fell, which a restart changes."""
        return [step[:-1] for step in trajectory(run_dir)] == [step[:-1] for step in self.plain]


class Disturbed:
    """A run that meets a fault."""

    def __init__(self, stage: Stage, fault: Fault, folder: Path) -> None:
        self.stage, self.fault, self.folder = stage, fault, folder
        self.line = Line(fault)
        self.run_dir, self.plot = folder / "run", folder / "plot"
        self.mark = f"CHAOS_RUN={uuid.uuid4().hex}"
        self.spec = stage.spec
        self.pids: set[int] = set()
        self.memory: set[str] = set()  # names in /dev/shm that its processes had mapped
        self.not_ours = set(os.listdir("/dev/shm"))
        self.terminal = -1
        self.code: int | None = None
        folder.mkdir(parents=True)

    def judge(self) -> Line:
        """All of it. What is started here is gone when this returns."""
        try:
            if self.fault.kind == "full disk":
                self._on_a_small_disk()
            elif self.fault.victim == "rewards":
                self._with_hostile_rewards()
            else:
                self._held_and_hit()
        finally:
            self._end_what_is_left()
        return self.line

    # ── kinds of faults ───────────────────────────────────────────────────────────────────────────

    def _held_and_hit(self) -> None:
        options = write_hold(self.plot, self.fault)
        driver = self._start(*options)
        if not _wait(lambda: self._is_held() or driver.poll() is not None, START_S):
            self.line.bad.append(f"not in {self.fault.phase} after {START_S:g} s")
            return
        if driver.poll() is not None:
            self.line.bad.append(f"ended before {self.fault.phase}")
            self._watch(driver, time.monotonic())
            return
        self._look_at(driver.pid)
        self._hit(driver)
        self._watch(driver, time.monotonic())
        self._judge_end(went_on=self._should_go_on())

    def _is_held(self) -> bool:
        self._read_terminal()
        return (self.plot / "held").exists()

    def _read_terminal(self) -> None:
        """A terminal that nobody reads fills up, and its writer waits."""
        with suppress(BlockingIOError):
            while self.terminal >= 0 and os.read(self.terminal, 65536):
                pass

    def _hit(self, driver: subprocess.Popen[bytes]) -> None:
        fault = self.fault
        if fault.late_s:  # within the phase, or just after it
            (self.plot / "go").touch()
            time.sleep(fault.late_s)
        if fault.kind in SIGNALS:
            _wait(lambda: self._find(driver.pid) is not None, FOUND_S)  # graders start a little later than their role
            if (victim := self._find(driver.pid)) is None:
                self.line.bad.append(f"no process is {fault.victim}")
            else:
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.Signals[fault.kind])
        elif fault.kind.startswith("Ctrl-C"):
            for _ in range(int(fault.kind.rpartition("×")[2])):
                driver.send_signal(signal.SIGINT)
                time.sleep(0.02)
        elif fault.kind == "hang-up":
            os.close(self.terminal)
            self.terminal = -1
        (self.plot / "go").touch()
        if (fault.victim, fault.kind) == ("driver", "SIGSTOP"):
            time.sleep(STOPPED_S)
            driver.send_signal(signal.SIGCONT)

    def _should_go_on(self) -> bool:
        fault = self.fault
        if fault.victim == "driver":
            return fault.kind == "SIGSTOP"
        if (fault.victim, fault.phase) == ("grader", "build"):  # too early, it says that rewards cannot be loaded
            return self.code == 0
        if (fault.victim, fault.kind) == ("launcher", "SIGSTOP"):  # its ranks do not need it
            return True
        return fault.restarts or fault.victim == "grader"

    def _with_hostile_rewards(self) -> None:
        what, words = REWARDS[self.fault.kind]
        (self.folder / "rewards.py").write_text(REWARD_CODE.format(what=what))
        self.spec = self.stage.write_spec(self.folder, '{ kind = "function", path = "rewards.py:score" }')
        driver, began = self._start(), time.monotonic()
        self._watch(driver, began)
        self._must_be(self.code == 0, f"exit code {self.code}")
        said = next((line for line in self._text().splitlines() if "could not be graded" in line), "")
        self.line.outcome, self.line.named = "graded the others", said.partition("(")[2].partition(")")[0]
        self._must_be(words in self.line.named, f"{words} not named")
        self._must_be("\x1b" not in self._text(), "an escape sequence reached the terminal")

    def _on_a_small_disk(self) -> None:
        disk = self.folder / "disk"
        disk.mkdir()
        size = self.fault.phase.removesuffix(" KiB")
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", disk], check=False).returncode:
            self.line.outcome = "not tried: a tmpfs cannot be mounted here"
            return
        try:
            self.run_dir = disk / "run"
            driver, began = self._start(), time.monotonic()
            self._watch(driver, began)
            if self.code == 0:
                self.line.outcome = "fitted"
                return
            self._must_be(self.code in (1, 2), f"exit code {self.code}")
            self._must_be("full" in self.line.named or "No space" in self._text(), "not named")
            self._must_be("OSError" not in self.line.named, "a raw error")
            subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
            self._resume()
        finally:
            self._end_what_is_left()
            subprocess.run(["umount", "-l", disk], check=False)

    # ── the run ───────────────────────────────────────────────────────────────────────────────────

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        name, _, value = self.mark.partition("=")
        command = [sys.executable, "-m", "rlctl", "train", str(self.spec), "--run-dir", str(self.run_dir), *options]
        env = environment(PYTHONPATH=str(REPO), **{name: value})
        if self.fault.kind == "hang-up":
            self.terminal, theirs = pty.openpty()
            os.set_blocking(self.terminal, False)
            process = subprocess.Popen(
                command, cwd=REPO, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
                preexec_fn=_take_terminal,
            )  # fmt: skip
            os.close(theirs)
            return process
        with (self.folder / "out").open("wb") as out:
            return subprocess.Popen(
                command, cwd=REPO, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def _look_at(self, driver: int) -> None:
        """Remember who belongs to the run, and what shared memory they have."""
        for process in [psutil.Process(driver), *psutil.Process(driver).children(recursive=True)]:
            self.pids.add(process.pid)
            with suppress(OSError):
                for row in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                    _, slash, name = row.partition(" /dev/shm/")
                    self.memory.update([name] if slash and "(deleted)" not in name else [])

    def _find(self, driver: int) -> int | None:
        """The victim's pid."""
        wanted = self.fault.victim
        if wanted == "driver":
            return driver
        for process in psutil.Process(driver).children(recursive=True):
            with suppress(psutil.Error, OSError):
                if wanted == _part_of(process):
                    return process.pid
        return None

    def _watch(self, driver: subprocess.Popen[bytes], hit: float) -> None:
        """Until the run ends, within its bound, and with all its processes."""
        if not _wait(lambda: driver.poll() is not None, BOUND_S):
            self.line.bad.append(f"still running after {BOUND_S:g} s")
            driver.kill()
            driver.wait()
        self.code, self.line.seconds = driver.returncode, time.monotonic() - hit
        _wait(lambda: not pids_marked(self.mark), GONE_S)
        left = [_command(pid) for pid in pids_marked(self.mark)]
        new = sorted(set(os.listdir("/dev/shm")) - self.not_ours)
        shared = [name for name in new if name in self.memory or self._is_ours(name)]
        self.line.leftovers = "; ".join([*left, *shared])
        self._must_be(not self.line.leftovers, "leftovers")
        text = self._text()
        self._must_be("Traceback" not in text and "fault in rlctl" not in text, "a traceback")
        errors = [line for line in text.splitlines() if line.startswith("error:")]
        self.line.named = errors[-1].removeprefix("error: ") if errors else ""

    def _is_ours(self, name: str) -> bool:
        parts = name.split("-")
        return name.startswith("rlctl-") and parts[1].isdecimal() and int(parts[1]) in self.pids

    def _judge_end(self, *, went_on: bool) -> None:
        fault, text = self.fault, self._text()
        if fault.victim == "driver":
            wanted = {"SIGKILL": -9, "SIGSTOP": 0}.get(fault.kind, 130)
            self._must_be(self.code == wanted, f"exit code {self.code}, not {wanted}")
            self._must_be(wanted != 130 or fault.kind == "hang-up" or "interrupted" in text, "not named")
        elif went_on:
            self._must_be(self.code == 0, f"exit code {self.code}")
        else:
            wanted = (1, 2) if fault.victim == "grader" else (1,)
            self._must_be(self.code in wanted, f"exit code {self.code}")
            self._must_be(fault.who in self.line.named, f"{fault.who} is not named")
            self._must_be(self._cause_is_told(text), "the cause is not named")
        if went_on and self.code == 0:
            self._judge_recovery(text)
        elif self.code != 0:
            self._resume()

    def _cause_is_told(self, text: str) -> bool:
        how = self.fault.kind
        if (self.fault.victim, how) == ("grader", "SIGSTOP"):
            return "no answer within" in text
        if how in ("sleep", "spin"):
            return "nothing has moved" in text
        return ("no sign of life" if how == "SIGSTOP" else how) in text

    def _judge_recovery(self, text: str) -> None:
        fault = self.fault
        lost = next((line for line in text.splitlines() if " failed: " in line or "could not be graded" in line), "")
        self.line.named = lost.removeprefix("warning: ")
        same = self.stage.same(self.run_dir)
        self.line.outcome = "went on, same numbers" if same else "went on"
        if fault.restarts:
            self._must_be(f"{fault.who} failed" in text, f"{fault.who} is not named")
            self._must_be(self._cause_is_told(text), "the cause is not named")
        # A grade that was lost is told, and its sample left out; everything else repeats.
        self._must_be(same or "could not be graded" in text, "other numbers")

    def _resume(self) -> None:
        with ONE_AT_A_TIME:
            done = warm_rlctl("train", self.spec, "--run-dir", self.run_dir, "--resume", timeout_s=120)
        if done.returncode == 0 and self.stage.same(self.run_dir):
            self.line.outcome = f"ended ({self.code}), resumed, same numbers"
            return
        self.line.outcome = f"ended ({self.code}), resumed ({done.returncode})"
        self.line.bad.append("other numbers after --resume" if done.returncode == 0 else done.stderr[-300:])

    def _end_what_is_left(self) -> None:
        kill_marked(self.mark, GONE_S)
        if self.terminal >= 0:
            os.close(self.terminal)
            self.terminal = -1

    def _text(self) -> str:
        path = self.folder / "out"
        return path.read_text(errors="replace") if path.exists() else ""

    def _must_be(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.line.bad.append(otherwise)


def try_fault(stage: Stage, fault: Fault, folder: Path) -> Line:
    """The line of a fault. Its files stay where the line is bad."""
    line = Disturbed(stage, fault, folder).judge()
    if not line.bad:
        shutil.rmtree(folder)
    return line


def _take_terminal() -> None:
    """In the child: its standard input is its session's terminal, whose end it hears, also where `nohup` ran this."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _part_of(process: psutil.Process) -> str:
    """ "actor 1", "launcher", "grader"."""
    words = process.cmdline()
    if "workers.main" in words:
        if any("workers.main" in child.cmdline() for child in process.children()):
            return "launcher"
        rank = Path(os.readlink(f"/proc/{process.pid}/fd/1")).stem.removeprefix("rank")
        return f"{words[words.index('--role') + 1]} {rank}"
    return "grader" if "workers.grading.child" in words else ""


def _command(pid: int) -> str:
    with suppress(psutil.Error):
        return f"{pid} {' '.join(psutil.Process(pid).cmdline())[:60]}"
    return str(pid)


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True

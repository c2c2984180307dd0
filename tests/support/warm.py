"""`python -m …` without the seconds of its imports: processes that are forked from one that has imported torch.

Importing torch, transformers and the engines costs several CPU seconds in every rank of every run, more than the steps
of a small run. Here one process per test session imports them (`Warm.start`); what is run in it, and every rank,
launcher and export that this starts in turn, is a fork of it. Such a process has a pid, parent, session, standard
streams, arguments, environment and exit code of its own, as a started one has. It differs in what /proc shows (command
line, environment), in variables that are read while torch is imported, and in the seed of `hash`.

So this is for tests of what runs compute and leave behind. Tests of starting, losing and ending processes and of
interpreters start real ones (`running.rlctl`, `running.start`); so does one run of each engine. An engine in another
interpreter can be had the same way (`vllm_process.VllmPopen`). A `sitecustomize` on
the path runs in the fork where it says that it may (`PATCHES`); of any other the command is really started.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import inspect
import json
import logging
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
# How a sitecustomize begins that does nothing but patch modules, which may have been imported before.
PATCHES = "# It patches modules, whether they are imported already or not.\n"
# Modules that may run in a fork. Others, and interpreters and sitecustomize files of a test's own, are really started.
TORCHRUN = ("torch.distributed.run", "backends.torchrun")
SGLANG = ("backends.sglang_rollout.server_process", "sglang.launch_server")  # the first becomes the second by exec
OF_A_SWEEP = "from rlctl.cli import main"  # what is run with -c
MODULES = ("rlctl", "workers.main", "workers.offline.", *TORCHRUN, *SGLANG)
IMPORTED = (
    "transformers.models.qwen2.modeling_qwen2",
    "backends.torchrun",
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",
    "backends.ddp.engine",
    "backends.fsdp2.engine",
    "backends.torch_rollout.engine",
    "workers.serve",
    "workers.roles.trainer",
    "workers.roles.rollout",
    "workers.roles.reward",
    "workers.connection",
    "workers.gateway.gateway_server",
    "rlctl.cli",
    "rlctl.run.train",
)


def run(
    command: Sequence[str | Path], *, env: Mapping[str, str], timeout_s: float, cwd: Path = REPO
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a command of this interpreter, with its output as text."""
    return _started().run([str(word) for word in command], dict(env), timeout_s, cwd)


@contextmanager
def children() -> Iterator[None]:
    """Inside, what this process starts with torch in it is a fork, and this process's child as any other."""
    real = subprocess.Popen
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = real  # type: ignore[misc]


def on_hosts(folder: Path, roles: Sequence[str]) -> list[str]:
    """Have the ranks of a run on several hosts be forks, on each of one process there. Return the options of
    `rlctl train`; its own PYTHONPATH has `folder`, too."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PATCHES + _ON_HOSTS.format(support=str(Path(__file__).parent)))
    return [word for role in roles for word in ("--set", f'{role}.env.PYTHONPATH="{folder}"')]


_ON_HOSTS = """
import sys
if sys.orig_argv[1:3] in (["-m", "workers.node"], ["-m", "rlctl"]):
    import subprocess
    sys.path.append({support!r})
    import warm
    subprocess.Popen = warm.WarmPopen
"""


@cache
def _started(python: str = sys.executable, imported: Sequence[str] = IMPORTED) -> Warm:
    """Return the test session's, which imports, of an interpreter."""
    ours, theirs = socket.socketpair()
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [python, __file__, str(theirs.fileno()), *imported]
    child = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=env)
    theirs.close()
    warm = Warm(ours)

    def end() -> None:
        warm.close()
        child.wait()

    atexit.register(end)
    return warm


class Warm:
    """A process that has imported torch and has one thread, and how to ask it for a fork of itself."""

    def __init__(self, asked_and_told: socket.socket) -> None:
        self.socket, self.answers = asked_and_told, asked_and_told.makefile()
        self.one_at_a_time = threading.Lock()

    def run(self, command: list[str], env: dict[str, str], timeout_s: float, cwd: Path) -> Any:
        with tempfile.TemporaryDirectory(prefix="rlctl-warm-") as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            asked = {"command": command, "env": env, "cwd": str(cwd), "out": str(out), "err": str(err)}
            self.socket.sendall(json.dumps(asked).encode() + b"\n")
            pid = self.told()
            late = threading.Timer(timeout_s, os.kill, (pid, signal.SIGKILL))
            late.start()
            code = self.told()
            timed_out = not late.is_alive()
            late.cancel()
            told = out.read_text(errors="replace"), err.read_text(errors="replace")
        if timed_out:
            raise subprocess.TimeoutExpired(command, timeout_s, *told)
        return subprocess.CompletedProcess(command, code, *told)

    def told(self) -> int:
        line = self.answers.readline()
        assert line, "the process that has imported torch is gone: its standard error says why"
        return int(line)

    def fork(self, command: list[str], env: dict[str, str], cwd: str | None, streams: Sequence[int], new: bool) -> int:
        """A fork that is a child of this process, with these streams (-1: this process's own); its pid.

        For a moment, orphans among this process's descendants become its children: that is how it gets this one.
        """
        own = [stream if stream >= 0 else number for number, stream in enumerate(streams)]
        asked = {
            "command": command,
            "env": env,
            "cwd": os.fspath(cwd or os.getcwd()),
            "new_session": new,
            "parent": os.getpid(),
        }
        with self.one_at_a_time:
            _adopt_orphans(True)
            try:
                socket.send_fds(self.socket, [json.dumps(asked).encode() + b"\n"], own)
                return self.told()
            finally:
                _adopt_orphans(False)

    def close(self) -> None:
        self.answers.close()
        self.socket.close()


def _adopt_orphans(on: bool) -> None:
    ctypes.CDLL(None).prctl(36, ctypes.c_ulong(on), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


# ── the process that has imported torch ─────────────────────────────────────────────────────────────


def serve(asked_and_told: socket.socket) -> None:
    """Fork for each request and tell the pid, then the exit code; where the request names another parent, the pid of a
    fork of the fork, which becomes that one's child. Ends when nobody asks any more."""
    while request := _receive(asked_and_told):
        asked, streams = request
        if "parent" in asked:
            asked_and_told.sendall(f"{_fork_for(asked, streams)}\n".encode())
            continue
        if (pid := os.fork()) == 0:
            _be_asked(asked)
        asked_and_told.sendall(f"{pid}\n".encode())
        asked_and_told.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())


def _fork_for(asked: dict[str, Any], streams: list[int]) -> int:
    """The process between the two forks has ended, and the second has its new parent, when this returns its pid."""
    reading, writing = os.pipe()
    if (between := os.fork()) == 0:
        if (pid := os.fork()) == 0:
            while os.getppid() != asked["parent"]:
                time.sleep(0.001)
            if asked["new_session"]:
                os.setsid()
            become(asked["command"], asked["env"], (streams[0], streams[1], streams[2]), asked["cwd"])
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(reading, 20))
    for each in (reading, writing, *streams):
        os.close(each)
    return pid


def _receive(asked_and_told: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    text, streams, _, _ = socket.recv_fds(asked_and_told, 1 << 20, 3)
    while text and not text.endswith(b"\n"):
        text += asked_and_told.recv(1 << 20)
    return (json.loads(text), streams) if text else None


def _be_asked(asked: dict[str, Any]) -> None:
    from workers.watchdog import die_with_parent

    die_with_parent()
    nothing, out, err = (
        os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) for path in ("/dev/null", asked["out"], asked["err"])
    )
    become(asked["command"], asked["env"], (nothing, out, err), asked["cwd"])


class WarmPopen(subprocess.Popen[Any]):
    """`subprocess.Popen` whose child is, where the command allows it, a fork of a process that has imported torch and
    has one thread, and then this process's child. This one's own fork would find locks that its threads held."""

    python, imported = sys.executable, IMPORTED

    def _execute_child(self, *args: Any) -> None:  # type: ignore[override]
        given = _CHILD.bind(self, *args).arguments
        command = [] if isinstance(given["args"], str) else [os.fsdecode(word) for word in given["args"]]
        env = dict(os.environ if given["env"] is None else given["env"])
        if given["shell"] or given["pass_fds"] or not may_be_forked(command, env, self.python):
            return super()._execute_child(*args)  # type: ignore[misc]
        streams = given["p2cread"], given["c2pwrite"], given["errwrite"]
        nursery = _nursery or _started(self.python, self.imported)
        self.pid = nursery.fork(command, env, given["cwd"], streams, given["start_new_session"])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]
        return None


_CHILD = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


def may_be_forked(command: Sequence[str], env: Mapping[str, str], python: str = sys.executable) -> bool:
    if not command or command[0] != python:
        return False
    words = [word for word in command[1:] if word not in ("-u", "-P")]
    if words[0] == "-c":
        known = OF_A_SWEEP in words[1]
    elif words[0] == "-m":
        known = any(words[1] == name or (name.endswith(".") and words[1].startswith(name)) for name in MODULES)
    else:
        known = words[0].endswith(".py")
    return known and all(text.startswith(PATCHES) for text in _sites(env))


def _sites(env: Mapping[str, str]) -> list[str]:
    """Texts of the sitecustomize files on the path; Python runs the first."""
    files = (Path(folder, "sitecustomize.py") for folder in _python_path(env))
    return [file.read_text() for file in files if file.exists()]


def _python_path(env: Mapping[str, str]) -> list[str]:
    return [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]


def become(
    command: Sequence[str], env: Mapping[str, str], streams: tuple[int, int, int], cwd: str | Path | None
) -> None:
    """Be the process that `command` would have started; never returns. `streams`: -1 for one that is kept."""
    code = 1
    try:
        _take(env, streams, cwd)
        words = [word for word in command[1:] if word not in ("-u", "-P")]
        sys.orig_argv = list(command)
        if _sites(env):
            sys.modules.pop("sitecustomize", None)
            import_module("sitecustomize")
        if words[0] == "-c" or (
            words[0] == "-m" and (words[1] in ("rlctl", *TORCHRUN) or "reward" in words)
        ):  # chat templates
            _open_nursery()
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(words[1], {"__name__": "__main__"})
        elif words[0] == "-m":
            if words[1] == SGLANG[0]:
                os.execv = _go_on_as
            sys.argv = words[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # the edge of the process
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _go_on_as(_: object, command: Sequence[str]) -> None:
    """Do in this process what the module of an exec'd `python -m` does."""
    sys.argv = list(command[2:])
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)


_nursery: Warm | None = None  # of a process that starts others: forked from it before it has threads


def _open_nursery() -> None:
    global _nursery
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        from workers.watchdog import die_with_parent

        die_with_parent()
        ours.close()
        serve(theirs)
        os._exit(0)
    theirs.close()
    _nursery = Warm(ours)
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = WarmPopen  # type: ignore[assignment]


def _take(env: Mapping[str, str], streams: tuple[int, int, int], cwd: str | Path | None) -> None:
    """Nothing of the process that forked is left: streams, files, signals, folder, environment, random numbers."""
    held = [os.dup(stream) if stream >= 0 else -1 for stream in streams]
    for place, stream in enumerate(held):
        if stream >= 0:
            os.dup2(stream, place)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    logging.getLogger().handlers.clear()
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary folders of the process that forked
    tempfile.tempdir = None  # which another environment names
    tracker = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None  # type: ignore[attr-defined]
    if cwd is not None:
        os.chdir(cwd)
    before = set(_python_path(os.environ))
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = [*_python_path(env), *(folder for folder in sys.path if folder not in before)]
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    if threads := env.get("OMP_NUM_THREADS", ""):
        torch.set_num_threads(int(threads))


if __name__ == "__main__":
    # Forks run `__main__` of their own: they find this one under its name.
    sys.path[:] = [folder for folder in sys.path if Path(folder) != Path(__file__).parent]
    sys.path.append(str(Path(__file__).parent))
    import warm

    from workers.watchdog import die_with_parent

    die_with_parent()
    for name in sys.argv[2:]:
        import_module(name)
    gc.collect()
    gc.freeze()
    warm.serve(socket.socket(fileno=int(sys.argv[1])))

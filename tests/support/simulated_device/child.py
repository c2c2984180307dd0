"""Tests marked `on_simulated_device` run in one child process, for torch must find the device when it is imported.

    @on_simulated_device
    def test_something(tmp_path: Path) -> None: ...

In pytest's own process such a test asks the child, which imports its file and calls it there. Its arguments travel as
JSON.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from simulated_device.library import built, compiler, load

SUPPORT = Path(__file__).parents[1]
IS_CHILD = "SIMULATED_DEVICE"  # variables of ours begin otherwise, and do not reach ranks


def on_simulated_device(test: Callable[..., Any]) -> Callable[..., Any]:
    if IS_CHILD in os.environ:
        return test

    @functools.wraps(test)
    def ask(**arguments: Any) -> None:
        import torch

        if torch.version.cuda is not None:
            pytest.skip("this torch is built for CUDA, and has devices of its own")
        if compiler() is None:
            pytest.skip("no C++ compiler: the simulated device cannot be built")
        asked = {"file": sys.modules[test.__module__].__file__, "test": test.__name__, "arguments": arguments}
        process = _child()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asked, default=str) + "\n")
        process.stdin.flush()
        reply = process.stdout.readline()
        assert reply, f"the child has ended: {process.wait()}"
        found = json.loads(reply)
        if found["reason"]:
            pytest.skip(found["reason"])
        if found["error"]:
            pytest.fail(found["error"], pytrace=False)

    return ask


@functools.cache
def _child() -> subprocess.Popen[str]:
    environment = {**os.environ, IS_CHILD: str(built())}
    environment.pop("DS_ACCELERATOR", None)  # an engine of another test has chosen it for this process
    environment["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])])
    command = [sys.executable, "-W", "ignore", "-m", "simulated_device.child"]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment)
    atexit.register(process.wait)
    atexit.register(process.kill)  # first
    return process


def believe() -> ctypes.CDLL:
    """Have the device in this process."""
    library = load(Path(os.environ[IS_CHILD]))
    import torch

    from simulated_device.torch_cuda import install

    torch.set_num_threads(1)
    install(library)
    return library


SITE = """
import os
if os.environ.get("CUDA_VISIBLE_DEVICES"):
    from simulated_device.child import believe
    believe()
"""
DRIVERS_COMMAND = """#!/bin/sh
each() { for gpu in 0 1 2 3 4 5 6 7; do echo "$1"; done; }
case "$*" in -L) each "GPU 0: simulated";; *compute_cap*) each 9.0;; *memory.total*) each 81920;; *) exit 1;; esac
"""


@contextmanager
def in_every_rank(folder: Path) -> Iterator[None]:
    """Inside, ranks that are started on a device have this one."""
    (folder / "sitecustomize.py").write_text(SITE)
    (folder / "nvidia-smi").write_text(DRIVERS_COMMAND)
    (folder / "nvidia-smi").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder), prepend=os.pathsep)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


def serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed, by what is started here too, is no reply
    library = believe()
    for asked in map(json.loads, sys.stdin):
        if str(Path(asked["file"]).parent) not in sys.path:
            sys.path.append(str(Path(asked["file"]).parent))
        error = reason = ""
        try:
            test = getattr(import_module(Path(asked["file"]).stem), asked["test"])
            gc.collect()
            gc.freeze()  # engines ask for full collections, which would walk through all modules each time
            given = {name: Path(value) if name == "tmp_path" else value for name, value in asked["arguments"].items()}
            test(**given)
        except pytest.skip.Exception as skipped:
            reason = str(skipped)
        except BaseException:
            error = traceback.format_exc()
        library.set_device(0)
        print(json.dumps({"error": error, "reason": reason}), file=replies, flush=True)


if __name__ == "__main__":
    serve()

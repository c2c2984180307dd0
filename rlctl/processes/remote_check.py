"""Check whether a host can do its part of a run. There `python -m rlctl.processes.remote_check QUESTIONS`, the JSON of
a `Questions`, writes a line as a supervisor does (`workers/node.py`), with the fields of a `Problem`, or null. The exit
code is 1 where there is a problem.

Standard library only: a role's interpreter there need not have what the command line needs.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlctl import __version__
from rlctl.models.hardware import gpu_count
from specs.errors import Problem
from workers.node import PREFIX

_DIAL_TIMEOUT_S = 5.0
_READ = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py")


@dataclass(frozen=True)
class Questions:
    """Say what a host must have. `address`, `ports`: where the driver listens. `folders` have to exist; `shared` are
    files that the driver has just made, each in a folder to which this host writes too; `models` are folders, with the
    size of each of their files; `files`: path → checksum. `host`, `gpus`: this one's name, and how many GPUs it must
    have. `version`: rlctl's."""

    address: str
    ports: Sequence[int] = ()
    folders: Sequence[str] = ()
    shared: Sequence[str] = ()
    models: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    gpus: int = 0
    version: str = __version__


def main(questions: Questions) -> int:
    problem = problem_here(questions)
    print(PREFIX + json.dumps({"problem": asdict(problem) if problem else None}), flush=True)
    return int(problem is not None)


def problem_here(questions: Questions) -> Problem | None:
    """Return what keeps this host from its part; last the way to the driver."""
    host = questions.host

    def problem(message: str, hint: str) -> Problem:
        return Problem("cluster", message, hint, host)

    if questions.version != __version__:
        return problem(f"host {host} has rlctl {__version__}, and {questions.version} is here", "install the same")
    writable = [os.path.dirname(path) for path in questions.shared]
    for folder in (*questions.folders, *questions.models, *writable):
        if not os.path.isdir(folder):
            hint = "all hosts need the same folders under the same names: a shared file system"
            return problem(f"host {host} has no folder {folder}", hint)
    for path, folder in zip(questions.shared, writable, strict=True):
        if not os.path.exists(path):
            message = f"{folder} of host {host} is another folder than this host's: a file made here is not there"
            return problem(message, "name a folder on a file system that all hosts share, such as with run.dir")
        if not os.access(folder, os.W_OK):
            message = f"host {host} cannot write to {folder}"
            return problem(message, "its ranks write there: mount it for writing, and as the same user")
    for folder, files in questions.models.items():
        here = sizes_in(folder)
        for name in (name for name, size in files.items() if here.get(name) != size):
            message = f"{os.path.join(folder, name)} is not on host {host}, or of another size"
            return problem(message, "all hosts must read the same model: copy it again, or share its folder")
    for path in (path for path, checksum in questions.files.items() if checksum_of(path) != checksum):
        message = f"{path} is not on host {host}, or another file than here"
        return problem(message, "all hosts must run the same functions: copy it again, or share its folder")
    if (count := gpu_count()) is not None and questions.gpus > count:
        message = f"host {host} has {count} GPUs, and the spec names number {questions.gpus - 1}"
        return problem(message, "name GPUs that every node of the role has, or use other hosts")
    for port in questions.ports:
        try:
            socket.create_connection((questions.address, port), timeout=_DIAL_TIMEOUT_S).close()
        except OSError as error:
            way = f"{questions.address}:{port}: {error.strerror or error}"
            return problem(f"host {host} cannot reach this one at {way}", "open this host's ports to it")
    return None


def sizes_in(folder: str) -> dict[str, int]:
    """Return name and size in bytes of each file of a model's folder that is read of it."""
    files = [file for file in os.scandir(folder) if file.name.endswith(_READ) and file.is_file()]
    return {file.name: file.stat().st_size for file in files}


def checksum_of(path: str) -> str:
    """Return the SHA-256 of a file's bytes; empty where it cannot be read."""
    with suppress(OSError):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return ""


if __name__ == "__main__":
    sys.exit(main(Questions(**json.loads(sys.argv[1]))))

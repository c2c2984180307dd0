"""Report what another host can do before a run, and which peers it reaches: `python -m rlctl.processes.remote_check
QUESTIONS`, where QUESTIONS is the JSON of an `Asked`.

It writes a line of JSON (a `HostReply`), reads one ({"peers": [[name, address, port], …]}), writes which of them it
cannot reach ({"unreached": [[name, "address:port: why"], …]}), and ends with its input.

Standard library only: a role's interpreter there need not have what the command line needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

from rlctl import __version__
from rlctl.models.hardware import gpu_count
from workers.network import address_of_interface, address_towards

MARK = "rlctl-probe: "
_DIAL_TIMEOUT_S = 5.0
_READ = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py")


class Questions(TypedDict):
    """`address`, `ports`: where the driver's host listens. `interface`: the one that ranks use; empty, or none by that
    name: the one that leads there. `folders` must exist; `shared` are files that the driver has just made, each in a
    folder to which this host writes too; `models` are folders, with the size of each of their files; `files`: path →
    checksum (`checksum_of`)."""

    address: str
    ports: list[int]
    interface: str
    folders: list[str]
    shared: list[str]
    models: dict[str, dict[str, int]]
    files: dict[str, str]


class HostReply(TypedDict):
    """`machine`: equal where two hosts are one. `missing` folders; `unshared`, `read_only`: folders of shared files;
    `different`: models' files; `changed`: other files. `dial`: why the driver cannot be reached, or empty. `gpus`: None
    where it is not known. `door`: where this host listens for its peers. `time`: seconds since 1970."""

    version: str
    machine: str
    missing: list[str]
    unshared: list[str]
    read_only: list[str]
    different: list[str]
    changed: list[str]
    dial: str
    gpus: int | None
    door: tuple[str, int]
    time: float


def main(questions: Questions) -> None:
    address, dial = _own_address(questions["interface"], questions["address"])
    with socket.create_server((address, 0), backlog=1024) as door:
        shared = [os.path.dirname(path) for path in questions["shared"]]
        missing = [
            folder for folder in (*questions["folders"], *questions["models"], *shared) if not os.path.isdir(folder)
        ]
        there = [path for path in questions["shared"] if os.path.dirname(path) not in missing]
        models = {folder: files for folder, files in questions["models"].items() if folder not in missing}
        _send(
            HostReply(
                version=__version__,
                machine=this_machine(),
                missing=missing,
                unshared=[os.path.dirname(path) for path in there if not os.path.exists(path)],
                read_only=[os.path.dirname(path) for path in there if not os.access(os.path.dirname(path), os.W_OK)],
                different=[name for folder, files in models.items() for name in differing(folder, files)],
                changed=[path for path, checksum in questions["files"].items() if checksum_of(path) != checksum],
                dial=dial or next(filter(None, (_dial(questions["address"], port) for port in questions["ports"])), ""),
                gpus=gpu_count(),
                door=(address, door.getsockname()[1]),
                time=time.time(),
            )
        )
        if line := sys.stdin.readline():
            _send({"unreached": unreached(json.loads(line)["peers"])})
            sys.stdin.read()


def _send(message: object) -> None:
    print(MARK + json.dumps(message), flush=True)


def _own_address(interface: str, driver: str) -> tuple[str, str]:
    """Return where the ranks of this host listen, and why that is not known, or empty."""
    try:
        return (interface and address_of_interface(interface)) or address_towards(driver), ""
    except OSError as error:
        return "127.0.0.1", str(error)


def this_machine() -> str:
    """Equal in two processes of one machine, and of one container on it; empty where that is not known."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid"))])
    return ""


def sizes_in(folder: str) -> dict[str, int]:
    """Name and size in bytes of each file of a model's folder that is read of it."""
    files = [file for file in os.scandir(folder) if file.name.endswith(_READ) and file.is_file()]
    return {file.name: file.stat().st_size for file in files}


def checksum_of(path: str) -> str:
    """SHA-256 of a file's bytes; empty where it cannot be read."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return ""


def differing(folder: str, files: Mapping[str, int]) -> list[str]:
    """Files that `folder` lacks, or has in another size."""
    here = sizes_in(folder)
    return [os.path.join(folder, name) for name, size in files.items() if here.get(name) != size]


def unreached(peers: Sequence[tuple[str, str, int]]) -> list[tuple[str, str]]:
    """Return the peers that do not answer from here, each with its address and the reason."""
    if not peers:
        return []
    with ThreadPoolExecutor(len(peers)) as pool:
        reasons = pool.map(lambda peer: _dial(peer[1], peer[2]), peers)
        return [(peer[0], reason) for peer, reason in zip(peers, reasons, strict=True) if reason]


def _dial(address: str, port: int) -> str:
    try:
        socket.create_connection((address, port), timeout=_DIAL_TIMEOUT_S).close()
    except OSError as error:
        return f"{address}:{port}: {error.strerror or error}"
    return ""


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

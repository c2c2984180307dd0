"""Checkpoints on disk: written under a temporary name, fsynced, renamed; found again only when whole.

    RUN/checkpoints/step_000020/manifest.json     what it is, and size and checksum of every file
    RUN/checkpoints/step_000020/actor/…           written by the ranks of a role that learns (each its own RNG)
    RUN/checkpoints/step_000020/driver/state.json data cursor and counters
    RUN/checkpoints/step_000020/driver/ahead_…    samples that were drawn ahead of their step
    (rlctl/loop/sample_queue.py)

The rollout and the data need no state of their own: their randomness is a function of the seed and the sample's
id, so the cursor says it all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl import __version__
from specs.errors import CheckpointError
from specs.safetensors_header import fsync
from specs.schema.spec import Spec
from workers.saved_files import FileMark, mark

FORMAT = 1
ARRIVAL_TIMEOUT_S = 90.0  # a shared file system may show a new name late: NFS keeps a folder's listing for a minute

Marks = Mapping[str, FileMark]  # by path relative to the role's folder


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    path: Path
    step: int
    state: Mapping[str, Any]
    manifest: Mapping[str, Any]


def step_path(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}"


def spec_hash(spec: Spec) -> str:
    return hashlib.sha256(json.dumps(spec.resolved(), sort_keys=True).encode()).hexdigest()


def save(
    root: Path,
    step: int,
    *,
    about: Mapping[str, Any],
    write_roles: Mapping[str, Callable[[Path], Sequence[Marks]]],
    write_driver: Callable[[Path], Mapping[str, Any]],
    keep: int,
) -> Path:
    """Write checkpoint `step` and drop all but the `keep` newest. Any failure leaves the older ones and no debris.

    `write_roles` has, by the folder's name, what makes a role's ranks write into it and returns what each says it
    wrote. What a rank says goes into the manifest: if something else arrives, the checkpoint is torn, and is found so.
    `write_driver` writes the driver's own files and returns its state.
    """
    final, temporary = step_path(root, step), root / f".tmp_step_{step:06d}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        said: dict[str, FileMark] = {}
        for folder, write in write_roles.items():
            (temporary / folder).mkdir(parents=True)
            reports = write(temporary / folder)
            said |= {f"{folder}/{name}": file for marks in reports for name, file in marks.items()}
        (temporary / "driver").mkdir(parents=True)
        _await(temporary, said)
        state = write_driver(temporary / "driver")
        (temporary / "driver" / "state.json").write_text(json.dumps({"step": step, **state}))
        here = sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file())
        files = {name: said.get(name) or mark(temporary / name) for name in here}
        manifest = {"format": FORMAT, "rlctl": __version__, "step": step, "files": files, **about}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        _fsync_tree(temporary)
        if final.exists():  # the same step saved again after a resume
            shutil.rmtree(final)
        os.replace(temporary, final)
        fsync(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in sorted(root.glob("step_*"))[:-keep]:
        shutil.rmtree(old)
    return final


def newest(root: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint; torn ones are skipped with a warning. Leftovers of a killed save are ignored."""
    for path in sorted(root.glob("step_*"), reverse=True):
        try:
            return read(path)
        except CheckpointError as error:
            warn(f"skipped {path.name}: {error.message}")
    return None


def read(path: Path) -> Checkpoint:
    """Open a checkpoint and check every file against its manifest. Raises CheckpointError."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        for name, want in manifest["files"].items():
            file = path / name
            if file.stat().st_size != want["bytes"]:
                raise CheckpointError(f"{name} has {file.stat().st_size} bytes, {want['bytes']} were written")
            if mark(file) != want:
                raise CheckpointError(f"{name} was changed or damaged after it was written")
        state = json.loads((path / "driver" / "state.json").read_text())
        return Checkpoint(path, int(manifest["step"]), state, manifest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"it is torn: {error}") from None


def set_aside_after(root: Path, step: int) -> None:
    """Torn checkpoints after `step` are renamed, so that they neither count as kept nor stand in the way."""
    for path in sorted(root.glob("step_*")):
        if int(path.name.removeprefix("step_")) > step:
            aside = path.with_name(f"torn_{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)
    for path in root.glob(".tmp_step_*"):
        shutil.rmtree(path, ignore_errors=True)


def _await(folder: Path, said: Marks) -> None:
    """Wait until every file of a rank is here with its size. Raises CheckpointError naming one that never comes."""
    deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
    for name, want in said.items():
        while (size := _size(folder / name)) != want["bytes"]:
            if time.monotonic() > deadline:
                seen = "is not here" if size is None else f"has {size} bytes here"
                raise CheckpointError(
                    f"{name}, of which a rank wrote {want['bytes']} bytes, {seen}",
                    hint="the run directory must lie on a file system that all hosts of the run share",
                )
            time.sleep(0.2)
            os.listdir((folder / name).parent)  # has a network file system look again


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _fsync_tree(root: Path) -> None:
    for path in root.rglob("*"):
        fsync(path)
    fsync(root)

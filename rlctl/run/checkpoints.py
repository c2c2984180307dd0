"""Write and find checkpoints: under a temporary name, fsynced, renamed; found again only when whole.

    RUN/checkpoints/step_000020/manifest.json     what it is, and size and checksum of every file
    RUN/checkpoints/step_000020/actor/…           written by the ranks of a role that learns (each its own RNG)
    RUN/checkpoints/step_000020/driver/state.json data cursor and counters
    RUN/checkpoints/step_000020/driver/ahead_…    samples that were drawn ahead of their step
    (rlctl/loop/sample_queue.py)

The rollout and the data need no state of their own: their randomness is a function of the seed and the sample's
id, so the cursor says it all.

A reader pins what it reads, by a shared lock on the state, and a running run removes no pinned checkpoint.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from rlctl import __version__
from specs.errors import CheckpointError, UsageError
from specs.json_file import read_object, read_or_empty
from specs.safetensors_header import fsync
from specs.schema.spec import Spec
from workers.saved_files import FileMark, mark

FORMAT: Final = 1
STATE = "driver/state.json"
MANIFEST = "manifest.json"
START_OVER = "to start over, train with --run-dir or another run.name"
ARRIVAL_TIMEOUT_S = 90.0  # a shared file system may show a new name late: NFS keeps a folder's listing for a minute

Marks = Mapping[str, FileMark]  # by path relative to the role's folder


class Pin:
    """Keep a checkpoint from being removed by the run that wrote it: a shared lock on the driver's state, which
    no proof replaces."""

    def __init__(self, path: Path) -> None:
        self._file: int | None = None
        with suppress(OSError):  # not there, or a file system without locks
            self._file = os.open(path / STATE, os.O_RDONLY)
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    __del__ = release


@dataclass(frozen=True)
class Checkpoint:
    """Hold a whole checkpoint, which is not removed while it is pinned."""

    path: Path
    step: int
    state: Mapping[str, Any]
    manifest: Mapping[str, Any]
    pin: Pin = field(compare=False, repr=False)


class _OtherFormat(CheckpointError):
    pass


class SavedMark(BaseModel):
    model_config = ConfigDict(strict=True)
    bytes: NonNegativeInt
    xxh3: str


class _SavedRole(BaseModel):
    model_config = ConfigDict(strict=True)
    model_path: str = ""  # earlier versions wrote fewer
    python: str = ""
    dtype: str = ""
    planned_optimizer_steps: int = 0


class _Manifest(BaseModel):
    """Hold what readers take as it is; each checks what it needs beyond that."""

    model_config = ConfigDict(strict=True)
    format: Literal[1] = FORMAT
    step: NonNegativeInt
    files: dict[str, SavedMark]
    run: str = ""
    roles: dict[str, _SavedRole] = {}
    lineage: dict[str, list[str]] = {}
    trust_remote_code: bool = False
    versions: dict[str, str] = {}


def step_path(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}"


def steps_in(root: Path) -> list[int]:
    """Return the steps of checkpoints there, whole or not, in order; other names (a copy, a backup) are not ours."""
    names = (re.fullmatch(r"step_(\d{6,})", path.name) for path in root.glob("step_*"))
    return sorted(step for name in names if name and step_path(root, step := int(name[1])).name == name[0])


def run_and_step(text: str, folder: Path = Path()) -> tuple[Path, int | None]:
    """Return what `RUN_DIR` or `RUN_DIR@STEP` names, whether it is there or not. A relative path starts at `folder`."""
    path = Path(os.path.abspath(folder / Path(text).expanduser()))
    at = None if path.exists() else re.fullmatch(r"(.+)@(\d+)", str(path))
    return (Path(at[1]), int(at[2])) if at else (path, None)


def check_has(root: Path, step: int, option: str) -> None:
    """Raise UsageError, with the steps that are there, where this one is not."""
    if step not in (there := steps_in(root)):
        hint = f"it has: {', '.join(map(str, there)) or 'none'}"
        raise UsageError(f"{option}{root.parent} has no checkpoint of step {step}", hint=hint)


def spec_hash(spec: Spec) -> str:
    return hashlib.sha256(json.dumps(spec.resolved(), sort_keys=True).encode()).hexdigest()


def save(
    root: Path,
    step: int,
    *,
    about: Mapping[str, Any],
    write_roles: Mapping[str, Callable[[Path], Sequence[Marks]]],
    write_driver: Callable[[Path], Mapping[str, Any]],
) -> Path:
    """Write checkpoint `step`. Any failure leaves the older ones and no debris.

    `write_roles`: by the folder's name, what makes a role's ranks write into it and returns what each reports that it
    wrote. Reports go into the manifest: if something else arrives, the checkpoint is torn, and is found so.
    `write_driver` writes the driver's own files and returns its state.
    """
    final, temporary = step_path(root, step), root / f".tmp_step_{step:06d}"
    _remove(temporary)
    try:
        temporary.mkdir()  # not its parents: a run directory that was moved is not made again
        reported: dict[str, FileMark] = {}
        for folder, write in write_roles.items():
            (temporary / folder).mkdir()
            reports = write(temporary / folder)
            reported |= {f"{folder}/{name}": file for marks in reports for name, file in marks.items()}
        (temporary / "driver").mkdir()
        _await(temporary, reported)
        state = write_driver(temporary / "driver")
        (temporary / STATE).write_text(json.dumps({"step": step, **state}))
        here = sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file())
        files = {name: reported.get(name) or mark(temporary / name) for name in here}
        manifest = {"format": FORMAT, "rlctl": __version__, "step": step, "files": files, **about}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        _settle(temporary)
        _remove(final)  # the same step saved again after a resume
        os.replace(temporary, final)
        fsync(root)
    except BaseException:
        _remove(temporary)
        raise
    return final


def prune(root: Path, keep: int) -> None:
    """Drop all but the `keep` newest checkpoints, the newest with a proof, and those that are pinned."""
    saved = manifests(root)
    proven = [step for step, manifest in saved.items() if manifest.get("proven")]
    for old in [*saved][:-keep]:
        if old not in proven[-1:] and not _is_pinned(step_path(root, old)):
            _remove(step_path(root, old))


def manifests(root: Path) -> dict[int, dict[str, Any]]:
    """Return what each saved step says of itself, the oldest first; {} of one that cannot be read."""
    return {step: read_or_empty(step_path(root, step) / MANIFEST) for step in steps_in(root)}


def add_files(path: Path, written: Marks, about: Mapping[str, Any]) -> None:
    """Add files that came to a checkpoint after it was whole, and what they say, to its manifest."""
    _await(path, written)
    manifest = read_object(path / MANIFEST)
    partial = path / f"{MANIFEST}.partial"
    partial.write_text(json.dumps({**manifest, **about, "files": {**manifest["files"], **written}}, indent=2) + "\n")
    for file in (partial, *(path / name for name in written)):
        fsync(file)
    os.replace(partial, path / MANIFEST)
    fsync(path)


def newest(root: Path, warn: Callable[[str], None], folders: Sequence[str] = ()) -> Checkpoint | None:
    """Open the newest whole checkpoint that has these folders; damaged ones are skipped with a warning. None: there is
    none at all. Leftovers of a killed save are ignored. Raises CheckpointError where every one is damaged, with what
    is wrong with each, and where another version wrote one that an older one would take the place of."""
    damaged, what = list[str](), f"every checkpoint in {root} is damaged"
    for step in reversed(steps_in(root)):
        path = step_path(root, step)
        try:
            found = _read(path, folders)
        except CheckpointError as error:
            damaged.append(f"{path.name}: {error.message}")
            if not isinstance(error, _OtherFormat):
                continue
            what = f"the newest checkpoint in {root} was written by another version of rlctl"
            break
        for line in damaged:
            warn(f"skipped {line}")
        return found
    if damaged:
        hint = f"put one of them back from a copy, or use the rlctl that wrote them; {START_OVER}"
        raise CheckpointError("\n  - ".join([f"{what}:", *damaged]), hint=hint)
    return None


def read(path: Path, folders: Sequence[str] = ()) -> Checkpoint:
    """Open a checkpoint that must have these folders, pin it, and check every file against its manifest. Raises
    CheckpointError."""
    try:
        return _read(path, folders)
    except CheckpointError as error:
        hint = "put it back from a copy, use the rlctl that wrote it, or name another step"
        raise CheckpointError(f"{path}: {error.message}", hint=hint) from None


def _read(path: Path, folders: Sequence[str]) -> Checkpoint:
    pin = Pin(path)
    try:
        content = read_object(path / MANIFEST)
        manifest = _Manifest.model_validate(content)
    except ValidationError as error:
        key, writer = ".".join(map(str, error.errors()[0]["loc"])), content.get("rlctl", "an older version")
        known = f"of rlctl {writer}, has another {key} than rlctl {__version__} reads"
        raise (_OtherFormat if key == "format" else CheckpointError)(f"its manifest.json, {known}") from None
    except ValueError as error:
        raise CheckpointError(f"its manifest.json {error}") from None
    if step_path(path.parent, manifest.step) != path:
        raise CheckpointError(f"its manifest.json is of step {manifest.step}")
    for folder in (STATE, *(f"{folder}/" for folder in folders)):
        if not any(name.startswith(folder) for name in manifest.files):
            raise CheckpointError(f"its manifest.json lists no {folder}")
    for name, expected in manifest.files.items():
        _check_file(path, name, expected)
    try:
        state = read_object(path / STATE)
    except ValueError as error:
        raise CheckpointError(f"{STATE} {error}") from None
    return Checkpoint(path, manifest.step, state, {**manifest.model_dump(), **content}, pin)


def _check_file(folder: Path, name: str, expected: SavedMark) -> None:
    file = folder / name
    try:
        size = file.stat().st_size
        if size != expected.bytes:
            raise CheckpointError(f"{name} has {size} bytes, {expected.bytes} were written")
        if mark(file) != expected.model_dump():
            raise CheckpointError(f"{name} was changed or damaged after it was written")
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from None


def _is_pinned(path: Path) -> bool:
    try:
        with open(path / STATE, "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def set_aside_after(root: Path, step: int) -> None:
    """Rename damaged checkpoints after `step`, so that they neither count as kept nor stand in the way."""
    for later in (each for each in steps_in(root) if each > step):
        path = step_path(root, later)
        aside = path.with_name(f"torn_{path.name}")
        _remove(aside)
        os.replace(path, aside)
    for path in root.glob(".tmp_step_*"):
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a folder with all that is in it, or whatever else has this name. What cannot be removed stays."""
    if path.is_symlink() or not path.is_dir():
        with suppress(OSError):
            path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _await(folder: Path, reported: Marks) -> None:
    """Wait until every file of a rank is here with its size. Raises CheckpointError naming one that never comes."""
    deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
    for name, want in reported.items():
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


def _settle(folder: Path) -> None:
    """Write all files through to the disk, as readable as the manifest: some libraries write for the owner alone."""
    mode = (folder / MANIFEST).stat().st_mode
    for path in folder.rglob("*"):
        if path.is_file():
            with suppress(OSError):  # of another host's user
                path.chmod(mode)
        fsync(path)
    fsync(folder)

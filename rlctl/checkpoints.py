"""Checkpoints on disk: written under a temporary name, fsynced, renamed; found again only when whole.

    RUN/checkpoints/step_000020/manifest.json     what it is, and size and checksum of every file
    RUN/checkpoints/step_000020/actor/…           written by the actor's ranks (each its own RNG)
    RUN/checkpoints/step_000020/driver/state.json data cursor and counters

The rollout and the data need no state of their own: their randomness is a function of the seed and the sample's
id, so the cursor says it all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from rlctl import __version__
from specs.errors import CheckpointError
from specs.schema import Spec

FORMAT = 1


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
    state: Mapping[str, Any],
    about: Mapping[str, Any],
    write_actor: Callable[[Path], None],
    keep: int,
) -> Path:
    """Write checkpoint `step` and drop all but the `keep` newest. Any failure leaves the older ones and no debris."""
    final, temporary = step_path(root, step), root / f".tmp_step_{step:06d}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        for folder in ("actor", "driver"):
            (temporary / folder).mkdir(parents=True)
        write_actor(temporary / "actor")
        (temporary / "driver" / "state.json").write_text(json.dumps({"step": step, **state}))
        files = {
            str(path.relative_to(temporary)): {"bytes": path.stat().st_size, "xxh3": _digest(path)}
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        manifest = {"format": FORMAT, "rlctl": __version__, "step": step, "files": files, **about}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        _fsync_tree(temporary)
        if final.exists():  # the same step saved again after a resume
            shutil.rmtree(final)
        os.replace(temporary, final)
        _fsync(root)
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
            if _digest(file) != want["xxh3"]:
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


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_tree(root: Path) -> None:
    for path in root.rglob("*"):
        _fsync(path)
    _fsync(root)

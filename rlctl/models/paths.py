"""Resolves a model's path (built-in, folder or hub id) and reads its small files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import specs
from rlctl.models.hub import Folder, HubFile, HubFolder, hub_snapshot, look_up, offline
from rlctl.models.weight_files import AGAIN, LFS, LFS_HINT
from specs.errors import NotHere, Problem
from specs.text import show

BUILTIN_FOLDER = Path(specs.__file__).parent / "builtin"
# First parts of a relative path that nobody means as an organisation on the hub.
FOLDER_WORDS = {
    *("model", "models", "checkpoint", "checkpoints", "ckpt", "ckpts", "export", "exports", "output", "outputs"),
    *("run", "runs", "data", "weights", "tmp"),
}


def builtin_models() -> list[str]:
    return sorted(folder.name for folder in BUILTIN_FOLDER.iterdir() if (folder / "config.json").is_file())


def resolve_model(path: str, spec_dir: Path) -> Path | str:
    """A folder as an absolute Path, or a hub id as str.

    `builtin:NAME` is a folder of this package. Anything else is a folder relative to `spec_dir` when there is one, a
    hub id when it looks like one (`name` or `organisation/name`), and else a folder, existing or not.
    """
    if path.startswith("builtin:"):
        return BUILTIN_FOLDER / path.removeprefix("builtin:")
    folder = Path(os.path.abspath(spec_dir / Path(path).expanduser()))
    if folder.exists() or folder.is_symlink() or not looks_like_hub_id(path, spec_dir):
        return folder
    return path


def looks_like_hub_id(path: str, spec_dir: Path) -> bool:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", path):
        return False
    first = path.split("/")[0]
    return "/" not in path or not (first.lower() in FOLDER_WORDS or (spec_dir / first).is_dir())


def not_found(key: str, message: str, path: str, value: str = "", hint: str = "") -> Problem:
    """The problem of a file or folder that a spec names, and that is not here. One that is named by its whole path may
    be on the machines of the run."""
    if not Path(path).expanduser().is_absolute():
        return Problem(key, message, hint or "a relative path starts at the spec file's folder", value or show(path))
    other = "check the path; `--target cluster` checks a spec for other machines"
    return NotHere(key, message, hint or other, value or show(path))


def model_folder(path: str, spec_dir: Path) -> Folder | None:
    """Where a model's small files can be read: its folder, the hub's cache, or the hub. None: nowhere."""
    where = resolve_model(path, spec_dir)
    if isinstance(where, Path):
        return where
    if (snapshot := hub_snapshot(where)) is not None and (snapshot / "config.json").is_file():
        return snapshot
    found = None if offline() else look_up(where)
    return found if isinstance(found, HubFolder) else None


def config_of(path: str, spec_dir: Path) -> dict[str, Any]:
    """A model's parsed `config.json`; empty where it cannot be read, which others report."""
    folder = model_folder(path, spec_dir)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def read_object(file: Path | HubFile, wrong: Callable[[str, str], None]) -> dict[str, Any] | None:
    """A file with one JSON object. None where there is none: `wrong` has been told what is wrong, and a hint."""
    hint = AGAIN if isinstance(file, Path) else "the file on the hub is broken: use another model, or tell its owner"
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if text.startswith(LFS):
            wrong(f"{file.name} is a pointer of Git LFS, not the file itself", LFS_HINT)
        else:
            wrong(f"{file.name} cannot be read: not JSON (line {error.lineno}, column {error.colno})", hint)
        return None
    except (OSError, ValueError, RecursionError) as error:
        words = error.strerror if isinstance(error, OSError) and error.strerror else "not JSON in UTF-8"
        wrong(f"{file.name} cannot be read: {words}", hint)
        return None
    if not isinstance(content, dict):
        wrong(f"{file.name} is not a JSON object", hint)
        return None
    return content

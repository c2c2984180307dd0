"""Resolve a model's path: built-in, folder or hub id."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import specs
from rlctl.models.hub import HubModel, hub_model
from rlctl.models.run_export import NOTE, RunExport
from specs.errors import NotHere, Problem
from specs.json_file import read_object, read_or_empty
from specs.model_facts import merged_config
from specs.text import show

BUILTIN_FOLDER = Path(specs.__file__).parent / "builtin"
# First parts of a relative path that nobody means as an organisation on the hub.
FOLDER_WORDS = {
    *("model", "models", "checkpoint", "checkpoints", "ckpt", "ckpts", "export", "exports", "output", "outputs"),
    *("run", "runs", "data", "weights", "tmp"),
}
# Keys of a `config.json` that rlctl computes with: lists, numbers that may be 0 or absent, and sizes with bounds that
# no model reaches.
_LISTS = (
    *("architectures", "layer_types", "layers_block_type"),
    *("full_attn_idxs", "attn_layer_indices", "mlp_only_layers"),
)
_NUMBERS = (
    *("head_dim", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("decoder_sparse_step", "full_attention_interval", "sliding_window_pattern", "max_window_layers"),
)
_SIZES = {"hidden_size": 1 << 20, "num_hidden_layers": 10_000, "num_attention_heads": 1 << 16, "vocab_size": 1 << 31}


def builtin_models() -> list[str]:
    return sorted(folder.name for folder in BUILTIN_FOLDER.iterdir() if (folder / "config.json").is_file())


def resolve_model(path: str, spec_dir: Path) -> Path | str:
    """Return a folder as an absolute Path, or a hub id as str.

    `builtin:NAME` is a folder of this package. Anything else is a folder relative to `spec_dir` when there is one, a
    hub id when it looks like one (`name` or `organisation/name`), and else a folder, existing or not. For a run's
    export that is still to be made, the model that the run began with stands in.
    """
    if path.startswith("builtin:"):
        return BUILTIN_FOLDER / path.removeprefix("builtin:")
    folder = Path(os.path.abspath(spec_dir / Path(path).expanduser()))
    if not folder.exists() and (export := RunExport.of(folder)) and export.base:
        return resolve_model(export.base, spec_dir)
    if folder.exists() or folder.is_symlink() or not looks_like_hub_id(path, spec_dir):
        return folder
    return path


def looks_like_hub_id(path: str, spec_dir: Path) -> bool:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", path):
        return False
    first = path.split("/")[0]
    return "/" not in path or not (first.lower() in FOLDER_WORDS or (spec_dir / first).is_dir())


def not_found(key: str, what: str, file: Path, path: str, hint: str = "") -> Problem:
    """Return the problem of a file or folder, `file`, that is not here. One that the spec names by its absolute path,
    `path`, may be on the machines of the run."""
    message = f"no such {what} ({os.path.abspath(file)})"
    if found := re.fullmatch(r"([A-Za-z0-9][\w.-]*/[\w.-]+)@(?!\d+$)([\w./-]+)", path):  # a step is a run's
        kind = " --repo-type dataset" if what == "file" else ""
        hint = f"hub ids take no revision: `hf download {found[1]} --revision {found[2]}{kind} --local-dir DIR`"
        hint += ", and name what it writes"
    if file.is_symlink():
        return Problem(key, f"a symbolic link to {os.readlink(file)}, which does not exist ({file})", "repair the link")
    if not Path(path).expanduser().is_absolute():
        return Problem(key, message, hint or "a relative path starts at the spec file's folder")
    return NotHere(key, message, hint or "check the path; `--target cluster` checks a spec for other machines")


def model_folder(path: str, spec_dir: Path) -> Path | None:
    """Return where a model's small files can be read: its folder, or a folder with those of the hub. None: nowhere."""
    where = resolve_model(path, spec_dir)
    if isinstance(where, Path):
        return where
    found = hub_model(where, weights=False)
    return found.folder if isinstance(found, HubModel) else None


def config_of(path: str, spec_dir: Path) -> dict[str, Any]:
    """Return a model's parsed `config.json`; empty where it cannot be read, which `ModelCheck` reports."""
    folder = model_folder(path, spec_dir)
    with suppress(ValueError):
        return read_config(folder) if folder else {}
    return {}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the `config.json` of a model folder. Raises ValueError with a predicate."""
    config = read_object(folder / "config.json")
    merged = merged_config(config)
    if not isinstance(merged.get("model_type"), str):
        raise ValueError("has no model_type, as that of a Hugging Face model has")
    wrong = {name: "a list belongs" for name in _LISTS if not isinstance(merged.get(name) or [], list)}
    wrong |= {name: "a number belongs" for name in _NUMBERS if isinstance(merged.get(name), str | Mapping)}
    for name, most in _SIZES.items():
        if (size := merged.get(name)) is not None and (type(size) is not int or not 0 < size <= most):
            wrong[name] = f"a whole number from 1 to {most:,} belongs"
    if wrong:
        name, what = next(iter(wrong.items()))
        raise ValueError(f"has {name} = {show(merged[name])}, where {what}")
    return config


def public_name(path: str) -> str:
    """Name a model or data set as everybody knows it: a hub id, `builtin:NAME`; "" for files of this machine."""
    if Path(path).is_relative_to(BUILTIN_FOLDER):
        return f"builtin:{Path(path).name}"
    if path.startswith("builtin:"):
        return path
    local = not path or path.startswith((".", "~", "/")) or Path(path).suffix in (".jsonl", ".json", ".parquet", ".csv")
    return "" if local or path.count("/") > 1 or Path(path).exists() else path


def lineage(path: str) -> list[str]:
    """Return where the weights at a resolved path come from, newest first: runs, and the model that the first of them
    began with. No name is a path of this machine."""
    note = read_or_empty(Path(path) / NOTE)
    if not isinstance(before := note.get("made_from"), list):
        return [public_name(path) or Path(path).name]
    return [f"{note.get('run')}, step {note.get('step')} ({note.get('recipe')})", *map(str, before)]

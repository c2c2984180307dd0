"""Random generator states of one process, on disk."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specs.errors import CheckpointError


def write_rng(folder: Path, rank: int) -> Path:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    save_file(states, _path(folder, rank))
    return _path(folder, rank)


def read_rng(folder: Path, rank: int) -> None:
    """Restore this process's generators; a rank that was not there when the state was saved keeps its own."""
    path = _path(folder, rank)
    if not path.exists():
        return
    try:
        states = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rng.rank{rank}.safetensors"

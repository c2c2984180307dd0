"""Random generator states of one process, on disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specs.errors import CheckpointError

NO_STATES: Mapping[str, Tensor] = MappingProxyType({})
_OF_SEQUENCES = "sequences."


def write_rng(folder: Path, rank: int, of_sequences: Mapping[str, Tensor] = NO_STATES) -> Path:
    """This process's generators, and those of its sequence group where it has one."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    states |= {f"{_OF_SEQUENCES}{name}": state for name, state in of_sequences.items()}
    save_file(states, _path(folder, rank))
    return _path(folder, rank)


def read_rng(folder: Path, rank: int) -> dict[str, Tensor]:
    """Restore this process's generators; a rank that was not there when the state was saved keeps its own. Returns
    those of its sequence group; nothing where it had none."""
    path = _path(folder, rank)
    if not path.exists():
        return {}
    try:
        states = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    return {name.removeprefix(_OF_SEQUENCES): state for name, state in states.items() if name.startswith(_OF_SEQUENCES)}


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rng.rank{rank}.safetensors"

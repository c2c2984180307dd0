"""A trainer's state on disk.

model.safetensors       every weight by its Hugging Face name, fp32 master where there is one
optimizer.safetensors   `<name>.exp_avg` and `<name>.exp_avg_sq`
trainer.json            optimizer steps made, steps skipped
rng.rank<r>.safetensors generator states of one process
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specs.errors import CheckpointError


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def read_into(path: Path, targets: Mapping[str, Tensor]) -> None:
    """Copy a file's tensors into `targets`. Raises CheckpointError unless names, shapes and dtypes are the same."""
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    wrong = sorted(found.keys() ^ targets.keys())
    if wrong:
        raise CheckpointError(f"{path} is of another model: {wrong[0]} is only on one side ({len(wrong)} such names)")
    for name, target in targets.items():
        have, want = (found[name].shape, found[name].dtype), (target.shape, target.dtype)
        if have != want:
            raise CheckpointError(f"{path} is of another model: {name} is {have}, expected {want}")
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(found[name])


def write_rng(path: Path) -> None:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    write_tensors(path, states)


def read_rng(path: Path) -> None:
    """Restore this process's generators; a rank that was not there when the state was saved keeps its own."""
    if not path.exists():
        return
    try:
        states = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}") from None
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])

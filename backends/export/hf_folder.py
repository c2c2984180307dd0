"""A Hugging Face folder's weight files: written and read one tensor at a time, whatever the model's size."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from transformers import PreTrainedModel

from backends.weights.tensor_files import LazyTensor, TensorFile, write_file
from specs.errors import ExportError

INDEX = "model.safetensors.index.json"

OnBytes = Callable[[int], None]  # called with the bytes of each finished tensor


def write_folder(out: Path, tensors: Sequence[LazyTensor], shard_bytes: int, on_bytes: OnBytes) -> None:
    """Files of at most `shard_bytes` each (a larger tensor has one of its own), and the index that names them where
    there are several. Holds one tensor at a time."""
    by_name = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        write_file(out / file, [by_name[name] for name in names], {"format": "pt"}, on_bytes)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def file_dtype(model: PreTrainedModel, name: str, own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The precision of a weight in files of `dtype`; of some, that choose experts, transformers reads fp32."""
    if not own.is_floating_point:
        return own
    return torch.float32 if any(part in name for part in model._keep_in_fp32_modules_strict or ()) else dtype


def files_of_tensors(folder: Path) -> dict[str, TensorFile]:
    """Return the file in which each tensor of an exported folder lies. Raises ExportError where files and index
    disagree."""
    index = folder / INDEX
    listed = json.loads(index.read_text())["weight_map"] if index.is_file() else None
    found: dict[str, TensorFile] = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = _open(path)
        for name in file.header.entries:
            if name in found or (listed is not None and listed.get(name) != path.name):
                raise ExportError(f"{name} lies in {path.name}, where the exported folder's index does not say so")
            found[name] = file
    lost = sorted(set(listed or ()) - set(found))
    if lost:
        raise ExportError(f"the exported folder's index names {lost[0]}, which no file holds")
    return found


def _open(path: Path) -> TensorFile:
    try:
        return TensorFile(path)
    except ValueError as error:
        raise ExportError(f"{path.name} {error}") from None

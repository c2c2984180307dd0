"""A Hugging Face folder's weight files: written and read one tensor at a time, whatever the model's size."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from backends.weights.tensor_files import DTYPES, LazyTensor, TensorFile, write_file
from specs.errors import ExportError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

OnBytes = Callable[[int], None]  # called with the bytes of each finished tensor


def write_folder(out: Path, tensors: Sequence[LazyTensor], shard_bytes: int, on_bytes: OnBytes) -> None:
    """Files of at most `shard_bytes` each (a larger tensor has one of its own), and the index that names them where
    there are several. Holds one tensor at a time."""
    shards = _split(tensors, shard_bytes)
    if len(shards) == 1:
        write_file(out / SINGLE, shards[0], {"format": "pt"}, on_bytes)
        return
    place: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(out / name, shard, {"format": "pt"}, on_bytes)
        place |= {tensor.name: name for tensor in shard}
    total = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def file_dtype(model: PreTrainedModel, name: str, own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The precision of a weight in files of `dtype`; of some, that choose experts, transformers reads fp32."""
    if not own.is_floating_point:
        return own
    return torch.float32 if any(part in name for part in model._keep_in_fp32_modules_strict or ()) else dtype


def _split(tensors: Sequence[LazyTensor], shard_bytes: int) -> list[list[LazyTensor]]:
    shards: list[list[LazyTensor]] = [[]]
    free = shard_bytes
    for tensor in tensors:
        if shards[-1] and tensor.nbytes > free:
            shards.append([])
            free = shard_bytes
        shards[-1].append(tensor)
        free -= tensor.nbytes
    return shards


class SafetensorsReader:
    """The tensors that lie in an exported folder, by name. Raises ExportError where files and index disagree."""

    def __init__(self, folder: Path) -> None:
        index = folder / INDEX
        listed = json.loads(index.read_text())["weight_map"] if index.is_file() else None
        self._files: dict[str, TensorFile] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = _open(path)
            for name in file.header.entries:
                if name in self._files or (listed is not None and listed.get(name) != path.name):
                    raise ExportError(f"{name} lies in {path.name}, where the exported folder's index does not say so")
                self._files[name] = file
        lost = sorted(set(listed or ()) - set(self._files))
        if lost:
            raise ExportError(f"the exported folder's index names {lost[0]}, which no file holds")

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._files[name].entry(name).dtype]

    def tensor(self, name: str) -> Tensor:
        return self._files[name].tensor(name)


def _open(path: Path) -> TensorFile:
    try:
        return TensorFile(path)
    except ValueError as error:
        raise ExportError(f"{path.name} {error}") from None

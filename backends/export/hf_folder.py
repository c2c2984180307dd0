"""A Hugging Face folder's weight files: written and read one tensor at a time, whatever the model's size. A language
model of a folder that holds more goes back into the folder as it came, with trained weights in place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from huggingface_hub import snapshot_download, split_state_dict_into_shards_factory
from transformers import PreTrainedModel

from backends.weights.tensor_files import LazyTensor, TensorFile, write_file
from specs.errors import ExportError
from specs.model_shapes import language_model_names

INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", INDEX)

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


# ── a folder that holds more than a language model ────────────────────────────────────────────────


def folder_of(model_path: str) -> Path:
    """Return where the files of a model folder or hub id are; those of the hub are downloaded where they are not."""
    return Path(model_path) if Path(model_path).is_dir() else Path(snapshot_download(model_path))


def copy_rest(folder: Path, out: Path) -> None:
    """Copy all files that hold no weights."""
    for file in folder.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHTS):
            shutil.copyfile(file, out / file.name)


def in_place(published: Sequence[LazyTensor], folder: Path) -> list[LazyTensor]:
    """Return all weights of the folder in its names: the trained ones of the language model, and the others as they
    are. Raises ExportError for a trained weight that has no place."""
    files, trained = files_of_tensors(folder), {tensor.name: tensor for tensor in published}
    own = language_model_names(files)
    if lost := sorted(trained.keys() - set(own.values())):
        raise ExportError(f"{folder} has no place for {lost[0]}", hint="was the model folder changed since the run?")

    def lazy(name: str) -> LazyTensor:
        if own.get(name) in trained:
            new = trained[own[name]]
            return LazyTensor(name, new.shape, new.dtype, new.load)
        file = files[name]
        return LazyTensor(name, file.entry(name).shape, file.dtype(name), lambda: file.tensor(name))

    return [lazy(name) for name in sorted(files)]

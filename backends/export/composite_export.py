"""Exports the language model of a folder that holds more: the folder as it came, with trained weights in place."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download

from backends.export.hf_folder import INDEX, files_of_tensors
from backends.weights.tensor_files import LazyTensor
from specs.errors import ExportError
from specs.model_shapes import language_model_names

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", INDEX)


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

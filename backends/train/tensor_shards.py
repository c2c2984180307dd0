"""Tensors on disk that any number of ranks, of any engine, can write and read.

Each rank writes the parts it owns to `<stem>-<rank>-of-<ranks>.safetensors`. A part is a run of elements of the
flattened tensor (row-major), stored as one row under the key `<name>@<first element>`; the header holds every tensor's
whole shape. FSDP's rows, ZeRO's slices of a flat buffer and whole tensors are all such runs, so a checkpoint is written
without a gather, and a reader takes just the elements it needs, whoever wrote them.

(PyTorch's own distributed checkpoint keeps its index as a pickle, which rlctl neither writes nor reads.)
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from backends.weights.tensor_files import LazyTensor, TensorFile, write_file
from specs.errors import CheckpointError

_SHAPES = "rlctl_shapes"

TensorKind = tuple[tuple[int, ...], torch.dtype]  # shape and dtype, of the whole tensor


@dataclass(frozen=True)
class Shard:
    """Elements `start`, `start + 1`, … of a tensor called `name`, as a one-dimensional *view* of the engine's memory:
    saving reads it, loading writes it. `owned`: this rank is the one that saves them (every reader may load them)."""

    name: str
    shape: tuple[int, ...]
    start: int
    flat: Tensor
    owned: bool = True


def whole(name: str, tensor: Tensor, *, owned: bool = True) -> Shard:
    """A tensor that this rank holds entirely. It must be contiguous."""
    return Shard(name, tuple(tensor.shape), 0, tensor.detach().view(-1), owned)


def write_shards(folder: Path, stem: str, rank: int, ranks: int, shards: Iterable[Shard]) -> Path:
    """Write this rank's file and return its path. Every rank calls it, also one that owns nothing. A part is copied to
    the host only where it is not there yet, one at a time."""
    parts, shapes = [], {}
    for shard in shards:
        assert shard.start + shard.flat.numel() <= max(1, math.prod(shard.shape)), f"{shard.name}: more than all of it"
        if shard.owned and (shard.flat.numel() or not math.prod(shard.shape)):  # an empty tensor has a part, too
            key = f"{shard.name}@{shard.start}"
            parts.append(LazyTensor(key, (shard.flat.numel(),), shard.flat.dtype, shard.flat.detach))
            shapes[shard.name] = list(shard.shape)
    path = _path(folder, stem, rank, ranks)
    write_file(path, parts, {"format": "pt", _SHAPES: json.dumps(shapes)})
    return path


@dataclass(frozen=True)
class _Run:
    start: int
    stop: int
    file: TensorFile
    key: str


class ShardReader:
    """Reads what `write_shards` of all ranks wrote under one stem. Raises CheckpointError."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.folder, self.stem = folder, stem
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._runs: dict[str, list[_Run]] = {}
        for path in self._files():
            self._index(path)
        for name, runs in self._runs.items():
            runs.sort(key=lambda run: (run.start, run.stop))
            ends = [0, *(run.stop for run in runs)]
            size = math.prod(self.shapes[name])
            if [run.start for run in runs] != ends[:-1] or ends[-1] != size:
                raise CheckpointError(f"{folder}: the parts of {name} do not make up its {size} elements")

    def read_into(self, target: Tensor, name: str, start: int = 0) -> None:
        """Fill `target` (one-dimensional, of the tensor's dtype) with elements from `start` of the flattened tensor.
        Nothing but these elements is read; at most 64 MiB are held besides, and none where `target` is host memory."""
        runs, stop = self._runs[name], start + len(target)
        for run in runs[max(0, bisect_right(runs, start, key=lambda run: run.start) - 1) :]:
            if run.start >= stop:
                break
            first, last = max(start, run.start), min(stop, run.stop)
            if first < last:
                with _as_checkpoint_errors(run.file.path):
                    run.file.read_into(target[first - start : last - start], run.key, first - run.start)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements start … stop-1 of the flattened tensor, in memory of their own."""
        flat = torch.empty(stop - start, dtype=self.dtypes[name])
        self.read_into(flat, name, start)
        return flat

    def tensor(self, name: str) -> Tensor:
        shape = self.shapes[name]
        return self.read(name, 0, math.prod(shape)).view(shape)

    @torch.no_grad()
    def load(self, shards: Iterable[Shard], expected: Mapping[str, TensorKind]) -> None:
        """Fill the shards' memory. Before anything is written, the checkpoint must hold exactly the `expected` names,
        with their shapes and dtypes."""
        wrong = sorted(self.shapes.keys() ^ expected.keys())
        if wrong:
            where = "the checkpoint" if wrong[0] in self.shapes else "this run's model"
            raise CheckpointError(
                f"{self.folder} belongs to another model: only {where} has {wrong[0]} ({len(wrong)} such names)"
            )
        for name, (shape, dtype) in expected.items():
            have, want = (self.shapes[name], self.dtypes[name]), (tuple(shape), dtype)
            if have != want:
                raise CheckpointError(f"{self.folder} belongs to another model: {name} is {have}, expected {want}")
        for shard in shards:
            self.read_into(shard.flat, shard.name, shard.start)

    def _files(self) -> list[Path]:
        found = sorted(self.folder.glob(f"{self.stem}-*-of-*.safetensors"))
        if not found:
            raise CheckpointError(f"{self.folder} has no {self.stem}-*.safetensors")
        count = int(found[0].stem.rpartition("-")[2])
        wanted = [_path(self.folder, self.stem, rank, count) for rank in range(count)]
        if found != wanted:
            odd = sorted(set(found) ^ set(wanted))[0]
            message = f"{self.folder}: the files of {self.stem} are not those of {count} ranks, see {odd.name}"
            raise CheckpointError(message)
        return found

    def _index(self, path: Path) -> None:
        with _as_checkpoint_errors(path):
            file = TensorFile(path)
            shapes = json.loads(file.header.metadata[_SHAPES])
            for key, entry in file.header.entries.items():
                name, _, start = key.rpartition("@")
                (count,) = entry.shape
                kind = tuple(shapes[name]), file.dtype(key)
                if kind != (self.shapes.setdefault(name, kind[0]), self.dtypes.setdefault(name, kind[1])):
                    raise ValueError(f"has {name} as {kind}, another rank has it otherwise")
                self._runs.setdefault(name, []).append(_Run(int(start), int(start) + count, file, key))


@contextmanager
def _as_checkpoint_errors(path: Path) -> Iterator[None]:
    """Turns errors of reading a file into CheckpointError with its path."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint file: {error!r}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def _path(folder: Path, stem: str, rank: int, ranks: int) -> Path:
    return folder / f"{stem}-{rank:05d}-of-{ranks:05d}.safetensors"

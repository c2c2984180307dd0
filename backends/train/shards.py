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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specs.errors import CheckpointError

_SHAPES = "rlctl_shapes"


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


def write_shards(folder: Path, stem: str, rank: int, ranks: int, shards: Iterable[Shard]) -> None:
    """Write this rank's file. Every rank calls it, also one that owns nothing."""
    tensors, shapes = {}, {}
    for shard in shards:
        if shard.owned and shard.flat.numel():
            tensors[f"{shard.name}@{shard.start}"] = shard.flat.detach().cpu().contiguous()
            shapes[shard.name] = list(shard.shape)
    save_file(tensors, _path(folder, stem, rank, ranks), {"format": "pt", _SHAPES: json.dumps(shapes)})


@dataclass(frozen=True)
class _Run:
    start: int
    stop: int
    file: Any  # an open safetensors file
    key: str


class ShardReader:
    """What `write_shards` of all ranks left under one stem. Reads only what is asked for. Raises CheckpointError."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.folder, self.stem = folder, stem
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._runs: dict[str, list[_Run]] = {}
        for path in self._files():
            self._index(path)
        for name, runs in self._runs.items():
            runs.sort(key=lambda run: run.start)
            ends = [0, *(run.stop for run in runs)]
            size = math.prod(self.shapes[name])
            if [run.start for run in runs] != ends[:-1] or ends[-1] != size:
                raise CheckpointError(f"{folder}: the parts of {name} do not make up its {size} elements")

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements start … stop-1 of the flattened tensor; at most one copy of them."""
        runs = self._runs[name]
        first = max(0, bisect_right(runs, start, key=lambda run: run.start) - 1)
        parts = []
        for run in runs[first:]:
            if run.start >= stop:
                break
            a, b = max(start, run.start) - run.start, min(stop, run.stop) - run.start
            if a < b:
                parts.append(run.file.get_slice(run.key)[a:b])
        if not parts:
            return torch.empty(0, dtype=self.dtypes[name])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def tensor(self, name: str) -> Tensor:
        shape = self.shapes[name]
        return self.read(name, 0, math.prod(shape)).view(shape)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, whole, one at a time."""
        return ((name, self.tensor(name)) for name in self.shapes)

    @torch.no_grad()
    def load(self, shards: Iterable[Shard], expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Fill the shards' memory. Before anything is written, the checkpoint must hold exactly the `expected` names,
        with their shapes and dtypes."""
        wrong = sorted(self.shapes.keys() ^ expected.keys())
        if wrong:
            where = "the checkpoint" if wrong[0] in self.shapes else "this run's model"
            raise CheckpointError(
                f"{self.folder} is of another model: only {where} has {wrong[0]} ({len(wrong)} such names)"
            )
        for name, (shape, dtype) in expected.items():
            have, want = (self.shapes[name], self.dtypes[name]), (tuple(shape), dtype)
            if have != want:
                raise CheckpointError(f"{self.folder} is of another model: {name} is {have}, expected {want}")
        for shard in shards:
            shard.flat.copy_(self.read(shard.name, shard.start, shard.start + shard.flat.numel()))

    def _files(self) -> list[Path]:
        found = sorted(self.folder.glob(f"{self.stem}-*-of-*.safetensors"))
        if not found:
            raise CheckpointError(f"{self.folder} has no {self.stem}-*.safetensors")
        ranks = int(found[0].stem.rpartition("-")[2])
        wanted = [_path(self.folder, self.stem, rank, ranks) for rank in range(ranks)]
        if found != wanted:
            odd = sorted(set(found) ^ set(wanted))[0]
            raise CheckpointError(f"{self.folder}: the files of {self.stem} do not belong together, see {odd.name}")
        return found

    def _index(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt")
            shapes = json.loads(file.metadata()[_SHAPES])
            for key in file.keys():  # noqa: SIM118  not a mapping
                name, _, start = key.rpartition("@")
                part = file.get_slice(key)
                first, count = int(start), int(part.get_shape()[0])
                self.shapes[name] = tuple(shapes[name])
                self.dtypes[name] = _DTYPES[part.get_dtype()]
                self._runs.setdefault(name, []).append(_Run(first, first + count, file, key))
        except (OSError, SafetensorError, KeyError, ValueError, TypeError, IndexError) as error:
            raise CheckpointError(f"{path}: {error!r}") from None


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _path(folder: Path, stem: str, rank: int, ranks: int) -> Path:
    return folder / f"{stem}-{rank:05d}-of-{ranks:05d}.safetensors"

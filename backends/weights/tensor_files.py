"""Tensors to and from safetensors files, a piece at a time: neither side ever holds a file's worth of them.

Reading is plain `pread` into the memory where the elements belong. (A memory map would do as well until somebody
truncates the file: then it is a SIGBUS instead of an error.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from backends.weights.tensor_bytes import torch_dtype, wire_dtype
from specs.safetensors_header import CODES, Entry, Header, make_header, read_header

DTYPES = {
    **{code: torch_dtype(name) for name, code in CODES.items()},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},  # only read
}
_STAGE_BYTES = 64 * 2**20  # host memory between a file and another device


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that exists only while it is written. `load` gives it with this shape and dtype, on any device."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_file(
    path: Path,
    tensors: Sequence[LazyTensor],
    metadata: Mapping[str, str],
    wrote: Callable[[int], None] = lambda _: None,
) -> None:
    """A safetensors file, on the disk when this returns. Holds one tensor at a time; none that are already
    contiguous host memory is copied. `wrote` is told the bytes of each as it is done."""
    header, order = make_header([(each.name, CODES[wire_dtype(each.dtype)], each.shape) for each in tensors], metadata)
    with path.open("wb") as file:
        file.write(header)
        for each in (tensors[i] for i in order):
            tensor = each.load()
            assert (tuple(tensor.shape), tensor.dtype) == (each.shape, each.dtype), each.name
            file.write(_bytes(tensor.detach().cpu().contiguous()))
            del tensor
            wrote(each.nbytes)
        file.flush()
        os.fsync(file.fileno())


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


class TensorFile:
    """A safetensors file to read from. Raises ValueError or OSError where it is not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Header = read_header(path)

    def entry(self, name: str) -> Entry:
        return self.header.entries[name]

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.entry(name).dtype]

    def read_into(self, target: Tensor, name: str, start: int = 0) -> None:
        """Fill `target` (one-dimensional, of the tensor's dtype) with elements from `start` of the flattened tensor."""
        entry = self.entry(name)
        assert target.ndim == 1
        assert target.dtype == DTYPES[entry.dtype]
        offset, size = entry.start + start * target.itemsize, target.itemsize
        assert start * size + target.nbytes <= entry.nbytes, (name, start, len(target))
        with self.path.open("rb", buffering=0) as file:
            file.seek(offset)
            if target.device.type == "cpu" and target.is_contiguous():
                _fill(_bytes(target), file)
                return
            per_stage = _STAGE_BYTES // size
            for first in range(0, len(target), per_stage):
                piece = target[first : first + per_stage]
                staged = torch.empty(len(piece), dtype=target.dtype)
                _fill(_bytes(staged), file)
                piece.copy_(staged)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, in memory of its own."""
        flat = torch.empty(prod(self.entry(name).shape), dtype=self.dtype(name))
        self.read_into(flat, name)
        return flat.view(self.entry(name).shape)


def _fill(target: memoryview, file: FileIO) -> None:
    """Read exactly as many bytes as `target` has."""
    done = 0
    while done < len(target):
        got = file.readinto(target[done:])
        if not got:
            raise ValueError("ends too early")
        done += got

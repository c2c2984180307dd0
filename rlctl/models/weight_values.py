"""What the values in a model's weight files tell: a run that diverged, and files that were filled up with zeros.

Every tensor is looked at in three places, then blocks all over the files, for as long as there is time: a model of some
ten MB is read whole.
"""

from __future__ import annotations

import math
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from specs.safetensors_header import Entry, read_header

# Of a floating-point type: array's code of its bits, and the exponent that only NaN and infinity have.
_EXPONENT = {"F64": ("Q", 0x7FF << 52), "F32": ("I", 0x7F8 << 20), "F16": ("H", 0x7C00), "BF16": ("H", 0x7F80)}
_HIGHEST = {
    "F64": (0x7F, 0xFF),
    "F32": (0x7F, 0xFF),
    "BF16": (0x7F, 0xFF),
    "F16": (*range(0x7C, 0x80), *range(0xFC, 0x100)),
}
_BLOCK, _PAGE = 1 << 18, 1 << 12  # bytes
_NO_VALUE = bytes(_PAGE)
_AT_ZERO = ("o_proj", "down_proj", "c_proj", "lora_B")  # what is set to zero where a layer is to begin as nothing
_OF_TOKENS = ("embed", "wte", "wpe", "lm_head")  # rows of tokens that nobody uses may be zero

Wrong = tuple[str, str]  # what is wrong, and a hint


@dataclass
class _Tensor:
    """A tensor of a file, with what has been seen of it."""

    name: str
    file: Path
    entry: Entry
    full: int = 0  # pages that hold something
    empty: list[int] = field(default_factory=list)  # where pages begin that hold zeros alone

    @property
    def is_matrix(self) -> bool:
        return len(self.entry.shape) > 1 and self.entry.nbytes >= _PAGE

    @property
    def is_empty(self) -> bool:
        return bool(self.empty) and not self.full


def value_findings(files: Iterable[Path], *, seconds: float) -> tuple[list[Wrong], list[Wrong]]:
    """Errors and warnings about the values in safetensors files whose headers can be read. `seconds`: how long values
    are read for."""
    deadline = time.monotonic() + seconds
    tensors = [_Tensor(name, file, entry) for file in files for name, entry in _entries(file).items()]
    tensors = [one for one in tensors if one.entry.dtype in _EXPONENT and one.entry.nbytes]
    for tensor, data, at in _looked_at(tensors, deadline):
        if _not_numbers(data, tensor.entry.dtype):
            hint = "name a checkpoint from before the run diverged"
            return [(f"{tensor.name} in {tensor.file.name} holds NaN or infinity", hint)], []
        if tensor.is_matrix:
            _note_pages(tensor, data, at)
    return _zeros([one for one in tensors if one.is_matrix and (one.full or one.empty)])


def _entries(file: Path) -> Mapping[str, Entry]:
    try:
        return read_header(file).entries
    except (OSError, ValueError):  # which is said elsewhere
        return {}


def _looked_at(tensors: list[_Tensor], deadline: float) -> Iterator[tuple[_Tensor, bytes, int]]:
    """Tensors, bytes of them, and where these begin."""
    files: dict[Path, BinaryIO] = {}
    try:
        for tensor, start, size in _places(tensors):
            if time.monotonic() > deadline:
                return
            stream = files.get(tensor.file) or files.setdefault(tensor.file, tensor.file.open("rb", buffering=0))
            stream.seek(tensor.entry.start + start)
            yield tensor, stream.read(size), start
    except OSError:  # of a file that is there: it is said when it is loaded
        return
    finally:
        for stream in files.values():
            stream.close()


def _places(tensors: list[_Tensor]) -> Iterator[tuple[_Tensor, int, int]]:
    """First a page at both ends and in the middle of each, then all blocks, in an order that is everywhere at once."""
    for tensor in tensors:
        last = max(0, tensor.entry.nbytes - _PAGE) // 8 * 8
        for start in dict.fromkeys((0, last // 2 // _PAGE * _PAGE, last)):
            yield tensor, start, min(_PAGE, tensor.entry.nbytes - start)
    ends = [*accumulate(-(-tensor.entry.nbytes // _BLOCK) for tensor in tensors)]
    count = ends[-1] if ends else 0
    stride = next((n for n in range(int(count * 0.618) + 1, count + 1) if math.gcd(n, count) == 1), 1)
    for step in range(count):
        block = step * stride % count
        number = bisect_right(ends, block)
        start = (block - (ends[number - 1] if number else 0)) * _BLOCK
        tensor = tensors[number]
        yield tensor, start, min(_BLOCK, tensor.entry.nbytes - start)


def _not_numbers(data: bytes, dtype: str) -> bool:
    code, ones = _EXPONENT[dtype]
    width = array(code).itemsize
    highest = data[width - 1 :: width]
    if not any(byte in highest for byte in _HIGHEST[dtype]):
        return False
    return any(value & ones == ones for value in array(code, data[: len(data) // width * width]))


def _note_pages(tensor: _Tensor, data: bytes, at: int) -> None:
    for start in range(0, len(data), _PAGE):
        page = data[start : start + _PAGE]
        if page == _NO_VALUE[: len(page)]:
            tensor.empty.append(at + start)
        else:
            tensor.full += 1


def _zeros(matrices: list[_Tensor]) -> tuple[list[Wrong], list[Wrong]]:
    """Matrices without a value, or with pages without one in the middle of values."""
    hint = "a download that was cut short and filled up? Copy or download it again"
    empty = [one for one in matrices if one.is_empty]
    of_tokens = [one for one in empty if "embed" in one.name or "wte" in one.name]
    if of_tokens or 2 * len(empty) > len(matrices):
        first = (of_tokens or empty)[0]
        some = f"{len(empty)} of {len(matrices)} matrices hold zeros alone, first {first.name} in {first.file.name}"
        return [(some if len(empty) > 1 else f"{first.name} in {first.file.name} holds zeros alone", hint)], []
    odd = [one for one in empty if one.name.rpartition(".")[0].rpartition(".")[2] not in _AT_ZERO]
    torn = [one for one in matrices if one.empty and one.full and not _rows_nobody_uses(one)]
    for one in [*torn, *odd][:1]:
        where = f"zeros alone from byte {one.entry.start + min(one.empty):,} on" if one in torn else "zeros alone"
        return [], [
            (f"{one.name} in {one.file.name} holds {where}, among {len(matrices)} matrices that hold values", hint)
        ]
    return [], []


def _rows_nobody_uses(tensor: _Tensor) -> bool:
    """Whether an embedding's zeros can be rows of tokens that no tokenizer has: less than half of it."""
    return any(part in tensor.name for part in _OF_TOKENS) and len(tensor.empty) < tensor.full

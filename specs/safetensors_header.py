"""Headers of safetensors files, without a tensor library: what a file holds and where, read from its first bytes.

The format: 8 bytes of header length (little endian), a JSON header, the data. A file is checked whole by its size, so
that a torn one is found before anything is read from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from specs.text import LFS, LFS_POINTER

ITEM_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2},
    **{"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
}
# Name of a dtype on the wire → its code in a file.
CODES = {"fp32": "F32", "bf16": "BF16", "float64": "F64", "float16": "F16", "bool": "BOOL"} | {
    f"{sign}int{bits}": f"{letter}{bits}" for sign, letter in (("", "I"), ("u", "U")) for bits in (8, 16, 32, 64)
}
LENGTH_BYTES = 8
_ALIGNMENT = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Entry:
    """A tensor in a file. `start` is the place of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """A file's tensors by name, and its free text by key."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def read_header(path: Path) -> Header:
    """Read the header of a whole file. Raises OSError, or ValueError saying what is wrong with the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        data = LENGTH_BYTES + length
        if not 0 < length <= _MAX_HEADER_BYTES or data > size:
            file.seek(0)
            pointer = file.read(len(LFS)) == LFS.encode()
            raise ValueError(LFS_POINTER if pointer else "is cut short or not a safetensors file")
        text = file.read(length)
    return parse_header(text, data, size)


def parse_header(text: bytes, data: int, end: int) -> Header:
    """Parse the JSON of a header, whose tensors fill a file, or a message, from `data` to `end`. Raises ValueError."""
    try:
        content = json.loads(text)
        metadata = content.pop("__metadata__", {})
        entries = {name: _entry(data, **fields) for name, fields in content.items()}
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(f"is not a safetensors file ({error})") from None
    spans = sorted((entry.start, entry.start + entry.nbytes) for entry in entries.values())
    if [data, *(stop for _, stop in spans)] != [*(start for start, _ in spans), end]:
        raise ValueError("is cut short, or its tensors do not fill it")
    return Header(entries, metadata)


def _entry(data: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Entry:
    start, end = data_offsets
    if any(type(extent) is not int or extent < 0 for extent in shape) or end - start != prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"a tensor of shape {shape} and dtype {dtype} is not {end - start} bytes")
    return Entry(dtype, tuple(shape), data + start, end - start)


def make_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """Return a header for (name, dtype, shape) tuples, and the order in which their data follow: widest first, which
    aligns every tensor."""
    order = sorted(range(len(tensors)), key=lambda i: (-ITEM_BYTES[tensors[i][1]], tensors[i][0]))
    content: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for i in order:
        name, dtype, shape = tensors[i]
        start, end = end, end + prod(shape) * ITEM_BYTES[dtype]
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    assert len(content) == len(tensors) + bool(metadata), "a name came twice"
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, order


def fsync(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

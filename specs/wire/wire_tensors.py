"""Tensors as safetensors bytes, with one copy on the way out and none on the way in.

The format is that of the `safetensors` library (8 bytes of header length, a JSON header, the data), whose own
functions copy twice and once: at 84 MiB that was most of a message's time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod

import numpy as np
from numpy.typing import NDArray

from specs.errors import ChannelError

Buffer = bytes | bytearray | memoryview

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
}
_NAMES = {np.dtype(name): code for code, name in _DTYPES.items()}
_NUMPY = {code: np.dtype(name) for code, name in _DTYPES.items()}
_MAX_HEADER_BYTES = 10 * 2**20
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_TO_JSON = json.JSONEncoder(separators=(",", ":")).encode


def encode(tensors: Mapping[str, NDArray[np.generic]]) -> bytearray:
    """Tensors to one blob. Raises TypeError on a dtype that the wire does not carry."""
    # Widest first, as the format wants it: then every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name, array in ordered:
        if (code := _NAMES.get(array.dtype)) is None:
            raise TypeError(f"tensor {name} has dtype {array.dtype}, which cannot be sent")
        start, end = end, end + array.nbytes
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [start, end]}
    text = _TO_JSON(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    data = _LENGTH_BYTES + len(text)
    blob = bytearray(data + end)
    blob[:data] = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    for array in (array for _, array in ordered if array.size):
        target = np.frombuffer(blob, array.dtype, array.size, data).reshape(array.shape)
        np.copyto(target, array)
        data += array.nbytes
    return blob


def decode(blob: Buffer) -> dict[str, NDArray[np.generic]]:
    """A blob to tensors, which are views of it. Raises ChannelError on anything that is not a whole blob."""
    view = memoryview(blob)
    try:
        size = int.from_bytes(view[:_LENGTH_BYTES], "little")
        if not 0 < size <= min(_MAX_HEADER_BYTES, len(view) - _LENGTH_BYTES):
            raise ValueError("its header does not fit")
        header = json.loads(bytes(view[_LENGTH_BYTES : _LENGTH_BYTES + size]))
        data = view[_LENGTH_BYTES + size :]
        entries = [(str(name), entry) for name, entry in header.items() if name != "__metadata__"]
        spans = sorted(tuple(entry["data_offsets"]) for _, entry in entries)
        if [0, *(end for _, end in spans)] != [*(start for start, _ in spans), len(data)]:
            raise ValueError("its tensors do not fill it")
        return {name: _view(data, entry["dtype"], entry["shape"], *entry["data_offsets"]) for name, entry in entries}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ChannelError(f"not safetensors: {error}") from None


def _view(data: memoryview, code: str, shape: list[int], start: int, end: int) -> NDArray[np.generic]:
    dtype = _NUMPY[code]
    if any(type(size) is not int or size < 0 for size in shape) or prod(shape) * dtype.itemsize != end - start:
        raise ValueError(f"a tensor of shape {shape} is not {end - start} bytes")
    array = np.frombuffer(data[start:end], dtype).reshape(shape)
    return array if array.flags.aligned else array.copy()

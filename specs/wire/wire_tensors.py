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
from specs.safetensors_header import CODES, make_header

Buffer = bytes | bytearray | memoryview

_NUMPY = {code: np.dtype("float32" if name == "fp32" else name) for name, code in CODES.items() if name != "bf16"}
_NAMES = {dtype: code for code, dtype in _NUMPY.items()}
_MAX_HEADER_BYTES = 10 * 2**20
_LENGTH_BYTES = 8


def encode(tensors: Mapping[str, NDArray[np.generic]]) -> bytearray:
    """Tensors to one blob. Raises TypeError on a dtype that the wire does not carry."""
    for name, array in tensors.items():
        if array.dtype not in _NAMES:
            raise TypeError(f"tensor {name} has dtype {array.dtype}, which cannot be sent")
    arrays = list(tensors.values())
    header, order = make_header([(name, _NAMES[array.dtype], array.shape) for name, array in tensors.items()], {})
    data = len(header)
    blob = bytearray(data + sum(array.nbytes for array in arrays))
    blob[:data] = header
    for array in (arrays[i] for i in order if arrays[i].size):
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

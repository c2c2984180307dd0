"""Tensors as safetensors bytes, with one copy on the way out and none on the way in.

The format is that of the `safetensors` library (8 bytes of header length, a JSON header, the data), whose own
functions copy twice and once: at 84 MiB that was most of a message's time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from specs.errors import ChannelError
from specs.safetensors_header import CODES, LENGTH_BYTES, Entry, make_header, parse_header

Buffer = bytes | bytearray | memoryview

_NUMPY = {code: np.dtype("float32" if name == "fp32" else name) for name, code in CODES.items() if name != "bf16"}
_NAMES = {dtype: code for code, dtype in _NUMPY.items()}
_MAX_HEADER_BYTES = 10 * 2**20


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
        data = LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES], "little")
        if not LENGTH_BYTES < data <= min(_MAX_HEADER_BYTES, len(view)):
            raise ValueError("its header does not fit")
        entries = parse_header(bytes(view[LENGTH_BYTES:data]), data, len(view)).entries
        return {name: _view(view, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ChannelError(f"not safetensors: {error}") from None


def _view(view: memoryview, entry: Entry) -> NDArray[np.generic]:
    array = np.frombuffer(view[entry.start : entry.start + entry.nbytes], _NUMPY[entry.dtype]).reshape(entry.shape)
    return array if array.flags.aligned else array.copy()

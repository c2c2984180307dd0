"""The tensor blob: the library reads what we write and the other way round; broken blobs are refused."""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from specs.errors import ChannelError
from specs.wire.wire_tensors import decode, encode

TENSORS = {
    "tokens_T": np.arange(5, dtype=np.int64),
    "mask_T": np.array([1, 0, 1], dtype=np.uint8),
    "flag": np.array([[True, False]]),
    "half": np.ones((2, 3), dtype=np.float16),
    "none": np.zeros((0, 4), dtype=np.float32),
    "strided": np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
    "scalar": np.array(2.5),
}


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert other[name].dtype == array.dtype
        assert other[name].shape == array.shape
        np.testing.assert_array_equal(other[name], array)


def test_agrees_with_the_library() -> None:
    assert_same(TENSORS, load(bytes(encode(TENSORS))))
    contiguous = {name: np.ascontiguousarray(array) for name, array in TENSORS.items()}
    assert_same(contiguous, decode(save(contiguous, metadata={"a": "b"})))


def test_round_trip_gives_aligned_writable_views() -> None:
    blob = encode(TENSORS)
    arrays = decode(memoryview(blob))
    assert_same(TENSORS, arrays)
    assert all(array.flags.aligned and array.flags.writeable for array in arrays.values())
    arrays["tokens_T"][0] = 77
    assert decode(blob)["tokens_T"][0] == 77  # a view, not a copy


def test_what_cannot_be_sent_is_refused() -> None:
    for array in (np.array(["text"]), np.array([1 + 2j]), np.array([None]), np.arange(2, dtype=">i4")):
        with pytest.raises(TypeError, match="cannot be sent"):
            encode({"x": array})


@pytest.mark.parametrize(
    "header",
    [
        {
            "x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "y": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        },
        {"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"x": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}},
        {"x": 1},
        [],
    ],
)
def test_lying_headers_are_refused(header: object) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(ChannelError, match="not safetensors"):
        decode(len(text).to_bytes(8, "little") + text + bytes(8))


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, 400), at=st.integers(0, 120), value=st.integers(0, 255))
def test_damaged_blobs_never_crash(cut: int, at: int, value: int) -> None:
    blob = encode(TENSORS)
    blob[at] = value
    for damaged in (blob, blob[:cut]):
        with suppress(ChannelError):  # any other exception fails the test
            decode(damaged)

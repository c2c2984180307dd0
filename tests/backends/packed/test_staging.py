"""Arrays of a micro-batch reach the device together, as they were."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu import on_cpu_and_gpu
from train_helpers import QWEN2, build_engine, learn, make_batch, train_config, write_model

from backends.packed import staging
from backends.packed.staging import Staging
from backends.train import engine as train_engine
from backends.train import verify_packing


@pytest.mark.parametrize("chunk", [1, 200, 4096])
@pytest.mark.parametrize("device", on_cpu_and_gpu())
def test_what_is_put_arrives(device: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one chunk or in many; some is read before more is put."""
    monkeypatch.setattr(staging, "_CHUNK_BYTES", chunk)
    rng, staged = np.random.default_rng(0), Staging(torch.device(device), together=True)
    arrays = [
        rng.integers(0, 99, 7),
        rng.normal(size=(3, 5)).astype(np.float32),
        np.arange(12, dtype=np.int32)[::3],
        np.array([True, False, True]),
        np.zeros(0, dtype=np.int64),
        rng.normal(size=33),
    ]
    put = []
    for number, array in enumerate(arrays):
        put.append(staged.put(array))
        if number == 2:
            staged.send()
            np.testing.assert_array_equal(put[0].cpu().numpy(), arrays[0])
    staged.send()
    for tensor, array in zip(put, arrays, strict=True):
        assert tensor.device.type == device
        assert tensor.dtype == torch.from_numpy(array.copy()).dtype
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_engine_learns_the_same_to_the_bit(tmp_path: Path, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy per micro-batch against arrays used where they are: what is read before it is sent would be garbage."""
    config = train_config(write_model(tmp_path, QWEN2), model={"attn_implementation": attention})
    expected = build_engine(config)
    history = learn(expected), expected.forward(make_batch()).tolist()
    for module in (train_engine, verify_packing):
        monkeypatch.setattr(module, "Staging", partial(Staging, together=True))
    together = build_engine(config)
    assert (learn(together), together.forward(make_batch()).tolist()) == history

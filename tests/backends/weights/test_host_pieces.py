"""Bytes go to the host and come from it piece by piece, as they were: on the CPU by the same code, without a stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu import on_cpu_and_gpu
from numpy.typing import NDArray
from rollout_helpers import rollout_config, write_model
from torch import Tensor

from backends.protocol import Rank
from backends.torch_rollout.engine import TorchRolloutEngine
from backends.weights import host_pieces
from backends.weights.checksum import checksum_bytes
from backends.weights.host_pieces import fill, pieces_of
from backends.weights.tensor_bytes import tensor_bytes
from backends.weights.word_sum import word_sums

SIZES = [0, 1, 63, 64, 65, 128, 1000]  # bytes, against pieces of 64
DEVICES = on_cpu_and_gpu()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pieces, "PIECE_BYTES", 64)


def bytes_on(device: str, count: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)).to(device)


def cut(whole_U: NDArray[np.uint8], *sizes: int) -> Iterator[NDArray[np.uint8]]:
    start, turn = 0, 0
    while start < len(whole_U):
        yield whole_U[start : start + sizes[turn % len(sizes)]]
        start, turn = start + sizes[turn % len(sizes)], turn + 1


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("device", DEVICES)
def test_pieces_are_the_bytes_and_stay_while_the_next_one_comes(device: str, count: int) -> None:
    tensor, found = bytes_on(device, count), []
    for piece_U in pieces_of(tensor, staged=True):
        assert len(piece_U) <= 64
        found.append(piece_U.copy())
        torch.cuda.synchronize() if device == "cuda" else None  # the next one has come meanwhile
        np.testing.assert_array_equal(piece_U, found[-1])
    np.testing.assert_array_equal(np.concatenate(found), tensor_bytes(tensor))


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_filled_from_blocks_is_there(device: str, count: int) -> None:
    """Blocks of any size, each overwritten as soon as the next one is asked for."""
    want_U = tensor_bytes(bytes_on("cpu", count)).copy()

    def blocks() -> Iterator[NDArray[np.uint8]]:
        for part_U in cut(want_U, 10, 200, 64):
            block_U = part_U.copy()
            yield block_U
            block_U[:] = 0

    target = torch.full((count,), 7, dtype=torch.uint8, device=device)
    fill(target, blocks())
    np.testing.assert_array_equal(tensor_bytes(target), want_U)
    if count:
        with pytest.raises(AssertionError):
            fill(target, cut(want_U[1:], 10))


@pytest.mark.parametrize("device", DEVICES)
def test_a_sampler_on_a_device_takes_weights_from_the_host_and_from_there(device: str, tmp_path: Path) -> None:
    config = rollout_config(write_model(tmp_path), dtype="bf16")
    config = config.model_copy(update={"model": config.model.model_copy(update={"device": device})})
    engine = TorchRolloutEngine.build(config, Rank())
    for spec in engine.weight_specs():
        values = torch.randn(spec.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        data_U = tensor_bytes(values)
        assert engine.import_in_blocks(spec, cut(data_U, 100, 6)) == checksum_bytes(data_U)
        assert torch.equal(engine._weights[spec.name].cpu(), values)
        other = (values + 1).to(device)
        window_U = other.view(-1).view(torch.uint8)
        assert engine.import_from_device([(spec, window_U)]) == word_sums([(values + 1).cpu()])
        assert torch.equal(engine._weights[spec.name].cpu(), other.cpu())

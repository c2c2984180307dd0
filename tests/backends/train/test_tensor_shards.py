"""Shards: any cut reads back, and whatever does not belong together is refused before anything is loaded."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peak_memory import CLEAR, MIB, grown_bytes
from safetensors.torch import save_file

from backends.train.tensor_shards import Shard, ShardReader, whole, write_shards
from specs.errors import CheckpointError

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]
NAMES = st.text("ab.@0é ", min_size=1, max_size=6)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_over_any_number_of_ranks_reads_back(tmp_path_factory, data):
    """Each tensor is cut at random places; the runs go to random ranks; slices are read at random places."""
    folder = tmp_path_factory.mktemp("shards")
    ranks = data.draw(st.integers(1, 4))
    kinds = data.draw(st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=4))
    tensors = {name: numbers(shape, dtype, seed) for seed, (name, (shape, dtype)) in enumerate(kinds.items())}
    owned: list[list[Shard]] = [[] for _ in range(ranks)]
    for name, tensor in tensors.items():
        size = tensor.numel()
        cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=4))})
        for start, stop in pairwise(cuts) if size else [(0, 0)]:
            shard = Shard(name, tuple(tensor.shape), start, tensor.view(-1)[start:stop])
            owned[data.draw(st.integers(0, ranks - 1))].append(shard)
    for rank in range(ranks):
        write_shards(folder, "model", rank, ranks, data.draw(st.permutations(owned[rank])))
    reader = ShardReader(folder, "model")
    assert reader.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        back = reader.tensor(name)
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)
        start = data.draw(st.integers(0, tensor.numel()))
        stop = data.draw(st.integers(start, tensor.numel()))
        assert torch.equal(reader.read(name, start, stop), tensor.view(-1)[start:stop])
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    expected = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    reader.load([whole(name, tensor) for name, tensor in target.items()], expected)
    assert all(torch.equal(target[name], tensor) for name, tensor in tensors.items())


# ── what must be refused ──────────────────────────────────────────────────────────────────────────


@pytest.fixture
def halves(tmp_path) -> Path:
    """A tensor of ten elements from two ranks."""
    for rank, (start, stop) in enumerate([(0, 4), (4, 10)]):
        write_shards(tmp_path, "model", rank, 2, [Shard("w", (10,), start, torch.arange(10.0)[start:stop])])
    return tmp_path


def rewrite(folder: Path, start: int, stop: int, shape: tuple[int, ...] = (10,), dtype=torch.float32) -> None:
    """Another part in the place of rank 1's."""
    write_shards(folder, "model", 1, 2, [Shard("w", shape, start, torch.zeros(stop - start, dtype=dtype))])


SPOILT = {
    "gap": (lambda folder: rewrite(folder, 5, 10), "the parts of w do not make up its 10 elements"),
    "overlap": (lambda folder: rewrite(folder, 3, 10), "the parts of w do not make up its 10 elements"),
    "too short": (lambda folder: rewrite(folder, 4, 9), "the parts of w do not make up its 10 elements"),
    "twice": (lambda folder: rewrite(folder, 0, 4), "the parts of w do not make up its 10 elements"),
    "other shape": (lambda folder: rewrite(folder, 4, 10, (2, 5)), "another rank has it otherwise"),
    "other dtype": (lambda folder: rewrite(folder, 4, 10, dtype=torch.bfloat16), "another rank has it otherwise"),
    "missing rank": (
        lambda folder: (folder / "model-00001-of-00002.safetensors").unlink(),
        "not those of 2 ranks, see model-00001-of-00002",
    ),
    "a rank too many": (lambda folder: write_shards(folder, "model", 2, 2, []), "not those of 2 ranks"),
    "two counts": (
        lambda folder: write_shards(folder, "model", 0, 1, []),
        "not those of 1 ranks, see model-00000-of-00002",
    ),
    "torn": (
        lambda folder: _cut(folder / "model-00001-of-00002.safetensors", 3),
        r"model-00001-of-00002\.safetensors: is cut short",
    ),
    "torn in its header": (lambda folder: _cut(folder / "model-00000-of-00002.safetensors", 60), "cut short"),
    "empty": (lambda folder: (folder / "model-00000-of-00002.safetensors").write_bytes(b""), "cut short"),
    "no checkpoint file": (
        lambda folder: save_file({"w": torch.zeros(6)}, folder / "model-00001-of-00002.safetensors"),
        "is not a checkpoint file",
    ),
    "nothing": (lambda folder: [path.unlink() for path in folder.iterdir()], "has no model-"),
}


def _cut(path: Path, lost_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-lost_bytes])


@pytest.mark.parametrize("case", SPOILT)
def test_what_does_not_belong_together_is_refused(halves, case):
    assert torch.equal(ShardReader(halves, "model").tensor("w"), torch.arange(10.0))
    spoil, words = SPOILT[case]
    spoil(halves)
    with pytest.raises(CheckpointError, match=words):
        ShardReader(halves, "model")


def test_a_file_cut_while_it_is_read_is_an_error_and_no_crash(halves):
    reader = ShardReader(halves, "model")
    _cut(halves / "model-00001-of-00002.safetensors", 8)
    with pytest.raises(CheckpointError, match="ends too early"):
        reader.tensor("w")


@pytest.mark.parametrize("expected", [{}, {"w": ((5, 2), torch.float32)}, {"w": ((10,), torch.bfloat16)}])
def test_another_models_checkpoint_changes_nothing(halves, expected):
    memory = torch.ones(10)
    with pytest.raises(CheckpointError, match=r"another model: .*w"):
        ShardReader(halves, "model").load([whole("w", memory)], expected)
    assert memory.eq(1).all()


# ── memory ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(not CLEAR.exists(), reason="needs Linux's /proc to see the peak")
def test_neither_writing_nor_reading_holds_a_copy(tmp_path):
    """Of 256 MiB. A slice costs what it holds; memory that is not the file's shape costs one stage of 64 MiB."""
    size = 64 * 2**20  # elements: 256 MiB
    big, expected = torch.ones(size), {"w": ((size,), torch.float32)}
    assert grown_bytes(lambda: write_shards(tmp_path, "model", 0, 1, [whole("w", big)])) < 20 * MIB
    assert grown_bytes(lambda: ShardReader(tmp_path, "model").load([whole("w", big)], expected)) < 20 * MIB
    strided = torch.ones(size // 2, 2)[:, 0]  # 128 MiB, two stages
    assert grown_bytes(lambda: ShardReader(tmp_path, "model").read_into(strided, "w", 5)) < (64 + 20) * MIB
    assert grown_bytes(lambda: ShardReader(tmp_path, "model").read("w", size // 2, size // 2 + 1000)) < 5 * MIB

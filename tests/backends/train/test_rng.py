"""The random generator of a process goes on where a checkpoint left it."""

from __future__ import annotations

import pytest
import torch
from train_helpers import QWEN2, build_engine, train_config, write_model

from backends.train.rng import read_rng, write_rng
from backends.ulysses.sequence_group import SequenceGroup
from backends.ulysses.sharding_manager import ShardingManager
from specs.errors import CheckpointError


def test_it_goes_on_where_it_was(tmp_path):
    torch.manual_seed(7)
    write_rng(tmp_path, 3)
    drawn = torch.rand(4)
    torch.manual_seed(8)
    read_rng(tmp_path, 2)  # a rank that was not there: nothing happens
    assert not torch.equal(torch.rand(4), drawn)
    read_rng(tmp_path, 3)
    assert torch.equal(torch.rand(4), drawn)


def test_those_of_a_sequence_group_go_on_in_a_group_as_large(tmp_path):
    """In another they would not be the same on all ranks: what each rank finds may be of different groups."""

    def gear(size, seed):
        return ShardingManager(SequenceGroup(None, size, 0), torch.device("cpu"), seed)

    def drawn(manager):
        with manager:
            return torch.rand(4).tolist()

    saved = gear(2, 7)
    drawn(saved)
    write_rng(tmp_path, 0, saved.states())
    wanted = drawn(saved)
    for size, numbers in ((2, wanted), (4, drawn(gear(4, 8)))):
        resumed = gear(size, 8)
        resumed.restore(read_rng(tmp_path, 0))
        assert drawn(resumed) == numbers
    write_rng(tmp_path, 1)
    assert read_rng(tmp_path, 1) == {}


def test_a_torn_state_is_named(tmp_path):
    path = write_rng(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"rng\.rank0"):
        read_rng(tmp_path, 0)


def test_an_engine_keeps_it(tmp_path):
    engine = build_engine(train_config(write_model(tmp_path / "model", QWEN2)))
    (tmp_path / "saved").mkdir()
    torch.manual_seed(7)
    engine.save(tmp_path / "saved")
    drawn = torch.rand(4)
    engine.load(tmp_path / "saved")
    assert torch.equal(torch.rand(4), drawn)
    engine.close()

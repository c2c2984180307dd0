"""The random generator of a process goes on where a checkpoint left it."""

from __future__ import annotations

import pytest
import torch
from train_helpers import build_engine, train_config

from backends.train.rng import read_rng, write_rng
from rlctl.models.paths import BUILTIN_FOLDER
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


def test_it_begins_at_the_seed_of_the_run():
    drawn = []
    for seed in (1, 1, 2):
        build_engine(train_config(BUILTIN_FOLDER / "tiny-digits", model={"seed": seed}))
        drawn.append(torch.rand(4).tolist())
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_torn_state_is_named(tmp_path):
    path = write_rng(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"rng\.rank0"):
        read_rng(tmp_path, 0)

"""The all-gather has two names in the versions of torch that are allowed; the newer torch warns of the older one."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist

from backends.ulysses.all_gather import all_gather

NAMES = ("all_gather_single", "all_gather_into_tensor")


@pytest.fixture
def alone(without_group: None) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("only", NAMES)
def test_either_name_gathers_without_a_warning(alone: None, only: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a torch that has this name alone, as far as its function is there."""
    real = getattr(dist, only, None)
    if real is None:
        pytest.skip(f"this torch has no {only}")
    real = inspect.unwrap(real)  # below the warning that a newer torch puts around the old name
    for name in NAMES:
        monkeypatch.delattr(dist, name, raising=False)
    monkeypatch.setattr(dist, only, real, raising=False)
    whole, part = torch.zeros(3), torch.arange(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        all_gather(whole, part)
    assert whole.tolist() == [0, 1, 2]


def test_the_newer_name_is_taken_where_both_are(alone: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        all_gather(torch.zeros(3), torch.arange(3.0))

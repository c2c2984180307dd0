"""Of a role's GPUs each process sees its own share, whoever started it."""

from __future__ import annotations

import os

import pytest

from workers.main import _see_own_device, place_from_env

PLACE = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "RLCTL_RANK",
    "RLCTL_SIZE",
    "RLCTL_GROUP_SIZE",
    "RLCTL_LOCAL_SIZE",
)


def seen(monkeypatch: pytest.MonkeyPatch, devices: str, **place: str) -> str:
    """CUDA_VISIBLE_DEVICES of a process after it has taken its place."""
    for name in (*PLACE, "RLCTL_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    _, rank = place_from_env()
    _see_own_device(rank.local_rank)
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(
    ("devices", "size", "shares"),
    [
        ("4,5,6,7", 4, ["4", "5", "6", "7"]),
        ("4,5,6,7", 2, ["4,5", "6,7"]),
        ("4,5,6,7", 1, ["4,5,6,7"]),
        ("3", 1, ["3"]),
        ("", 2, ["", ""]),
    ],
)
def test_replicas_share_out_the_gpus(
    monkeypatch: pytest.MonkeyPatch, devices: str, size: int, shares: list[str]
) -> None:
    """Started one by one, as the launcher `python` does."""
    for rank, share in enumerate(shares):
        place = {"RLCTL_RANK": str(rank), "RLCTL_SIZE": str(size), "LOCAL_RANK": str(rank), "RLCTL_GROUP_SIZE": "1"}
        assert seen(monkeypatch, devices, **place, RLCTL_LOCAL_SIZE=str(size)) == share
        behind = {"RLCTL_RANK": str(size + rank), "RLCTL_SIZE": str(2 * size), "LOCAL_RANK": str(rank)}  # second node
        assert seen(monkeypatch, devices, **behind, RLCTL_GROUP_SIZE="1", RLCTL_LOCAL_SIZE=str(size)) == share


def test_a_group_has_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by torchrun on the second of two nodes."""
    place = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "RLCTL_GROUP_SIZE": "8"}
    assert seen(monkeypatch, "0,1,2,3", **place) == "1"


def test_slurm_hands_out_all_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "RLCTL_DEVICES": "2,3"}
    assert seen(monkeypatch, "0,1,2,3,4,5,6,7", **place) == "3"

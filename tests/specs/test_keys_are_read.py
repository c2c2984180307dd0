"""Where a role is handed a table whole, the code that gets it reads each of its keys: to travel is no proof."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from specs.keys import kind_of, walk

ROOT = Path(__file__).resolve().parents[2]

# Tables that a role gets whole → the folders whose code must read each of their keys.
READERS: dict[str, tuple[str, ...]] = {
    "DdpEngine": ("backends/ddp", "backends/train"),
    "Fsdp2Engine": ("backends/fsdp2", "backends/train", "specs/seats.py"),
    "ZeroEngine": ("backends/zero", "backends/train", "specs/deepspeed_config.py"),
    "TorchRolloutEngine": ("backends/torch_rollout",),
    "VllmEngine": ("backends/vllm_rollout",),
    "SglangEngine": ("backends/sglang_rollout",),
    "Lora": ("backends",),
    "Optimizer": ("backends",),
    "Grpo": ("backends", "rlctl/driver.py", "rlctl/sampling.py"),
    "DataSection": ("workers", "rlctl/driver.py", "rlctl/sampling.py"),
    "EvalSection": ("workers", "rlctl"),
    "RewardSection": ("workers", "rlctl"),
    **dict.fromkeys(("RunSection", "CheckpointSection", "SyncSection"), ("rlctl",)),
    **dict.fromkeys(("ClusterSection", "TrackingSection"), ("rlctl",)),
    **dict.fromkeys(("ExactMatch", "MathVerify", "Regex", "Overlong", "Function"), ("workers",)),
}


@pytest.mark.parametrize("owner", READERS)
def test_what_a_role_is_handed_is_read(owner: str) -> None:
    (table,) = {table for _, table in walk() if table.__name__ == owner}
    read = names_read(READERS[owner])
    unread = set(table.model_fields) - read - {"kind"}
    assert not unread, f"{owner}: nothing in {', '.join(READERS[owner])} reads {', '.join(sorted(unread))}"


def test_every_table_of_a_kind_has_its_readers() -> None:
    chosen = {owner for _, table in walk() if kind_of(table) and "Fake" not in (owner := table.__name__)}
    assert chosen <= set(READERS), f"name in READERS the code that reads the keys of {chosen - set(READERS)}"


def names_read(places: tuple[str, ...]) -> set[str]:
    """Attributes that are read, and texts that are looked up, in the Python files of these folders."""
    return {name for place in places for file in _files(ROOT / place) for name in _names(file)}


def _files(place: Path) -> Iterator[Path]:
    yield from [place] if place.is_file() else sorted(place.rglob("*.py"))


@cache
def _names(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text())
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    keys = {
        node.slice.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
    }
    return frozenset(attributes | keys)

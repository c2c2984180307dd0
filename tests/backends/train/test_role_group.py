"""Where the ranks of a role meet."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from listeners import listeners
from torch import distributed as dist

from backends.protocol import Rank
from backends.train.role_group import meeting_store

ONE, OTHER = (Rank(rank=rank, world_size=2, local_rank=0) for rank in (0, 1))


def test_on_one_host_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(listeners())
    monkeypatch.setenv("RLCTL_GROUP_STORE", str(tmp_path / "actor"))
    one, other = meeting_store(ONE), meeting_store(OTHER)
    assert isinstance(one, dist.FileStore)
    assert isinstance(other, dist.FileStore)
    one.set("key", "said")
    assert other.get("key") == b"said"
    assert set(listeners()) == before


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_on_several_hosts_at_rank_0_and_at_its_address_alone(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(listeners())
    monkeypatch.delenv("RLCTL_GROUP_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", address)
    with socket.socket() as held:  # while this is bound nobody else is given the port, and torch may listen there
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        one, other = meeting_store(ONE), meeting_store(OTHER)
    assert one is not None
    assert other is not None
    one.set("key", "said")
    assert other.get("key") == b"said"
    assert {where for where in listeners() if where not in before} == {(socket.gethostbyname(address), port)}


def test_where_torchrun_serves_a_store_the_ranks_use_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLCTL_GROUP_STORE", raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert meeting_store(ONE) is None

"""What of a run listens, and what answers a stranger who connects there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import warm
from listeners import listeners
from probe_groups import probe_groups
from strangers import disturb_all
from test_launch_launchers import probe_plan

from specs.wire.messages import Verb


def test_strangers_reach_loopback_alone_and_change_nothing_there(tmp_path: Path) -> None:
    """The driver, torchrun's agent, gloo. Two hosts: `test_launch_launchers.py`."""
    before = set(listeners())
    with warm.children(), probe_groups(tmp_path, probe_plan("torchrun"), module="peer_role", factory="gloo") as groups:
        assert summed(groups) == [4.0, 4.0]
        assert disturb_all(before, tmp_path, at_least=3) == 0, "torch's store listens, although nobody needs it"
        assert summed(groups) == [4.0, 4.0]


def summed(groups: Any) -> list[float]:
    return [answer.body["total"] for answer in groups["actor"].call(Verb.PING)]

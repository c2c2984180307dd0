"""Who sits where: ranks counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
from small_spec import only_problem, problems_of, raw_spec

from specs.errors import Problem
from specs.schema.engines.ddp_table import DdpTable
from specs.schema.engines.fsdp2_table import Fsdp2Table
from specs.schema.engines.megatron_table import MegatronTable
from specs.schema.engines.zero_table import ZeroTable
from specs.schema.mesh import Mesh
from specs.schema.rank_groups import (
    RankPlacement,
    built_mesh,
    mesh_of,
    sequence_groups,
    shard_groups,
)
from specs.schema.spec import ActorSection


def problems(engine: dict[str, Any], **actor_keys: Any) -> list[Problem]:
    """Return what checking says of an actor with that fsdp2 table."""
    section = {"launcher": "torchrun", "engine": {"kind": "fsdp2", **engine}, **actor_keys}
    return problems_of(raw_spec(actor=section))


def actor(engine: DdpTable | Fsdp2Table | ZeroTable | MegatronTable, processes: int, nodes: int = 1) -> ActorSection:
    per_node = processes // nodes
    return ActorSection(engine=engine, processes=processes, nodes=nodes, devices=tuple(range(per_node)))


def ranks(section: ActorSection) -> list[list[int]]:
    return [[rank.rank for rank in group.ranks] for group in shard_groups(section)]


def test_sixteen_ranks_as_one_group_or_as_two() -> None:
    one = actor(Fsdp2Table(), 16)
    assert ranks(one) == [list(range(16))]
    two = actor(Fsdp2Table(shard=8, replicate=2), 16, nodes=2)
    assert ranks(two) == [list(range(8)), list(range(8, 16))]
    assert shard_groups(two)[1].ranks[3] == RankPlacement(
        rank=11, node=1, local_rank=3, devices=(3,), replica=1, shard=3, data=11, sequence=0
    )
    assert [group.nodes for group in shard_groups(two)] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"tensor_parallel": 2, "pipeline_parallel": 2}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"context_parallel": 2, "pipeline_parallel": 2}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ({"pipeline_parallel": 4, "expert_parallel": 2}, [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_stages_lie_furthest_apart_where_megatron_has_them_so(
    engine: dict[str, Any], expected: list[list[int]]
) -> None:
    """With context ranks, or experts on several replicas, the first stages of all replicas come first."""
    section = actor(MegatronTable(**engine), 8, nodes=2)
    assert ranks(section) == expected
    last = shard_groups(section)[1].ranks[-1]
    assert (last.rank, last.node, last.replica, last.shard) == (7, 1, 1, 3)


@pytest.mark.parametrize("axes", [{"replicate": 4}, {"shard": 2}])
def test_an_axis_that_is_unset_takes_what_the_other_leaves(axes: dict[str, int]) -> None:
    section = actor(Fsdp2Table(**axes), 8)
    assert mesh_of(section) == Mesh(replicate=4, shard=2, axes={"replicate": 4, "shard": 2})
    assert ranks(section) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert built_mesh(section) == {"replicate": 4, "shard": 2}


def test_zero_is_one_group_and_ddp_none() -> None:
    assert ranks(actor(ZeroTable(kind="zero3"), 4)) == [[0, 1, 2, 3]]
    assert built_mesh(actor(ZeroTable(stage=1), 4)) == {"shard": 4}
    assert (ranks(actor(DdpTable(), 4)), built_mesh(actor(DdpTable(), 4))) == ([], {})


def test_ranks_that_share_samples_lie_on_two_axes_more() -> None:
    """However the model is cut: whole on each rank, in one group, or in groups larger or smaller than theirs."""
    for engine in (DdpTable(), ZeroTable(), Fsdp2Table(), Fsdp2Table(shard=2, replicate=4)):
        section = actor(engine, 8).model_copy(update={"sequence_parallel": 4})
        assert [[rank.rank for rank in group.ranks] for group in sequence_groups(section)] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
        ]
        last = sequence_groups(section)[1].ranks[3]
        assert (last.rank, last.data, last.sequence) == (7, 1, 3)
        axes = built_mesh(section)
        assert axes is not None
        assert axes.pop("sequence") == 4
        assert axes == built_mesh(actor(engine, 8))
    assert sequence_groups(actor(Fsdp2Table(), 8)) == []


# ── rules ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("engine", "key", "message", "hint"),
    [
        (
            {"shard": 4, "replicate": 1},
            "shard",
            "4 × 1 = 4, but actor has 8",
            "actor.processes = 4 would fit, or actor.engine.rep",
        ),
        ({"shard": 3}, "shard", "3 × 2 = 6, but actor has 8", "actor.engine.shard = 1, 2, 4 or 8"),
        ({"replicate": 3}, "replicate", "cannot be shared out to 3 groups", "replicate = 1, 2, 4 or 8 would fit"),
    ],
)
def test_a_mesh_that_does_not_give_the_processes(engine: dict[str, Any], key: str, message: str, hint: str) -> None:
    (problem,) = problems(engine, processes=8)
    assert problem.key == f"actor.engine.{key}"
    assert message in problem.message
    assert hint in problem.hint


def test_keys_without_effect() -> None:
    (problem,) = problems({"offload": "cpu"})
    assert (problem.key, problem.hint) == ("actor.engine.offload", "remove the key")
    assert problems({"offload": "cpu"}, devices=(0,)) == []
    ref = {"engine": {"kind": "fsdp2", "sync_every_micro_batch": True}}
    problem = only_problem(raw_spec(ref=ref, algorithm={"kl_coef": 0.1}))
    assert (problem.key, problem.value) == ("ref.engine.sync_every_micro_batch", "true")
    assert problem.message.startswith("has no effect")

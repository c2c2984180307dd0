"""What an algorithm says of itself: its two tables, what it needs, and against what its ratio is taken."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from specs.errors import RlctlError
from specs.load.keys import kind_of, tables_of
from specs.schema.algorithms.algorithm import Algorithm
from specs.schema.algorithms.algorithm_tables import (
    AdvantageTable,
    AlgorithmTable,
    Cispo,
    CispoLoss,
    DrGrpo,
    GroupCentredWhitened,
    GroupRelative,
    Grpo,
    Gspo,
    GspoLoss,
    LeaveOneOut,
    LengthWeighted,
    LossTable,
    Opo,
    PpoClip,
    ReinforcePlusPlusBaseline,
    Rloo,
    Sapo,
    SapoLoss,
    read_loss,
)

ROOT = Path(__file__).resolve().parents[4]
BASE = ("tokens_T", "loss_mask_T", "advantage_T", "rollout_logprob_T")


def test_flat_keys_reach_their_tables() -> None:
    grpo = Grpo(kind="grpo", group_size=4, scale="none", clip_high=0.28, dual_clip=3.0, kl_coef=0.1)
    assert grpo.advantage == GroupRelative(scale="none")
    assert grpo.loss("trainer") == PpoClip(anchor="trainer", clip_high=0.28, dual_clip=3.0, kl_coef=0.1)


def test_the_settings_of_the_papers() -> None:
    rloo, gspo = Rloo(kind="rloo", group_size=2), Gspo(kind="gspo", group_size=2)
    assert (rloo.advantage, gspo.advantage) == (LeaveOneOut(), GroupRelative(scale="std"))
    assert rloo.loss("current") == PpoClip(anchor="current", loss_aggregation="seq-mean-token-sum")
    assert gspo.loss("current") == GspoLoss(anchor="current", clip_low=3e-4, clip_high=4e-4)
    assert gspo.loss("current").loss_aggregation == "seq-mean-token-mean"
    dr_grpo, opo = DrGrpo(kind="dr_grpo", group_size=2), Opo(kind="opo", group_size=2)
    assert dr_grpo.advantage == GroupRelative(scale="none")
    assert dr_grpo.loss("current") == PpoClip(anchor="current", loss_aggregation="token-sum-constant")
    assert opo.advantage == LengthWeighted()
    assert opo.loss("current") == PpoClip(anchor="current", loss_aggregation="seq-mean-token-sum")
    baseline = ReinforcePlusPlusBaseline(kind="reinforce++_baseline", group_size=2)
    assert (baseline.advantage, baseline.loss("current")) == (GroupCentredWhitened(), PpoClip(anchor="current"))
    assert Cispo(kind="cispo", group_size=2).loss("trainer") == CispoLoss(anchor="trainer", clip_high=4.0)
    sapo = Sapo(kind="sapo", group_size=2).loss("trainer")
    assert (sapo, sapo.loss_aggregation) == (SapoLoss(anchor="trainer"), "seq-mean-token-mean")


@pytest.mark.parametrize(
    ("updates", "runs_ahead", "anchor", "more"),
    [
        ({}, False, "current", ()),
        ({"mini_batches_per_step": 2}, False, "trainer", ("old_logprob_T",)),
        ({"epochs_per_step": 2}, False, "trainer", ("old_logprob_T",)),
        ({}, True, "sampler", ()),
        ({"mini_batches_per_step": 2, "kl_coef": 0.1}, True, "sampler", ("ref_logprob_T",)),
        ({"epochs_per_step": 2, "kl_coef": 0.1}, False, "trainer", ("old_logprob_T", "ref_logprob_T")),
    ],
)
@pytest.mark.parametrize("table", tables_of(AlgorithmTable))
def test_the_anchor_and_the_columns_it_needs(
    table: type[Algorithm], updates: dict[str, Any], runs_ahead: bool, anchor: str, more: tuple[str, ...]
) -> None:
    algorithm = table.model_validate({"kind": kind_of(table), "group_size": 4, "kl_in": "loss", **updates})
    loss = algorithm.loss(algorithm.ratio_against(runs_ahead=runs_ahead))
    assert loss.anchor == anchor
    covariant = ("covariant_T",) if "_cov" in algorithm.kind else ()
    assert loss.columns == (*BASE, *more, *covariant)
    assert loss.needs_ref == ("kl_coef" in updates)


@pytest.mark.parametrize("table", tables_of(AlgorithmTable))
def test_every_key_reaches_a_table_or_is_read_by_the_driver(table: type[Algorithm]) -> None:
    keys = {*table.advantage_table.model_fields, *table.loss_table.model_fields, *Algorithm.model_fields}
    keys |= {"value_clip", "value_loss_aggregation", "critic_warmup_steps"}  # `value_loss` and `actor_starts_after`
    assert set(table.model_fields) <= keys
    assert set(table.loss_table.ratio_keys) <= set(table.model_fields)


def test_no_other_file_asks_which_algorithm_it_is() -> None:
    """Names of algorithms, advantages and losses stand in their tables alone (and in what other programs call them)."""
    unions = (AlgorithmTable, AdvantageTable, LossTable)
    names = {kind_of(table) for union in unions for table in tables_of(union)}
    tables = {f"specs/schema/algorithms/{name}.py" for name in ("algorithm", "algorithm_tables")}
    allowed = {*tables, "specs/load/synonyms.py"}
    files = [file for wing in ("specs", "rlctl", "workers", "backends") for file in (ROOT / wing).rglob("*.py")]
    found = {
        str(file.relative_to(ROOT)): name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(name := node.value, str) and name in names
    }
    assert {file: name for file, name in found.items() if file not in allowed} == {}
    assert found.keys() == allowed  # the search finds what there is


def test_a_loss_travels_whole() -> None:
    for loss in (PpoClip(anchor="sampler", dual_clip=2.0), GspoLoss(anchor="trainer", kl_coef=0.5)):
        assert read_loss(json.loads(json.dumps(loss.model_dump()))) == loss


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"kind": "none", "anchor": "current"}, "'none'.*'ppo_clip', 'gspo'"),
        ({"kind": "gspo"}, "gspo.anchor: Field required"),
        ({"kind": "ppo_clip", "anchor": "current", "tau": 1.0}, "ppo_clip.tau: Extra inputs"),
    ],
)
def test_a_rank_refuses_a_loss_that_it_does_not_know(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(RlctlError, match=rf"(?s)the update's loss cannot be used: .*{said}.*same version of rlctl"):
        read_loss(raw)

"""What a preset makes of its keys: an advantage, a loss, and against what the loss's ratio is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from specs.errors import RlctlError
from specs.schema.algorithms.algorithm import Advantage, Loss
from specs.schema.algorithms.algorithm_tables import (
    PRESETS,
    CispoLoss,
    ClipCovLoss,
    Gae,
    GmpoLoss,
    GreedyBaseline,
    GroupCentredWhitened,
    GroupRelative,
    GspoLoss,
    KlCovLoss,
    LeaveOneOut,
    LengthWeighted,
    PpoClip,
    ReturnToGo,
    SapoLoss,
    Teacher,
    read_loss,
)

BASE = ("tokens_T", "loss_mask_T", "advantage_T", "rollout_logprob_T")
MEAN_OF_MEANS, SUM_OF_COMPLETION = "seq-mean-token-mean", "seq-mean-token-sum"


@pytest.mark.parametrize(
    ("kind", "advantage", "loss"),
    [
        ("grpo", GroupRelative(), PpoClip(anchor="trainer")),
        ("dapo", GroupRelative(), PpoClip(anchor="trainer", clip_high=0.28)),
        ("dr_grpo", GroupRelative(scale="none"), PpoClip(anchor="trainer", loss_aggregation="token-sum-constant")),
        ("rloo", LeaveOneOut(), PpoClip(anchor="trainer", loss_aggregation=SUM_OF_COMPLETION)),
        ("reinforce++", ReturnToGo(), PpoClip(anchor="trainer")),
        ("reinforce++_baseline", GroupCentredWhitened(), PpoClip(anchor="trainer")),
        ("remax", GreedyBaseline(), PpoClip(anchor="trainer", loss_aggregation=SUM_OF_COMPLETION)),
        ("opo", LengthWeighted(), PpoClip(anchor="trainer", loss_aggregation=SUM_OF_COMPLETION)),
        ("gspo", GroupRelative(), GspoLoss(anchor="trainer", clip_low=3e-4, loss_aggregation=MEAN_OF_MEANS)),
        ("gmpo", GroupRelative(), GmpoLoss(anchor="trainer", clip_low=0.4, loss_aggregation=MEAN_OF_MEANS)),
        ("cispo", GroupRelative(), CispoLoss(anchor="trainer", clip_high=4.0)),
        ("sapo", GroupRelative(), SapoLoss(anchor="trainer", loss_aggregation=MEAN_OF_MEANS)),
        ("clip_cov", GroupRelative(), ClipCovLoss(anchor="trainer")),
        ("kl_cov", GroupRelative(), KlCovLoss(anchor="trainer")),
        ("ppo", Gae(), PpoClip(anchor="trainer")),
        ("distill", Teacher(), PpoClip(anchor="trainer")),
    ],
)
def test_the_presets_of_the_papers(kind: str, advantage: Advantage, loss: Loss) -> None:
    algorithm = PRESETS[kind](kind=kind, group_size=2)
    assert (algorithm.advantage, algorithm.loss("trainer")) == (advantage, loss)


def test_a_preset_has_the_keys_of_its_own_tables_alone() -> None:
    for key, value in {"gae_lambda": 0.9, "covariance_low": 1.0, "corrected": True, "value_clip": 0.2}.items():
        with pytest.raises(ValidationError, match="Extra inputs"):
            PRESETS["grpo"].model_validate({"kind": "grpo", "group_size": 2, key: value})


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
def test_the_anchor_and_the_columns_it_needs(
    updates: dict[str, Any], runs_ahead: bool, anchor: str, more: tuple[str, ...]
) -> None:
    for kind, covariant in (("grpo", ()), ("kl_cov", ("covariant_T",))):
        algorithm = PRESETS[kind].model_validate({"kind": kind, "group_size": 4, **updates})
        loss = algorithm.loss(algorithm.ratio_against(runs_ahead=runs_ahead))
        assert (loss.anchor, loss.columns) == (anchor, (*BASE, *more, *covariant))
        assert ("ref_logprob_T" in loss.columns) == ("kl_coef" in updates)


def test_a_loss_travels_whole() -> None:
    for loss in (PpoClip(anchor="sampler", dual_clip=2.0), GspoLoss(anchor="trainer", kl_coef=0.5)):
        assert read_loss(json.loads(json.dumps(loss.model_dump()))) == loss
    for raw in (
        {"kind": "simpo", "gamma": 0.2},
        {"kind": "bradley_terry"},
        {"kind": "mixture", "mixture": [{"kind": "hinge"}, {"kind": "nll", "weight": 2}]},
    ):
        objective = read_loss(raw)
        assert objective.kind == raw["kind"]
        assert read_loss(json.loads(json.dumps(objective.model_dump()))) == objective


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

"""The KL in the reward and its weight, against numbers worked out by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from backends.fake.fake_losses import fake_policy_loss
from backends.token_metrics import TokenColumns
from rlctl.loop.kl_control import KlController, token_kl
from specs.errors import CheckpointError
from specs.schema.algorithms.algorithm import KlEstimator
from specs.schema.algorithms.algorithm_tables import PRESETS, PpoClip
from specs.wire.batch import Batch

IN_REWARD = {"kind": "grpo", "group_size": 2, "kl_coef": 0.5, "kl_in": "reward"}


def two_rollouts() -> Batch:
    """Masks 0 1 0 1 and 0 1; log-probs that differ from the reference's by 1, 2 and -1 at loss tokens."""
    columns = {
        "length_B": np.array([4, 2]),
        "loss_mask_T": np.array([0, 1, 0, 1, 0, 1], np.uint8),
        "old_logprob_T": np.array([7.0, -1.0, 7.0, -2.0, 7.0, -3.0], np.float32),
        "ref_logprob_T": np.array([0.0, -2.0, 0.0, -4.0, np.nan, -2.0], np.float32),
        "group_B": np.array([4, 4]),
        "rollout_B": np.array([0, 1]),
    }
    return Batch(columns)


@pytest.mark.parametrize(
    ("estimator", "values"),
    [
        ("k1", [1.0, 2.0, -1.0]),
        ("k2", [0.5, 2.0, 0.5]),
        ("k3", [math.exp(-1), math.exp(-2) + 1, math.e - 2]),
        ("k1-straight-through", [1.0, 2.0, -1.0]),
    ],
)
def test_the_penalty_by_hand(estimator: KlEstimator, values: list[float]) -> None:
    controller = KlController(PRESETS["grpo"].model_validate({**IN_REWARD, "kl_estimator": estimator}))
    penalty_T = controller.penalty_T(two_rollouts())
    assert penalty_T is not None
    half = [0.5 * value for value in values]
    assert penalty_T.tolist() == pytest.approx([0, half[0], 0, half[1], 0, half[2]], rel=1e-6)
    found = controller.after_step({}, 2)
    assert found == pytest.approx(
        {"actor/kl": sum(values) / 3, "reward/kl_penalty": sum(half) / 2, "actor/kl_coef": 0.5}
    )


def fake_kl(d: float, estimator: KlEstimator) -> float:
    """The KL that the fake engine puts into a loss whose every other term is 0."""
    one, zero = np.ones(1), np.zeros(1)
    columns = TokenColumns(one, zero, zero, None, zero + d)
    loss = PpoClip(anchor="current", kl_coef=1.0, kl_estimator=estimator)
    return fake_policy_loss(zero, zero, columns, loss).sums["loss"]


@pytest.mark.parametrize("estimator", ["k2", "k3", "k1-straight-through", "k3-straight-through"])
def test_the_driver_and_the_losses_mean_the_same(estimator: KlEstimator) -> None:
    for d in (-3.0, -0.1, 0.0, 0.4, 2.0):
        assert token_kl(estimator, np.zeros(1), np.array([d]))[0] == pytest.approx(fake_kl(d, estimator))


def test_the_weight_by_hand() -> None:
    """Ziegler et al. 2019: at twice the target and more β grows by 20 % of rollouts / horizon, at half of it and less
    it falls by as much, in between by the relative error."""
    keys = {"kind": "grpo", "group_size": 2, "kl_coef": 0.5, "kl_target": 0.1, "kl_horizon": 400}
    controller, seen = KlController(PRESETS["grpo"].model_validate(keys)), []
    for kl in (0.3, 0.05, 0.11, 0.1, -4.0):
        seen.append(controller.after_step({"actor/kl": kl}, 100)["actor/kl_coef"])
    want = [0.5, 0.5 * 1.05, 0.5 * 1.05 * 0.95, 0.5 * 1.05 * 0.95 * 1.025, 0.5 * 1.05 * 0.95 * 1.025]
    assert seen == pytest.approx(want)
    assert controller.coef == pytest.approx(want[-1] * 0.95)
    assert controller.in_loss(PpoClip(anchor="current", kl_coef=0.5)).kl_coef == controller.coef
    assert KlController(PRESETS["grpo"].model_validate({**keys, "kl_target": None})).coef == 0.5


def test_a_teachers_distance_is_measured_where_the_loss_has_no_kl() -> None:
    """By k1 its mean is 2/3, over the target; the KL of the loss is below it, and steers."""
    keys = {"kind": "distill", "group_size": 1}
    held = {**keys, "kl_coef": 0.5, "kl_target": 0.1, "kl_horizon": 400}
    alone, beside = (KlController(PRESETS["distill"].model_validate(each)) for each in (keys, held))
    assert (alone.penalty_T(two_rollouts()), beside.penalty_T(two_rollouts())) == (None, None)
    assert alone.after_step({"actor/kl": 0.0}, 100) == {"actor/kl": pytest.approx(2 / 3)}
    assert beside.after_step({"actor/kl": 0.05}, 100) == {"actor/kl_coef": 0.5}
    assert beside.coef == pytest.approx(0.5 * 0.95)


def test_the_weight_goes_through_a_checkpoint_to_the_bit() -> None:
    algorithm = PRESETS["grpo"].model_validate({**IN_REWARD, "kl_target": 0.1, "kl_horizon": 777})
    controller = KlController(algorithm)
    controller.after_step({"actor/kl": 0.1 + 1e-9}, 13)
    again = KlController(algorithm)
    again.restore(json.loads(json.dumps({"step": 3, **controller.save()})))
    assert again.coef == controller.coef != 0.5
    with pytest.raises(CheckpointError, match="no kl_coef"):
        again.restore({"step": 3})

"""Token losses against hand-computed numbers, and against numpy with derivatives written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from train_helpers import grpo, make_batch, scale_of

from backends.fake.losses import grpo_terms
from backends.protocol import LossScale
from backends.train.losses import LOSS_SUMS, TokenColumns, clipped_policy_loss, grpo_loss, kl_estimate
from backends.train.packing import loss_weight_T
from specs.batch import Batch


def policy(ratio: float, advantage: float, **kwargs: float | None) -> tuple[float, float, bool]:
    """Loss, its derivative by the log-prob, and whether it was clipped, of one token."""
    logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    values = {"clip_low": 0.2, "clip_high": 0.28, **kwargs}
    out = clipped_policy_loss(logprob, torch.zeros(1).double(), torch.tensor([advantage]).double(), **values)
    out.loss_N.sum().backward()
    return out.loss_N.item(), logprob.grad.item(), out.clipped_N.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, None, -2.0, -2.0, False),
        (1.1, 2.0, None, -2.2, -2.2, False),  # inside the range
        (1.5, 2.0, None, -2.56, 0.0, True),  # above 1 + 0.28: no more push
        (0.5, 2.0, None, -1.0, -1.0, False),  # below, but the advantage pulls it back
        (0.5, -2.0, None, 1.6, 0.0, True),  # below 1 - 0.2
        (1.5, -2.0, None, 3.0, 3.0, False),
        (5.0, -2.0, None, 10.0, 10.0, False),
        (5.0, -2.0, 3.0, 6.0, 0.0, True),  # dual clip bounds it at 3·2
        (2.0, -2.0, 3.0, 4.0, 4.0, False),
        (5.0, 2.0, 3.0, -2.56, 0.0, True),  # dual clip is for negative advantages only
    ],
)
def test_clipped_surrogate_by_hand(
    ratio: float, advantage: float, dual: float | None, loss: float, slope: float, clipped: bool
) -> None:
    got = policy(ratio, advantage, dual_clip=dual)
    assert got[:2] == pytest.approx((loss, slope))
    assert got[2] is clipped


def test_ratio_is_bounded() -> None:
    assert policy(math.exp(30), -1.0)[0] == pytest.approx(math.exp(20))
    assert policy(math.exp(30), -1.0)[1] == 0


@pytest.mark.parametrize(
    ("estimator", "d", "value", "slope"),  # slope: by the log-prob, so minus the one by d
    [
        ("k2", 0.5, 0.125, -0.5),
        ("k3", 0.5, math.exp(0.5) - 1.5, 1 - math.exp(0.5)),
        ("k3", -0.5, math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
        ("k3", 5.0, 10.0, 0.0),  # exp(5) - 6 is over the bound
        ("k3-straight-through", 0.5, math.exp(0.5) - 1.5, -0.5),
    ],
)
def test_kl_estimators_by_hand(estimator: str, d: float, value: float, slope: float) -> None:
    logprob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    kl = kl_estimate(logprob, torch.tensor([-1.0 + d], dtype=torch.float64), estimator)
    kl.sum().backward()
    assert kl.item() == pytest.approx(value)
    assert logprob.grad.item() == pytest.approx(slope)


def test_kl_gradient_is_right_in_expectation() -> None:
    """E over the actor of the straight-through form's gradient is the gradient of KL(actor ‖ ref)."""
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.0, 0.5, -0.5], dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    (true_grad,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
    sampled = (logp.detach().exp() * kl_estimate(logp, ref, "k3-straight-through")).sum()
    (estimated,) = torch.autograd.grad(sampled, logits)
    torch.testing.assert_close(estimated, true_grad)


SETTINGS = [
    {},
    {"clip_high": 0.28, "dual_clip": 1.5},
    {"kl_coef": 0.3, "kl_estimator": "k2"},
    {"kl_coef": 0.3, "kl_estimator": "k3", "entropy_coef": 0.1},
    {"kl_coef": 0.3, "kl_estimator": "k3-straight-through", "entropy_coef": -0.1},
]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("against", ["current", "trainer", "sampler"])
def test_against_numpy_with_written_out_derivatives(setting: dict[str, float], against: str) -> None:
    rng = np.random.default_rng(0)
    count = 400
    logprob, old, ref, rollout = (rng.normal(-2, 1.0, count) for _ in range(4))
    weight, advantage, entropy = rng.random(count), rng.normal(size=count), rng.random(count)
    algorithm = grpo(**setting)
    kl_on = bool(setting.get("kl_coef"))
    expected = grpo_terms(
        logprob,
        entropy,
        weight,
        advantage,
        rollout,
        old if against == "trainer" else None,
        ref if kl_on else None,
        algorithm,
        against == "sampler",
    )
    lp, ent, *columns = (
        torch.tensor(column, requires_grad=i < 2)
        for i, column in enumerate((logprob, entropy, weight, advantage, rollout, old, ref))
    )
    given = TokenColumns(
        *columns[:3], columns[3] if against == "trainer" else None, columns[4] if kl_on else None, against == "sampler"
    )
    loss, sums, gap_max = grpo_loss(lp, ent, given, algorithm)
    loss.backward()
    np.testing.assert_allclose(lp.grad.numpy(), expected.by_logprob_N, rtol=1e-9, atol=1e-12)
    if algorithm.entropy_coef:
        np.testing.assert_allclose(ent.grad.numpy(), expected.by_entropy_N, rtol=1e-9, atol=1e-12)
    assert dict(zip(LOSS_SUMS, sums.tolist(), strict=True)) == pytest.approx(expected.sums, rel=1e-9, abs=1e-9)
    assert gap_max.item() == pytest.approx(expected.logprob_gap_max)
    assert loss.item() == pytest.approx(expected.loss)


def test_the_ratio_against_an_older_sampler_by_hand() -> None:
    """A token that the sampler gave 1/4 and the trainer now gives 1/2: the ratio is 2, clipped at 1.28, and
    the gap is what was learned in between."""
    half, quarter = (torch.tensor([math.log(p)], dtype=torch.float64) for p in (0.5, 0.25))
    one = torch.ones(1, dtype=torch.float64)
    columns = TokenColumns(one, 3.0 * one, quarter, None, None, sampler_is_old=True)
    for part in (columns, columns.slice(0, 1)):
        loss, sums, gap_max = grpo_loss(half, one, part, grpo(clip_high=0.28))
        named = dict(zip(LOSS_SUMS, sums.tolist(), strict=True))
        assert loss.item() == pytest.approx(-3.0 * 1.28)
        assert (named["ratio"], named["clipped"]) == (pytest.approx(2.0), 1.0)
        assert named["logprob_gap"] == gap_max.item() == pytest.approx(math.log(2.0))


def test_aggregations_by_hand() -> None:
    """Two sequences with losses (1, 2, 3) and (4,); one more without a loss token."""
    batch = Batch(
        {
            "length_B": np.array([4, 2, 2]),
            "tokens_T": np.zeros(8, dtype=np.int32),
            "loss_mask_T": np.array([0, 1, 1, 1, 0, 1, 0, 0], dtype=np.int8),
        }
    )
    loss_T = np.array([0, 1, 2, 3, 0, 4, 0, 0])
    scale = LossScale(num_loss_tokens=4, num_sequences=2, max_response_tokens=5)
    expected = {
        "token-mean": 10 / 4,
        "seq-mean-token-mean": (2 + 4) / 2,
        "seq-mean-token-sum": (6 + 4) / 2,
        "token-sum-constant": 10 / (5 * 2),
    }
    for aggregation, value in expected.items():
        assert (loss_weight_T(batch, aggregation, scale) * loss_T).sum() == pytest.approx(value), aggregation


AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum-constant"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_share_of_the_batch_weighs_what_it_does_in_the_whole(aggregation: str) -> None:
    """Ranks hold unequal shares: only the global counts may divide."""
    batch = make_batch()
    scale, order = scale_of(batch), np.argsort(batch["length_B"])
    whole_T = loss_weight_T(batch, aggregation, scale)
    for share in (order[:2], order[2:]):
        np.testing.assert_array_equal(
            loss_weight_T(batch.select(share), aggregation, scale), whole_T[batch.token_index(share)]
        )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregations_against_a_slow_loop(aggregation: str) -> None:
    batch, rng = make_batch(), np.random.default_rng(1)
    scale = scale_of(batch)
    loss_T = rng.normal(size=batch.num_tokens)
    total = 0.0
    for losses, mask in zip(np.split(loss_T, batch.offsets[1:-1]), batch.sequences("loss_mask_T"), strict=True):
        chosen = [loss for loss, on in zip(losses, mask, strict=True) if on]
        if not chosen:
            continue
        if aggregation == "token-mean":
            total += sum(chosen) / scale.num_loss_tokens
        elif aggregation == "seq-mean-token-mean":
            total += sum(chosen) / len(chosen) / scale.num_sequences
        elif aggregation == "seq-mean-token-sum":
            total += sum(chosen) / scale.num_sequences
        else:
            total += sum(chosen) / (scale.max_response_tokens * scale.num_sequences)
    assert (loss_weight_T(batch, aggregation, scale) * loss_T).sum() == pytest.approx(total, rel=1e-5)

"""Token losses against hand-computed numbers, and against numpy with derivatives written out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from train_helpers import grpo, gspo, make_batch, scale_of

from backends.fake.fake_losses import fake_policy_loss
from backends.packed.packing import loss_weight_T
from backends.token_metrics import SOURCES, TokenColumns
from backends.train.losses import LOSSES, clipped_surrogate, kl_estimate, policy_loss, sequence_columns
from specs.schema.algorithms.algorithm import Anchor, Loss
from specs.schema.algorithms.algorithm_tables import (
    LOSS_TABLES,
    CispoLoss,
    ClipCovLoss,
    GmpoLoss,
    GspoLoss,
    KlCovLoss,
    SapoLoss,
)
from specs.wire.batch import Batch


def policy(ratio: float, advantage: float, **kwargs: float | None) -> tuple[float, float, bool]:
    """Loss, its derivative by the log-prob, and whether it was clipped, of one token."""
    logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    values = {"clip_low": 0.2, "clip_high": 0.28, **kwargs}
    out = clipped_surrogate(logprob, torch.tensor([advantage]).double(), **values)
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


@pytest.mark.parametrize(
    ("estimator", "d", "value", "slope"),  # slope: by the log-prob, so minus the one by d
    [
        ("k2", 0.5, 0.125, -0.5),
        ("k3", 0.5, math.exp(0.5) - 1.5, 1 - math.exp(0.5)),
        ("k3", -0.5, math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
        ("k3", 5.0, 10.0, 0.0),  # exp(5) - 6 is over the bound
        ("k3-straight-through", 0.5, math.exp(0.5) - 1.5, -0.5),
        ("k1-straight-through", 0.5, -0.5, -0.5),
        ("k3-unbiased", 0.5, math.e * (math.exp(0.5) - 1.5), math.e * -0.5),  # the anchor is one nat below
        ("k3-unbiased", 5.0, math.e * 10.0, math.e * -5.0),
    ],
)
def test_kl_estimators_by_hand(estimator: str, d: float, value: float, slope: float) -> None:
    logprob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    kl = kl_estimate(logprob, torch.tensor([-1.0 + d], dtype=torch.float64), logprob.detach() - 1, estimator)
    kl.sum().backward()
    assert kl.item() == pytest.approx(value)
    assert logprob.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize(
    ("estimator", "sampler"),
    [("k2", None), ("k1-straight-through", None), ("k3-straight-through", None), ("k3-unbiased", [1.0, 1.0, -2.0])],
)
def test_kl_gradient_is_right_in_expectation(estimator: str, sampler: list[float] | None) -> None:
    """E over the actor of the straight-through forms' gradient is the gradient of KL(actor ‖ ref), and k2's is; the
    unbiased one's is, over any sampler."""
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.0, 0.5, -0.5], dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    (true_grad,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
    anchor = torch.log_softmax(torch.tensor(sampler, dtype=torch.float64), 0) if sampler else logp.detach()
    sampled = (anchor.exp() * kl_estimate(logp, ref, anchor, estimator)).sum()
    (estimated,) = torch.autograd.grad(sampled, logits)
    torch.testing.assert_close(estimated, true_grad)


SETTINGS = [{"clip_high": 0.28}, {"kl_coef": 0.3, "entropy_coef": 0.1}]


@pytest.mark.parametrize("loss", [grpo(**setting) for setting in SETTINGS], ids=str)
@pytest.mark.parametrize(
    ("anchor", "corrected"), [("current", False), ("trainer", False), ("sampler", False), ("trainer", True)]
)
def test_against_numpy_with_written_out_derivatives(loss: Loss, anchor: Anchor, corrected: bool) -> None:
    rng = np.random.default_rng(0)
    count, loss = 400, loss.model_copy(update={"anchor": anchor, "corrected": corrected})
    logprob, old, ref, rollout = (rng.normal(-2, 1.0, count) for _ in range(4))
    weight, advantage, entropy, _ = rng.random(count), *rng.normal(size=(3, count))
    optional = (old if anchor == "trainer" else None, ref if loss.kl_coef else None)
    correction = rng.random(count) * (rng.random(count) > 0.2) if corrected else None
    columns = TokenColumns(weight, advantage, rollout, *optional, correction_N=correction)
    expected = fake_policy_loss(logprob, entropy, columns, loss)
    lp, ent = (torch.tensor(column, requires_grad=True) for column in (logprob, entropy))
    value, sums, maxima = policy_loss(lp, ent, columns.each(torch.from_numpy), loss)
    value.backward()
    np.testing.assert_allclose(lp.grad.numpy(), expected.by_value_N, rtol=1e-9, atol=1e-12)
    if loss.entropy_coef:
        np.testing.assert_allclose(ent.grad.numpy(), expected.by_entropy_N, rtol=1e-9, atol=1e-12)
    assert dict(zip(loss.summed(), sums.tolist(), strict=True)) == pytest.approx(expected.sums, rel=1e-9, abs=1e-9)
    assert dict(zip(loss.maxima(), maxima.tolist(), strict=True)) == pytest.approx(expected.maxima)


@pytest.mark.parametrize(
    "loss",
    [
        SapoLoss(anchor="trainer", tau_positive=0.5, tau_negative=3.0, entropy_coef=0.1),
        ClipCovLoss(anchor="trainer", clip_low=0.2, clip_high=0.3),
        KlCovLoss(anchor="trainer", covariance_kl_coef=0.7, kl_coef=0.3),
        grpo(clip_high=0.28, dual_clip=1.5, kl_coef=0.3, kl_estimator="k2"),
    ],
    ids=lambda loss: loss.kind,
)
def test_gradients_against_finite_differences(loss: Loss) -> None:
    """Of the losses that stop no gradient on the way; the others have theirs by hand below."""
    rng, count = np.random.default_rng(0), 60
    logprob, old, ref, rollout = (torch.from_numpy(rng.normal(-2, 0.5, count)) for _ in range(4))
    weight, entropy = (torch.from_numpy(rng.random(count)) for _ in range(2))
    chosen = torch.from_numpy((rng.random(count) > 0.7).astype(float))
    columns = TokenColumns(
        weight, torch.from_numpy(rng.normal(size=count)), rollout, old, ref, correction_N=weight, covariant_N=chosen
    )
    given = (logprob.requires_grad_(), entropy.requires_grad_(bool(loss.entropy_coef)))
    assert torch.autograd.gradcheck(lambda lp, ent: policy_loss(lp, ent, columns, loss)[0], given)


def test_gmpo_by_hand() -> None:
    """Log-ratios 0.2 and 1.0, clipped at 0.4: the geometric mean is exp(0.3); pushed down it is exp(0.6), since only
    the lower clip counts there. Loss and gradient of the mean are -A·GM and, at tokens inside, -A·GM/2."""
    sequence_T, ratio_T, loss = np.array([0, 0]), np.array([0.2, 1.0]), GmpoLoss(anchor="trainer")
    means = LOSSES[GmpoLoss].sequences(ratio_T, lambda value_T: np.array([value_T.mean()]), loss)
    assert {name: column_B.tolist() for name, column_B in means.items()} == {
        "log_ratio_up_B": [pytest.approx(0.3)],
        "log_ratio_down_B": [pytest.approx(0.6)],
    }
    for advantage, mean, slopes in ((2.0, 0.3, (0.5, 0.0)), (-2.0, 0.6, (0.5, 0.5))):
        lp = torch.tensor(ratio_T, requires_grad=True)
        half, zero = torch.full((2,), 0.5, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        of_sequence = {name: torch.tensor(column_B[sequence_T]) for name, column_B in means.items()}
        value, *_ = policy_loss(
            lp, zero, TokenColumns(half, 4 * half * advantage / 2, zero, zero, None, of_sequence), loss
        )
        value.backward()
        assert value.item() == pytest.approx(-advantage * math.exp(mean))
        assert lp.grad.tolist() == pytest.approx([-advantage * math.exp(mean) * slope for slope in slopes])


def test_tokens_of_high_covariance_by_hand() -> None:
    """A = 2 at ratio e^0.5, the first token chosen: without it -2·e^0.5 and that gradient at the second alone; with
    |log ratio| and weight 3 the first has 1.5 more, and 3 more of gradient. At ratio 1 the KL has no gradient."""
    lp, one = torch.tensor([0.5, 0.5], dtype=torch.float64, requires_grad=True), torch.ones(2, dtype=torch.float64)
    chosen, plain = torch.tensor([1.0, 0.0], dtype=torch.float64), -2 * math.exp(0.5)
    columns = TokenColumns(one, 2 * one, 0 * one, 0 * one, None, covariant_N=chosen)
    for loss, value, slopes in (
        (ClipCovLoss(anchor="trainer"), plain, [0.0, plain]),
        (KlCovLoss(anchor="trainer", covariance_kl_coef=3.0), 2 * plain + 1.5, [plain + 3.0, plain]),
        (KlCovLoss(anchor="current", covariance_kl_coef=3.0), -4.0, [-2.0, -2.0]),
    ):
        given = replace(columns, old_logprob_N=None) if loss.anchor == "current" else columns
        total, sums, _ = policy_loss(lp, one, given, loss)
        (slope,) = torch.autograd.grad(total, lp)
        assert (total.item(), slope.tolist()) == (pytest.approx(value), pytest.approx(slopes))
        assert dict(zip(loss.summed(), sums.tolist(), strict=True))["clipped"] == 1.0


def test_the_kl_at_chosen_tokens_does_not_follow_the_sign_of_a_rounding_error() -> None:
    lp, one = torch.full((2,), -1.5, dtype=torch.float64, requires_grad=True), torch.ones(2, dtype=torch.float64)
    anchor = lp.detach() + torch.tensor([5e-7, -5e-7], dtype=torch.float64)
    columns = TokenColumns(one, 0 * one, anchor, None, None, covariant_N=one)
    total, *_ = policy_loss(lp, one, columns, KlCovLoss(anchor="sampler", covariance_kl_coef=3.0))
    (slope,) = torch.autograd.grad(total, lp)
    assert total.item() == pytest.approx(3e-6)
    assert slope.abs().max().item() < 0.05


@pytest.mark.parametrize(
    ("ratio", "advantage", "bounds", "value", "slope", "clipped"),
    [
        (1.5, 2.0, {}, -3.0, -3.0, 0.0),
        (3.0, 2.0, {}, -4.0, 0.0, 1.0),
        (3.0, 2.0, {"clip_high": 0.5}, -3.0, 0.0, 1.0),
        (3.0, -2.0, {}, 6.0, 6.0, 0.0),
        (0.25, -2.0, {}, 0.5, 0.5, 0.0),
        (0.25, -2.0, {"clip_low": 0.5}, 1.0, 0.0, 1.0),
    ],
)
def test_clip_covs_bounds_by_hand(
    ratio: float, advantage: float, bounds: dict[str, float], value: float, slope: float, clipped: float
) -> None:
    """A token that is not chosen: ratios of up to 2 by default, as in the authors' runs, and any below."""
    lp, one = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True), torch.ones(1).double()
    columns = TokenColumns(one, advantage * one, 0 * one, 0 * one, None, covariant_N=0 * one)
    loss = ClipCovLoss(anchor="trainer", **bounds)
    total, sums, _ = policy_loss(lp, one, columns, loss)
    assert total.item() == pytest.approx(value)
    assert torch.autograd.grad(total, lp)[0].item() == pytest.approx(slope)
    assert dict(zip(loss.summed(), sums.tolist(), strict=True))["clipped"] == clipped


def test_a_correction_weighs_the_policy_loss_alone() -> None:
    """At ratio 1 a token with A = 2 and weight 1/4 loses -0.5 and has the gradient -0.5; one with weight 0 keeps its KL
    and its entropy bonus. No gradient goes into the weight."""
    lp = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    correction = torch.tensor([0.25, 0.0], dtype=torch.float64, requires_grad=True)
    one = torch.ones(2, dtype=torch.float64)
    columns = TokenColumns(one, 2 * one, -one, -one, -one - 1, correction_N=correction.detach())
    loss = grpo(kl_coef=0.5, kl_estimator="k2", entropy_coef=0.1, corrected=True)
    for part, slope in ((columns.slice(0, 1), -0.5 + 0.5), (columns.slice(1, 2), 0.5)):
        lp.grad = None
        value, *_ = policy_loss(lp[:1], 3 * one[:1], part, loss)
        value.backward()
        assert value.item() == pytest.approx(-2 * float(part.correction_N[0]) + 0.5 * 0.5 - 0.1 * 3)
        assert lp.grad[0].item() == pytest.approx(slope)


# ── the tables ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("table", [table for table in LOSS_TABLES if issubclass(table, Loss)])
def test_every_loss_table_has_its_functions(table: type[Loss]) -> None:
    assert table in LOSSES
    assert bool(table.sequence_columns) == (LOSSES[table].sequences is not None)
    assert {metric.source for metric in table.metrics} <= set(SOURCES)
    assert len({metric.name for metric in table.metrics}) == len(table.metrics)


# ── gspo ──────────────────────────────────────────────────────────────────────────────────────────


def batch_of(*sequences: list[float | None], **columns: float) -> tuple[Batch, np.ndarray]:
    """A batch whose log-ratios are given token by token (None: not a loss token, and its log-prob is nonsense), and
    the current log-probs."""
    flat = [value for sequence in sequences for value in (None, *sequence)]
    mask_T = np.array([value is not None for value in flat], dtype=np.int8)
    old_T = np.linspace(-3, -1, len(flat)).astype(np.float32)
    now_T = np.where(mask_T, old_T + np.array([value or 0.0 for value in flat]), 77.0).astype(np.float32)
    lengths = np.array([len(sequence) + 1 for sequence in sequences])
    return Batch(
        {
            "length_B": lengths,
            "tokens_T": np.zeros(len(flat), dtype=np.int32),
            "loss_mask_T": mask_T,
            "old_logprob_T": old_T,
            "rollout_logprob_T": old_T,
        }
    ), now_T


@pytest.mark.parametrize("anchor", ["trainer", "sampler"])
def test_a_sequences_log_ratio_by_hand(anchor: Anchor) -> None:
    """Over loss tokens alone: a hole in the mask counts neither in the sum nor in the length."""
    batch, now_T = batch_of([0.1, None, None, 0.3], [-0.2], [None, None])
    found = sequence_columns(batch, gspo(anchor=anchor), lambda: now_T)["log_ratio_B"]
    assert found == pytest.approx([0.2, -0.2, 0.0], abs=1e-6)


def test_against_the_current_log_probs_no_pass_is_made() -> None:
    batch, _ = batch_of([0.1, 0.2], [0.3])

    def never() -> np.ndarray:
        raise AssertionError("a pass was made")

    assert sequence_columns(batch, gspo(anchor="current"), never)["log_ratio_B"].tolist() == [0.0, 0.0]
    assert sequence_columns(batch, grpo(), never) == {}


def sequence_ratio(log_ratios: list[float], advantage: float, **bounds: float) -> tuple[list[float], list[float]]:
    """Each token's loss and its derivative by the log-prob, of a sequence with these log-ratios."""
    old = torch.full((len(log_ratios),), -2.0, dtype=torch.float64)
    logprob = (old + torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_()
    one = torch.ones_like(old)
    mean = sum(log_ratios) / len(log_ratios)
    columns = TokenColumns(one, advantage * one, old, old, None, {"log_ratio_B": mean * one})
    out = LOSSES[GspoLoss].tokens(logprob, old, columns, gspo(**bounds))
    out.loss_N.sum().backward()
    return out.loss_N.tolist(), logprob.grad.tolist()


def test_gspo_by_hand() -> None:
    # ratios 2 and 1/2 of the tokens: the sequence's is 1, and nothing is clipped though each token would be
    loss, slope = sequence_ratio([math.log(2), -math.log(2)], 3.0, clip_low=0.1, clip_high=0.1)
    assert loss == pytest.approx([-3.0, -3.0])
    assert slope == pytest.approx([-3.0, -3.0])
    # 4 and 1: the sequence's is 2, over 1 + 0.5, so all its tokens stop
    loss, slope = sequence_ratio([math.log(4), 0.0], 1.0, clip_low=0.1, clip_high=0.5)
    assert loss == pytest.approx([-1.5, -1.5])
    assert slope == [0.0, 0.0]
    # with a negative advantage the same sequence is still pushed down, twice as hard as at ratio 1
    loss, slope = sequence_ratio([math.log(4), 0.0], -1.0, clip_low=0.1, clip_high=0.5)
    assert loss == pytest.approx([2.0, 2.0])
    assert slope == pytest.approx([2.0, 2.0])
    # and below 1 - 0.1 it is not
    assert sequence_ratio([-1.0, -1.0], -1.0, clip_low=0.1, clip_high=0.5)[1] == [0.0, 0.0]


def test_gspos_gradient_against_finite_differences_of_the_paper() -> None:
    """Zheng et al. 2025, eq. 5: Σ over sequences of min(s·A, clip(s)·A) / their number, s = exp(mean log-ratio)."""
    lengths, advantages = [3, 1, 4, 2], [1.0, -0.5, 0.7, -1.2]
    rng = np.random.default_rng(0)
    old = rng.normal(-2, 0.5, sum(lengths))
    logprob = old + rng.normal(0, 0.3, sum(lengths)) + np.repeat([0.5, -0.5, 0.0, 0.5], lengths)
    low, high = 0.2, 0.15

    def paper(values: np.ndarray) -> float:
        total, start = 0.0, 0
        for length, advantage in zip(lengths, advantages, strict=True):
            s = math.exp(sum(values[start + t] - old[start + t] for t in range(length)) / length)
            total += -min(s * advantage, min(max(s, 1 - low), 1 + high) * advantage) / len(lengths)
            start += length
        return total

    which = np.repeat(np.arange(4), lengths)
    mean_B = np.bincount(which, logprob - old) / np.array(lengths)
    tensors = (1 / np.array(lengths)[which] / 4, np.array(advantages)[which], old, old)
    columns = TokenColumns(*map(torch.tensor, tensors), None, {"log_ratio_B": torch.tensor(mean_B[which])})
    lp = torch.tensor(logprob, requires_grad=True)
    loss, *_ = policy_loss(lp, torch.zeros_like(lp), columns, gspo(clip_low=low, clip_high=high))
    loss.backward()
    assert loss.item() == pytest.approx(paper(logprob))
    step = 1e-6 * np.eye(len(logprob))
    slopes = [(paper(logprob + one) - paper(logprob - one)) / 2e-6 for one in step]
    assert lp.grad.tolist() == pytest.approx(slopes, abs=1e-8)
    assert 0.0 in lp.grad.tolist()  # some are clipped,
    assert not all(value == 0.0 for value in lp.grad.tolist())  # and some are not


# ── cispo, sapo ───────────────────────────────────────────────────────────────────────────────────


def one_token(loss: Loss, ratio: float, advantage: float) -> tuple[float, float, bool]:
    """Its loss, the derivative by the log-prob, and whether a bound decided. The current log-prob is -1.5."""
    logprob = torch.tensor([-1.5], dtype=torch.float64, requires_grad=True)
    old, one = torch.tensor([-1.5 - math.log(ratio)], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    out = LOSSES[type(loss)].tokens(logprob, old, TokenColumns(one, advantage * one, old, old, None), loss)
    out.loss_N.sum().backward()
    return out.loss_N.item(), logprob.grad.item(), bool(out.clipped_N.item())


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(1.0, 2.0, 1.0), (3.0, 2.0, 3.0), (9.0, 2.0, 5.0), (9.0, -2.0, 5.0), (0.01, 2.0, 0.01), (1e-30, -2.0, None)],
)
def test_cispo_by_hand(ratio: float, advantage: float, weight: float | None) -> None:
    """A weighted log-prob: above 1 + 4 the weight stops at 5, and the gradient does not stop."""
    weight = math.exp(-20) if weight is None else weight
    loss, slope, clipped = one_token(CispoLoss(anchor="trainer"), ratio, advantage)
    assert (loss, slope) == pytest.approx((weight * advantage * 1.5, -weight * advantage))
    assert clipped == (ratio > 5)


def test_sapo_by_hand() -> None:
    loss = SapoLoss(anchor="trainer", tau_positive=2.0, tau_negative=4.0)
    # at ratio 1: σ(0)·4/τ = 2/τ, and the gradient of -A·lp
    assert one_token(loss, 1.0, 3.0) == (pytest.approx(-3.0 * 2 / 2), pytest.approx(-3.0), False)
    assert one_token(loss, 1.0, -3.0) == (pytest.approx(3.0 * 2 / 4), pytest.approx(3.0), False)
    # at ratio 1.5: σ(2·0.5) = 0.731059, so 4·0.731059·0.268941·1.5 = 1.179672
    value, slope, _ = one_token(loss, 1.5, 1.0)
    assert (value, slope) == pytest.approx((-0.7310586 * 2, -1.1796716))
    # the gate of a negative advantage closes sooner
    assert abs(one_token(loss, 2.0, -1.0)[1]) < abs(one_token(loss, 2.0, 1.0)[1])


@pytest.mark.parametrize("loss", [CispoLoss(anchor="trainer"), GmpoLoss(anchor="trainer")])
@pytest.mark.parametrize("ratio", [0.01, 9.0])
def test_a_clip_decides_nothing_where_the_advantage_is_0(loss: Loss, ratio: float) -> None:
    old, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    means = {"log_ratio_up_B": old, "log_ratio_down_B": old}
    columns = TokenColumns(one, 0 * one, old, old, None, means)
    assert not LOSSES[type(loss)].tokens(math.log(ratio) * one, old, columns, loss).clipped_N.any()


# ── aggregation ───────────────────────────────────────────────────────────────────────────────────


AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum-constant"]


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

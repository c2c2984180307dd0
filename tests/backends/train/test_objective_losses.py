"""Losses of units against values worked out by hand, a slow loop and finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_origin

import numpy as np
import pytest
import torch
from train_helpers import make_units, objective, unit_scale

from backends.packed.packing import Budget, Packing
from backends.token_metrics import SOURCES
from backends.train.objective_losses import (
    UNIT_LOSSES,
    ObjectiveBatch,
    Sequences,
    log1mexp,
    rewards,
    token_weight_T,
    unit_loss,
)
from specs.errors import BatchError
from specs.schema.objectives import BradleyTerry, Kto, Mixture, Nll, Objective, Orpo, TokenObjective


def sequences(total: list[float], tokens: list[float], ref: list[float], kl: float = 0.0, margin: float = 0.0):
    def tensor(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    side = Sequences(tensor(total), tensor(tokens), tensor(ref), tensor([kl] * len(total)), tensor([margin] * len(ref)))
    side.total.requires_grad_()
    return side


@pytest.mark.parametrize(
    ("given", "value", "by_chosen", "by_rejected"),
    [
        (objective("dpo"), math.log(2), -0.05, 0.05),  # ∓β/2
        (objective("dpo", label_smoothing=0.2), math.log(2), -0.03, 0.03),
        (objective("robust", label_smoothing=0.2), math.log(2), -0.05 / 0.6, 0.05 / 0.6),
        (objective("hinge"), 1.0, -0.1, 0.1),
        (objective("ipo"), 25.0, -2 * 5 / 4, 2 * 5 / 8),  # (1/2β)², by mean log-probs of 4 and 8 tokens
        (objective("sppo"), 50.0, -10.0, 10.0),  # 2(1/2β)²
        (objective("apo_zero"), 1.0, -0.025, 0.025),
        (objective("kto"), 1.0, -0.025, 0.025),  # ½ of each of the two
        (objective("kto", desirable_weight=3.0), 2.0, -0.075, 0.025),
        (objective("simpo"), math.log1p(math.exp(0.5)), -2 / (1 + math.exp(-0.5)) / 4, 2 / (1 + math.exp(-0.5)) / 8),
        (objective("orpo"), 0.1 * math.log(2), -0.05 / (1 - math.exp(-1.0)) / 4, 0.05 / (1 - math.exp(-1.0)) / 8),
        (objective("mixture", mixture=[{"kind": "dpo", "weight": 2.0}, {"kind": "nll"}]), 2 * math.log(2), -0.1, 0.1),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_at_the_reference(given: Objective, value: float, by_chosen: float, by_rejected: float) -> None:
    """A mean log-prob of -1 everywhere, as the reference says."""
    chosen, rejected = sequences([-4.0], [4], [-4.0]), sequences([-8.0], [8], [-8.0])
    loss = unit_loss(chosen, rejected, given)
    loss.backward()
    assert chosen.total.grad is not None
    assert rejected.total.grad is not None
    assert loss.item() == pytest.approx(value, rel=1e-12)
    assert (chosen.total.grad.item(), rejected.total.grad.item()) == pytest.approx((by_chosen, by_rejected), rel=1e-12)


def test_a_reward_model_of_zeros() -> None:
    """ln 2, whatever is centred; a margin is taken off, and the head has a gradient."""
    chosen, rejected = sequences([0.0], [1], [0]), sequences([0.0], [1], [0])
    unit_loss(chosen, rejected, objective("bradley_terry", center_coef=0.1)).backward()
    assert chosen.total.grad.item() == -0.5 == -rejected.total.grad.item()
    with_margin = unit_loss(sequences([0.0], [1], [0], margin=2.0), rejected, objective("bradley_terry"))
    assert with_margin.item() == pytest.approx(math.log1p(math.exp(2)))
    centred = unit_loss(
        sequences([3.0], [1], [0]), sequences([1.0], [1], [0]), BradleyTerry(kind="bradley_terry", center_coef=0.1)
    )
    assert centred.item() == pytest.approx(math.log1p(math.exp(-2)) + 0.1 * 16)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def odds(mean: float) -> float:
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


# Of a pair: sums and lengths of both, the reference's sums. As their papers write them, with β = 0.3.
SLOW: dict[str, tuple[dict[str, float], Callable[..., float]]] = {
    "dpo": (
        {"label_smoothing": 0.1},
        lambda c, n, a, r, m, b: (
            -0.9 * math.log(sigmoid(0.3 * (c - a - r + b))) - 0.1 * math.log(sigmoid(0.3 * (r - b - c + a)))
        ),
    ),
    "robust": (
        {"label_smoothing": 0.2},
        lambda c, n, a, r, m, b: (
            (-0.8 * math.log(sigmoid(0.3 * (c - a - r + b))) + 0.2 * math.log(sigmoid(0.3 * (r - b - c + a)))) / 0.6
        ),
    ),
    "ipo": ({}, lambda c, n, a, r, m, b: ((c - a) / n - (r - b) / m - 1 / 0.6) ** 2),
    "hinge": ({}, lambda c, n, a, r, m, b: max(0.0, 1 - 0.3 * (c - a - r + b))),
    "apo_zero": ({}, lambda c, n, a, r, m, b: 1 - sigmoid(0.3 * (c - a)) + sigmoid(0.3 * (r - b))),
    "sppo": ({}, lambda c, n, a, r, m, b: (c - a - 1 / 0.6) ** 2 + (r - b + 1 / 0.6) ** 2),
    "simpo": ({"gamma": 0.7}, lambda c, n, a, r, m, b: -math.log(sigmoid(0.3 * (c / n - r / m) - 0.7))),
    "orpo": ({}, lambda c, n, a, r, m, b: -0.3 * math.log(sigmoid(odds(c / n) - odds(r / m)))),
    "kto": (
        {"desirable_weight": 0.5, "undesirable_weight": 2.0},
        lambda c, n, a, r, m, b: 0.5 * (1 - sigmoid(0.3 * (c - a - 0.4))) + 2 * (1 - sigmoid(0.3 * (0.4 - r + b))),
    ),
}


@pytest.mark.parametrize("kind", SLOW)
def test_against_a_loop_and_finite_differences(kind: str) -> None:
    rng, (keys, slow) = np.random.default_rng(1), SLOW[kind]
    given = objective(kind, beta=0.3, **keys)
    n, m = (rng.integers(1, 9, 40).astype(float) for _ in range(2))
    c, a, r, b = (-size * rng.uniform(0.05, 3, 40) for size in (n, n, m, m))
    loss = unit_loss(sequences(c, n, a, kl=0.4), sequences(r, m, b, kl=0.4), given)
    assert loss.item() == pytest.approx(sum(slow(*pair) for pair in zip(c, n, a, r, m, b, strict=True)), rel=1e-9)

    def of_sums(total_C: torch.Tensor, total_R: torch.Tensor) -> torch.Tensor:
        sides = (
            Sequences(t, *(torch.tensor(x) for x in (k, f, k * 0 + 0.4, k * 0)))
            for t, k, f in ((total_C, n, a), (total_R, m, b))
        )
        return unit_loss(*sides, given)

    assert torch.autograd.gradcheck(of_sums, tuple(torch.tensor(x, requires_grad=True) for x in (c, r)))


def test_every_table_has_its_function_and_its_metrics() -> None:
    tables = [Objective]
    for table in tables:  # which grows
        tables += table.__subclasses__()
        assert {metric.source for metric in table.metrics} <= set(SOURCES)
    named = {table for table in tables if get_origin(table.model_fields["kind"].annotation) is Literal}
    assert {table for table in named if not issubclass(table, TokenObjective | Mixture)} == set(UNIT_LOSSES)
    kinds = {"nll", "dft", *SLOW, "bradley_terry"}
    assert {table.model_json_schema()["properties"]["kind"]["const"] for table in UNIT_LOSSES} | {"nll", "dft"} == kinds


def test_odds_of_certain_sequences_are_finite() -> None:
    """At p → 1 neither value nor derivative is lost to rounding."""
    x = torch.tensor([-50.0, -1.0, -0.5, -1e-7, 0.0], dtype=torch.float64, requires_grad=True)
    log1mexp(x).sum().backward()
    exact = [-math.exp(-50), math.log(1 - math.exp(-1)), math.log(1 - math.exp(-0.5)), math.log(1e-7)]
    assert log1mexp(x)[:4].tolist() == pytest.approx(exact, rel=1e-7)
    assert x.grad is not None
    assert x.grad[3].item() == pytest.approx(-1e7, rel=1e-6)
    assert torch.isfinite(x.grad).all()
    sure, unsure = sequences([0.0], [3], [0]), sequences([-3.0], [3], [0])
    loss = unit_loss(sure, unsure, Orpo(kind="orpo"))
    loss.backward()
    assert 0 <= loss.item() < 1e-8
    assert sure.total.grad is not None
    assert torch.isfinite(sure.total.grad).all()


def test_rewards_are_of_the_first_term_that_has_one() -> None:
    side = sequences([-4.0], [2], [-6.0])
    mixture = Mixture.model_validate({"mixture": [{"kind": "nll"}, {"kind": "ipo", "beta": 0.5}, {"kind": "dpo"}]})
    assert rewards(side, mixture).tolist() == [0.5 * 2]
    assert rewards(side, objective("simpo")).tolist() == [2.0 * -2]
    assert rewards(side, objective("bradley_terry")).tolist() == [-4]


def test_beside_pairs_chosen_tokens_alone_have_a_loss() -> None:
    batch = make_units()
    scale, mask_T = unit_scale(batch), batch["loss_mask_T"] != 0
    chosen_T = mask_T & np.repeat(batch["chosen_B"] != 0, batch["length_B"])
    mixture = {"kind": "mixture", "mixture": [{"kind": "dpo"}, {"kind": "nll", "weight": 0.5}]}
    for given, factor in ((objective("orpo"), 1.0), (objective(**mixture), 0.5)):
        weight_T = token_weight_T(batch, given, scale)
        assert (weight_T[~chosen_T] == 0).all()
        assert weight_T.sum() == pytest.approx(factor, rel=1e-5)
        assert len(set(weight_T[chosen_T].tolist())) == 1
    assert token_weight_T(batch, objective("dpo"), scale).sum() == 0
    nll = Nll(kind="nll", loss_aggregation="seq-mean-token-mean")
    sums = np.add.reduceat(token_weight_T(batch, nll, scale), batch.offsets[:-1])
    np.testing.assert_allclose(sums, 1 / len(batch), rtol=1e-5)


def test_units_that_cannot_be_compared_are_named() -> None:
    batch = make_units()
    with pytest.raises(BatchError, match=r"unit 2 has 1 chosen and 0 rejected sequences.*dpo needs one of each"):
        ObjectiveBatch(batch.select([0, 1, 4, 6, 7]), objective("dpo"), unit_scale(batch))
    ObjectiveBatch(batch.select([0, 1, 4, 6, 7]), Kto(kind="kto"), unit_scale(batch))
    batch["loss_mask_T"][batch.offsets[5] : batch.offsets[6]] = 0
    with pytest.raises(BatchError, match="unit 2 has a sequence without a token to learn from"):
        ObjectiveBatch(batch, objective("ipo"), unit_scale(batch))


@pytest.mark.parametrize("limit", [30, 45, 10_000])
@pytest.mark.parametrize("of_scores", [False, True])
def test_a_pair_stays_together_and_its_prompt_is_computed_once(limit: int, of_scores: bool) -> None:
    batch = make_units(12, seed=3)
    packing = Packing(Budget(limit), share_prompts=True)
    micros = packing.last_token_micro_batches(batch) if of_scores else packing.micro_batches(batch)
    seen: list[int] = []
    for micro in micros:
        units = batch["unit_B"][micro.sequence_M]
        assert (np.unique(units, return_counts=True)[1] == 2).all()
        assert sum(parent < 0 for parent in micro.parents) <= len(units) / 2
        assert micro.num_tokens <= limit
        columns = batch.sequence_T[micro.column_N] if not of_scores else micro.column_N
        assert list(dict.fromkeys(columns.tolist())) == micro.sequence_M.tolist()
        seen += micro.sequence_M.tolist()
    assert sorted(seen) == list(range(24))
    assert (len(micros) == 1) == (limit == 10_000)


def test_a_pair_over_the_budget_is_named() -> None:
    batch = make_units(12, seed=3)
    longest = int(batch["length_B"].max())
    said = rf"unit \d+ together compute \d+ tokens, over actor.micro_batch_tokens = {longest}, and they belong in one"
    with pytest.raises(BatchError, match=said) as caught:
        Packing(Budget(longest, key="actor.micro_batch_tokens"), share_prompts=False).micro_batches(batch)
    assert "raise actor.micro_batch_tokens" in str(caught.value.hint)

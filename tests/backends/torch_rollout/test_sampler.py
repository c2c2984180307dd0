"""Counter-based uniforms, restriction of the distribution, and slots in segments."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backends.fake.fake_rollout import sample as fake_sample
from backends.rollout.uniform import sample_keys, uniform
from backends.torch_rollout.kv_cache import Order, rows_read, split
from backends.torch_rollout.sampler import sample
from specs.wire.role_config import Sampling


def draws(seed: int, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return uniform(sample_keys(seed, ids), positions)


def test_uniforms_depend_on_seed_id_and_position_alone() -> None:
    ids, positions = np.arange(50) + 2**40, np.arange(50)
    whole = draws(3, ids, positions)
    assert (draws(3, ids[7:8], positions[7:8]) == whole[7:8]).all()
    for other in (draws(4, ids, positions), draws(3, ids + 1, positions), draws(3, ids, positions + 1)):
        assert not np.isin(other, whole).any()


def test_uniforms_are_fixed_for_ever() -> None:
    """Runs must repeat under later versions: these numbers may never change."""
    found = draws(0, np.array([0, 1, 2**40, -5]), np.array([0, 0, 7, 3]))
    np.testing.assert_array_equal(found, FIXED)


FIXED = np.array([0.15460890142091666, 0.5137662888525725, 0.2658220414182142, 0.006436751001159147])


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    """Means, χ² over 64 bins, and neighbours in id and in position; limits at five standard deviations."""
    ids, positions = (grid.reshape(-1) for grid in np.meshgrid(np.arange(300), np.arange(300), indexing="ij"))
    table = draws(0, ids, positions).reshape(300, 300)
    count = table.size
    assert 0 <= table.min() < 1e-3
    assert 1 - 1e-3 < table.max() < 1
    assert abs(table.mean() - 0.5) < 5 / np.sqrt(12 * count)
    bins = np.bincount((table.reshape(-1) * 64).astype(int), minlength=64)
    assert ((bins - count / 64) ** 2 / (count / 64)).sum() < 63 + 5 * np.sqrt(2 * 63)
    for neighbour in (np.roll(table, 1, 0), np.roll(table, 1, 1)):
        assert abs(np.corrcoef(table.reshape(-1), neighbour.reshape(-1))[0, 1]) < 5 / np.sqrt(count)


# ── the distribution ──────────────────────────────────────────────────────────────────────────────


def slow_probability(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Temperature, then top-k, then top-p, one token at a time."""
    weights = np.exp((logits - logits.max()) / temperature)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = order[:top_k] if top_k else order
    total, mass, nucleus = sum(weights[t] for t in kept), 0.0, []
    for token in kept:
        if nucleus and mass >= top_p and top_p < 1:
            break
        nucleus.append(token)
        mass += weights[token] / total
    probability = np.zeros(len(logits))
    probability[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return probability


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.8), (5, 0.6), (1, 1.0), (0, 1e-9), (100, 1.0)])
def test_the_log_prob_is_that_of_the_slow_distribution(temperature: float, top_k: int, top_p: float) -> None:
    rng = np.random.default_rng(0)
    logits = np.repeat(rng.normal(0, 2, (1, 12)), 2000, axis=0).astype(np.float32)
    draw = rng.random(2000)
    sampling = Sampling(seed=0, temperature=temperature, top_k=top_k, top_p=top_p, max_response_tokens=1)
    token, logprob = sample(torch.from_numpy(logits), torch.from_numpy(draw), sampling)
    wanted = slow_probability(logits[0].astype(np.float64), temperature, top_k, top_p)
    assert (wanted[token.numpy()] > 0).all()
    np.testing.assert_allclose(logprob.numpy(), np.log(wanted[token.numpy()]), atol=1e-5)
    seen = np.bincount(token.numpy(), minlength=12) / 2000
    assert np.abs(seen - wanted).max() < 5 * np.sqrt(0.25 / 2000)
    for index in range(0, 2000, 100):
        one, one_logprob = fake_sample(logits[index].astype(np.float64), float(draw[index]), sampling)
        assert one == int(token[index])
        assert abs(one_logprob - float(logprob[index])) < 1e-5


def test_inverse_cdf_at_the_edges() -> None:
    """No draw, however near 0 or 1, may pick a token of probability zero."""
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]]).repeat(3, 1)
    draw = torch.tensor([0.0, 0.5, 1 - 2.0**-52], dtype=torch.float64)
    token, logprob = sample(logits, draw, Sampling(seed=0, max_response_tokens=1))
    assert token.tolist() == [1, 3, 3]
    assert torch.isfinite(logprob).all()


# ── segments ──────────────────────────────────────────────────────────────────────────────────────


def test_a_mixed_batch_gets_sorted_once_it_pays() -> None:
    """Long and short alternate: sorting pays after a few steps, and then four calls read little more than needed."""
    rng = np.random.default_rng(0)
    read_B = rng.integers(10, 2000, 128)
    order, waited = Order(), 0
    while (plan := order.plan(read_B))[1] is None:
        waited += 1
        assert waited < 50
    segments, permutation = plan
    assert permutation is not None
    assert waited > 0
    assert rows_read(segments) < 1.3 * read_B.sum() < 0.8 * rows_read(split(read_B))
    assert order.plan(read_B[permutation])[1] is None

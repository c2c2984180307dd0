"""Advantages of single tokens against hand-computed numbers and a slow loop."""

import numpy as np
import pytest

from rlctl.loop import token_advantages
from rlctl.loop.advantages import columns
from rlctl.loop.token_advantages import decayed_sums
from specs.schema.algorithms.algorithm_tables import Gae, GreedyBaseline, ReturnToGo, Teacher
from specs.wire.batch import Batch


def batch_of(*masks):
    length_B = np.array([len(mask) for mask in masks])
    mask_T = np.concatenate([np.array(mask, np.uint8) for mask in masks])
    order_B = np.arange(len(masks))
    identity = {"group_B": order_B, "rollout_B": order_B, "id_B": order_B}
    return Batch({"tokens_T": np.arange(length_B.sum()), "loss_mask_T": mask_T, "length_B": length_B, **identity})


def advantages(table, batch, scores, valid=None, penalty_T=None):
    valid_B = np.ones(len(batch), bool) if valid is None else np.array(valid, bool)
    made = columns(table, batch, np.array(scores, np.float32), valid_B, penalty_T)
    assert list(made) == ["advantage_T"]
    return made["advantage_T"]


def test_return_to_go_by_hand():
    # with γ = 1/2 the returns are 2, 4 (the hole between them is no step) and 1
    got_T = advantages(ReturnToGo(discount=0.5), batch_of([0, 1, 0, 1], [0, 1]), [4.0, 1.0])
    mean, spread = 7 / 3, np.sqrt(((2 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2 + (1 - 7 / 3) ** 2) / 2)
    assert got_T == pytest.approx([0, (2 - mean) / spread, 0, (4 - mean) / spread, 0, (1 - mean) / spread])


def test_penalties_stand_at_their_tokens():
    """Return 4 - 1 at the last token and 4 - 1 - 2 at the first: whitened ±1/√2."""
    penalty_T = np.array([9.0, 2.0, 9.0, 1.0])
    got_T = advantages(ReturnToGo(), batch_of([0, 1, 0, 1]), [4.0], penalty_T=penalty_T)
    assert got_T == pytest.approx([0, -(0.5**0.5), 0, 0.5**0.5])


def test_ungraded_and_empty_samples():
    """A sample whose grading failed moves nothing and learns nothing; one without a loss token is not there."""
    masks = [0, 1, 1], [0, 0], [0, 1]
    without_T = advantages(ReturnToGo(discount=0.9), batch_of(*masks), [1.0, 5.0, 0.0])
    with_T = advantages(ReturnToGo(discount=0.9), batch_of([0, 1, 1], *masks), [99.0, 1.0, 5.0, 0.0], [0, 1, 1, 1])
    assert with_T.tolist() == [0, 0, 0, *without_T.tolist()]
    assert np.abs(without_T[[1, 2, 6]]).min() > 0
    assert advantages(ReturnToGo(), batch_of([0, 1]), [1.0]).tolist() == [0, 0]  # nothing to whiten against
    assert advantages(ReturnToGo(), batch_of([0, 1]), [1.0], [False]).tolist() == [0, 0]


def test_the_greedy_baseline_by_hand():
    """With γ = 1/2 the returns are 2, 4 (across a hole) and 1; the baselines 1 and 3."""
    batch = batch_of([0, 1, 0, 1], [0, 1], [0, 1]).with_columns(baseline_B=np.array([1.0, 3.0, 9.0], np.float32))
    got_T = advantages(GreedyBaseline(discount=0.5), batch, [4.0, 1.0, 7.0], [True, True, False])
    assert got_T.tolist() == [0, 1.0, 0, 3.0, 0, -2.0, 0, 0.0]
    penalty_T = np.array([9.0, 2.0, 9.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    got_T = advantages(GreedyBaseline(), batch, [4.0, 1.0, 7.0], penalty_T=penalty_T)
    assert got_T.tolist() == [0, 4 - 1 - 2 - 1, 0, 4 - 1 - 1, 0, -2.0, 0, -2.0]


@pytest.mark.parametrize("samples", [0, 1, 2, 1000])
@pytest.mark.parametrize("longest", [1, 2, 5, 63, 64, 65, 200, 30_000])
def test_decayed_sums_against_a_slow_loop(samples, longest):
    rng = np.random.default_rng(longest)
    length_S = rng.integers(1, longest, size=min(samples, 2 + 40_000 // longest), endpoint=True)
    value_N, ends_S = rng.normal(size=length_S.sum()), np.cumsum(length_S)
    decays = (1.0, 0.3, 0.0, rng.choice([0.0, 0.3, 0.999, 1.0], size=len(length_S)))
    for found_N, decay in zip(decayed_sums(value_N, length_S, *decays), decays, strict=True):
        expected_N = value_N.copy()
        for end, length, by in zip(ends_S, length_S, np.broadcast_to(decay, length_S.shape), strict=True):
            for at in range(end - 2, end - length - 1, -1):
                expected_N[at] += by * expected_N[at + 1]
        np.testing.assert_allclose(found_N, expected_N, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", [1.0, 0.5, 0.0])
def test_what_is_no_number_stays_in_its_sample(decay):
    """Although rows of tokens reach into the samples before theirs."""
    length_S = np.tile([3, 70, 1, 64, 200, 2, 2, 1], 3)
    clean_N = np.random.default_rng(0).normal(size=length_S.sum())
    (expected_N,) = decayed_sums(clean_N, length_S, decay)
    for broken in range(len(length_S)):
        inside = slice(length_S[:broken].sum(), length_S[: broken + 1].sum())
        value_N = clean_N.copy()
        value_N[inside] = np.nan
        (found_N,) = decayed_sums(value_N, length_S, decay)
        assert np.isnan(found_N[inside]).all()
        np.testing.assert_array_equal(np.delete(found_N, inside), np.delete(expected_N, inside))


@pytest.mark.parametrize("table", [Gae(gae_lambda_value=1.0), ReturnToGo(discount=0.9), Teacher(reward_coef=0.5)])
def test_samples_at_a_time_are_all_at_once(monkeypatch, table):
    """Means and deviations are the whole step's, wherever it is cut."""
    rng = np.random.default_rng(3)
    batch = batch_of(*([0, *(rng.random(length) < 0.8)] for length in rng.integers(1, 90, 50)))
    scores, valid = rng.normal(size=50), rng.random(50) < 0.9
    names = ("value_T", "ref_logprob_T", "old_logprob_T")
    batch = batch.with_columns(**{name: rng.normal(size=batch.num_tokens).astype(np.float32) for name in names})
    whole = columns(table, batch, scores.astype(np.float32), valid, np.abs(batch["value_T"]))
    monkeypatch.setattr(token_advantages, "TOKENS_AT_ONCE", 100)
    for name, column_T in columns(table, batch, scores.astype(np.float32), valid, np.abs(batch["value_T"])).items():
        np.testing.assert_allclose(column_T, whole[name], rtol=1e-6, atol=1e-7)


# ── generalised advantage estimation ──────────────────────────────────────────────────────────────


def estimate(table, batch, scores, value_T, valid=None, penalty_T=None):
    valid_B = np.ones(len(batch), bool) if valid is None else np.array(valid, bool)
    batch = batch.with_columns(value_T=np.asarray(value_T, np.float32))
    made = columns(table, batch, np.array(scores, np.float32), valid_B, penalty_T)
    assert list(made) == ["advantage_T", "return_T"]
    return made["advantage_T"], made["return_T"]


def slow_gae(batch, scores, value_T, gamma, lam, penalty_T):
    """Token by token, from the end; what is masked hands on what it is given."""
    advantage_T = np.zeros(batch.num_tokens)
    for sample, (start, stop) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:], strict=True)):
        next_value = behind = 0.0
        reward = scores[sample]
        for token in range(stop - 1, start - 1, -1):
            if batch["loss_mask_T"][token]:
                delta = reward - penalty_T[token] + gamma * next_value - value_T[token]
                behind = delta + gamma * lam * behind
                advantage_T[token], next_value, reward = behind, value_T[token], 0.0
    return advantage_T


def test_gae_by_hand():
    """Values 1 and 2 with a hole between them, score 4, γ = λ = 1/2: δ = 0 + 2/2 - 1 = 0 and 4 - 2 = 2."""
    batch, value_T = batch_of([0, 1, 0, 1], [0, 1]), [7, 1, 99, 2, 7, 3]
    table = Gae(discount=0.5, gae_lambda=0.5, whiten=False)
    got_T, return_T = estimate(table, batch, [4.0, 1.0], value_T)
    assert got_T.tolist() == [0, 0.5, 0, 2, 0, -2]
    assert return_T.tolist() == [0, 1.5, 0, 4, 0, 1]
    got_T, return_T = estimate(table.model_copy(update={"gae_lambda_value": 1.0}), batch, [4.0, 1.0], value_T)
    assert got_T.tolist() == [0, 0.5, 0, 2, 0, -2], "the critic's λ is not the policy's"
    assert return_T.tolist() == [0, 2, 0, 4, 0, 1]


def test_a_lambda_that_grows_with_the_completion_by_hand():
    """α = 1/2: λ is 1 - 2/4 for four tokens; two have 1 - 2/2 = 0, and less would be negative."""
    batch = batch_of([1, 1, 1, 1], [1, 1], [1])
    table = Gae(gae_length_alpha=0.5, gae_lambda=1.0, whiten=False)
    got_T, return_T = estimate(table, batch, [8.0, 8.0, 8.0], [0, 0, 0, 0, 0, 3, 5])
    assert got_T.tolist() == [1, 2, 4, 8, 3, 5, 3]
    assert return_T.tolist() == [8] * 7, "the critic's own stays gae_lambda"


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize(("lam", "lam_value"), [(0.0, None), (0.95, None), (0.95, 1.0), (1.0, 0.0)])
def test_gae_against_a_slow_loop(gamma, lam, lam_value):
    rng = np.random.default_rng(3)
    batch = batch_of(*(rng.random(rng.integers(1, 30)) < 0.6 for _ in range(25)))
    scores, value_T = rng.normal(size=25).astype(np.float32), rng.normal(size=batch.num_tokens).astype(np.float32)
    penalty_T = 0.1 * rng.random(batch.num_tokens)
    loss_T = batch["loss_mask_T"] > 0
    expected_T = slow_gae(batch, scores, value_T, gamma, lam, penalty_T)
    by_critic_T = slow_gae(batch, scores, value_T, gamma, lam if lam_value is None else lam_value, penalty_T)
    table = Gae(discount=gamma, gae_lambda=lam, gae_lambda_value=lam_value, whiten=False)
    got_T, return_T = estimate(table, batch, scores, value_T, penalty_T=penalty_T)
    np.testing.assert_allclose(got_T, expected_T, rtol=0, atol=1e-5)
    np.testing.assert_allclose(return_T, np.where(loss_T, by_critic_T + value_T, 0), rtol=0, atol=1e-5)
    white_T, same_T = estimate(table.model_copy(update={"whiten": True}), batch, scores, value_T, penalty_T=penalty_T)
    spread = np.sqrt(expected_T[loss_T].var(ddof=1) + 1e-8)
    np.testing.assert_allclose(white_T[loss_T], (expected_T[loss_T] - expected_T[loss_T].mean()) / spread, atol=1e-4)
    assert same_T.tolist() == return_T.tolist(), "returns are from before the whitening"


# ── a teacher ─────────────────────────────────────────────────────────────────────────────────────


def taught(*masks, old, ref):
    batch = batch_of(*masks)
    return batch.with_columns(old_logprob_T=np.array(old, np.float32), ref_logprob_T=np.array(ref, np.float32))


def test_a_teachers_advantage_by_hand():
    """The teacher's log-prob less the student's at each token; what stands off the mask means nothing."""
    batch = taught([0, 1, 0, 1], [0, 1], old=[np.nan, -1, np.nan, -2, np.nan, -3], ref=[9, -1.5, np.nan, -1, 9, -3])
    assert advantages(Teacher(), batch, [5.0, -7.0]) == pytest.approx([0, -0.5, 0, 1, 0, 0])
    spread = np.sqrt(((-0.5 - 1 / 6) ** 2 + (1 - 1 / 6) ** 2 + (1 / 6) ** 2) / 2)
    whitened = [0, (-0.5 - 1 / 6) / spread, 0, (1 - 1 / 6) / spread, 0, -1 / 6 / spread]
    assert advantages(Teacher(whiten=True), batch, [5.0, -7.0]) == pytest.approx(whitened, rel=1e-6)
    # rewards, where asked: returns 5, 5 and -7 have mean 1
    with_rewards = advantages(Teacher(reward_coef=0.1), batch, [5.0, -7.0])
    assert with_rewards == pytest.approx([0, -0.5 + 0.4, 0, 1 + 0.4, 0, -0.8])
    assert advantages(Teacher(reward_coef=1), batch, [1.0, 1.0], [False, False]).tolist() == [0] * 6


def test_a_teachers_advantage_is_the_gradient_of_the_reverse_kl():
    """E over the student's own samples of -A·∇log p is ∇KL(student ‖ teacher), by finite differences."""
    rng = np.random.default_rng(0)
    logits, teacher = rng.normal(size=5), rng.normal(size=5)

    def log_p(values):
        return values - np.log(np.exp(values).sum())

    def kl(values):
        return float(np.exp(log_p(values)) @ (log_p(values) - log_p(teacher)))

    p = np.exp(log_p(logits))
    batch = taught(*[[0, 1]] * 5, old=np.ravel([[0, x] for x in log_p(logits)]),
                   ref=np.ravel([[0, x] for x in log_p(teacher)]))  # fmt: skip
    advantage = advantages(Teacher(), batch, np.zeros(5))[1::2]
    gradient = -(p * advantage) @ (np.eye(5) - p)
    steps = 1e-6 * np.eye(5)
    assert gradient == pytest.approx(np.array([(kl(logits + d) - kl(logits - d)) / 2e-6 for d in steps]), abs=1e-6)

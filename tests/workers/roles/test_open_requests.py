"""Completions that go on with other weights: each token has the log-prob and the version of those that drew it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rollout_helpers import give_weights, make_prompts, rollout_config, write_model
from vllm_process import RemoteVllm, needs_vllm, shared_folder

from backends.completions import Completions
from backends.protocol import Rank, RolloutEngine
from backends.registry import rollout_engine
from specs.errors import SyncError
from specs.wire.batch import Batch
from specs.wire.role_config import Sampling
from workers.roles.open_requests import NO_VERSION, OpenRequests

pytestmark = pytest.mark.slow
SAMPLING = Sampling(seed=3, max_response_tokens=40)
OLD, NEW = 7, 8


@pytest.fixture(params=["torch", pytest.param("vllm", marks=needs_vllm)])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> RolloutEngine:
    vllm = request.param == "vllm"
    folder = shared_folder() if vllm else write_model(tmp_path / "model")
    built = (RemoteVllm if vllm else rollout_engine("torch")).build(rollout_config(folder, request.param), Rank())
    give_weights(built)
    return built


def drawn(
    engine: RolloutEngine, *, break_after: tuple[int, ...] = (), other: bool = False, late: bool = False
) -> Batch:
    """Complete some prompts, broken off after so many steps: with `other` weights each time, or the same again. `late`:
    some of them come while it is suspended."""
    parts: list[Batch] = []
    open_, version, steps = OpenRequests(engine), OLD, 0
    completions = Completions(make_prompts(4, 3), SAMPLING, lambda part: parts.append(open_.versions_of(part)))
    requests = completions.requests()
    open_.add(requests[:6] if late else requests)
    while len(open_):
        if steps in break_after:
            open_.suspend(version)
            open_.suspend(version)  # a sync that lost a replica begins again
            if late and version == OLD:
                open_.add(requests[6:])
            version += 1
            give_weights(engine, seed=version if other else 0)
            open_.resume()
        for completion in open_.step(version):
            completions.finish(completion)
        completions.flush()
        steps += 1
    samples = Batch.concat(parts)
    return samples.select(np.argsort(samples["id_B"]))


@pytest.mark.parametrize("late", [False, True])
def test_with_the_same_weights_nothing_changes(engine: RolloutEngine, late: bool) -> None:
    if isinstance(engine, RemoteVllm):
        pytest.skip("vLLM draws what follows with another generator, seeded with the position")
    whole, broken = drawn(engine), drawn(engine, break_after=(2, 3, 9), late=late)
    for name in ("tokens_T", "length_B", "finished_B", "loss_mask_T"):
        assert whole[name].tolist() == broken[name].tolist()
    np.testing.assert_allclose(broken["rollout_logprob_T"], whole["rollout_logprob_T"], atol=1e-5)
    assert set(whole["version_B"].tolist()) == {OLD}


def test_each_token_has_the_log_prob_of_the_weights_that_drew_it(engine: RolloutEngine) -> None:
    samples = drawn(engine, break_after=(4,), other=True)
    mask_T, version_T = samples["loss_mask_T"] == 1, samples["version_T"]
    assert set(version_T[~mask_T].tolist()) == {NO_VERSION}
    for version in (NEW, OLD):
        give_weights(engine, seed=version if version == NEW else 0)
        by_it_T = mask_T & (version_T == version)
        assert by_it_T.sum() > 10
        scored_T = engine.score(samples, SAMPLING.temperature)
        np.testing.assert_allclose(samples["rollout_logprob_T"][by_it_T], scored_T[by_it_T], atol=1e-4)
    several = 0
    for each, oldest in zip(samples.sequences("version_T"), samples["version_B"].tolist(), strict=True):
        of_tokens = each[each >= 0]
        assert (np.diff(of_tokens) >= 0).all(), "weights only ever become newer"
        assert of_tokens.min() == oldest
        several += len(set(of_tokens.tolist())) > 1
    assert several >= 6


def test_limits_hold_for_the_whole(engine: RolloutEngine) -> None:
    samples = drawn(engine, break_after=(2, 20, 38, 39), other=True)
    written_B = samples.sum_by_sequence("loss_mask_T")
    assert written_B.max() == SAMPLING.max_response_tokens
    assert (samples["finished_B"][written_B < SAMPLING.max_response_tokens] == 1).all()


def test_an_engine_is_not_changed_under_open_requests(engine: RolloutEngine) -> None:
    open_ = OpenRequests(engine)
    open_.add(Completions(make_prompts(2, 2), SAMPLING, lambda part: None).requests())
    open_.step(OLD)
    with pytest.raises(SyncError):
        give_weights(engine)
    engine.abort()

"""Completions that go on with other weights: each token has the log-prob and the version of those that drew it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from optional import needs_vllm
from rollout_helpers import batch_of, give_weights, given_model, make_prompts, rollout_config, write_model
from transformers import DynamicCache, PreTrainedModel
from vllm_process import RemoteVllm, shared_folder

from backends.completions import Completions
from backends.protocol import Rank, RolloutEngine
from backends.registry import rollout_engine
from specs.errors import SyncError
from specs.wire import bodies
from specs.wire.batch import Batch
from specs.wire.role_config import Sampling
from workers.roles.open_requests import NO_VERSION, OpenRequests
from workers.roles.rollout import PART_STEPS, Rollout
from workers.serve import Request

pytestmark = pytest.mark.slow
SAMPLING = Sampling(seed=3, max_response_tokens=40)
OLD, NEW = 7, 8
PROMPTS = make_prompts(4, 3)
EQUAL = batch_of([np.arange(40) % 19 + 2] * 12, np.arange(12) + 100, np.zeros(12, dtype=np.int64))
PROBE, PROBE_TEMPERATURE = make_prompts(2, 2, longest=16), 0.5  # another temperature than that of the completions


VLLM = pytest.param("vllm", marks=needs_vllm)
KEEPING = ["torch that keeps its cache", pytest.param("vllm that keeps its cache", marks=needs_vllm)]


@pytest.fixture(params=["torch", VLLM, *KEEPING])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> RolloutEngine:
    kind, _, keeps = request.param.partition(" ")
    folder = shared_folder() if kind == "vllm" else write_model(tmp_path / "model")
    table = {"keep_cache": bool(keeps), **({"max_sequences": 5} if kind == "torch" and keeps else {})}
    built = (RemoteVllm if kind == "vllm" else rollout_engine(kind)).build(
        rollout_config(folder, kind, **table), Rank()
    )
    give_weights(built)
    return built


def drawn(
    engine: RolloutEngine,
    *,
    break_after: tuple[int, ...] = (),
    other: bool = False,
    late: bool = False,
    prompts: Batch = PROMPTS,
) -> Batch:
    """Complete some prompts, broken off after so many steps: with `other` weights each time, or the same again, which
    are probed as those of a sync. `late`: some prompts come while it is suspended."""
    parts: list[Batch] = []
    open_, version, steps = OpenRequests(engine), OLD, 0
    completions = Completions(prompts, SAMPLING, lambda part: parts.append(open_.versions_of(part)))
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
            probed_T = engine.score(PROBE, PROBE_TEMPERATURE)
            open_.resume()
        for completion in open_.step(version):
            completions.finish(completion)
        completions.flush()
        steps += 1
    if break_after:
        np.testing.assert_allclose(engine.score(PROBE, PROBE_TEMPERATURE), probed_T, atol=1e-5)
    samples = Batch.concat(parts)
    return samples.select(np.argsort(samples["id_B"]))


@pytest.mark.parametrize("late", [False, True])
def test_with_the_same_weights_nothing_changes(
    engine: RolloutEngine, late: bool, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["engine"] == "vllm":
        pytest.skip("vLLM draws what follows with another generator, seeded with the position")
    whole, broken = drawn(engine), drawn(engine, break_after=(2, 3, 9), late=late)
    for name in ("tokens_T", "length_B", "finished_B", "loss_mask_T"):
        assert whole[name].tolist() == broken[name].tolist()
    np.testing.assert_allclose(broken["rollout_logprob_T"], whole["rollout_logprob_T"], atol=1e-5)
    assert set(whole["version_B"].tolist()) == {OLD}


@pytest.mark.parametrize("engine", ["torch", VLLM], indirect=True)
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


@pytest.mark.parametrize("engine", KEEPING, indirect=True)
def test_tokens_after_a_kept_cache_are_drawn_by_new_weights_over_old_keys(engine: RolloutEngine) -> None:
    """The last token before a change has no keys yet: it goes in with the new weights, and so does all of a prompt that
    waits for a slot, or comes late, though an equal one has keys."""
    once = prefilled(engine)
    samples = drawn(engine, break_after=(4,), other=True, late=isinstance(engine, RemoteVllm), prompts=EQUAL)
    computed = prefilled(engine) - once
    drawn(engine, prompts=EQUAL)
    assert computed <= 2 * (prefilled(engine) - once - computed), "no completion went through the model again"
    old, new = given_model(engine), given_model(engine, NEW)
    kinds = Counter[tuple[int, ...]]()
    names = ("tokens_T", "version_T", "rollout_logprob_T")
    for tokens, version, logprob in zip(*map(samples.sequences, names), strict=True):
        versions = tuple(sorted(set(version.tolist()) - {NO_VERSION}))
        kinds[versions] += 1
        if NEW in versions:
            first = int(np.argmax(version == NEW))
            over_old = first - 1 if OLD in versions else 0
            np.testing.assert_allclose(logprob[first:], logprobs_over(old, new, tokens, over_old)[first:], atol=1e-4)
    assert min(kinds[OLD, NEW], kinds[NEW,]) >= 3


def prefilled(engine: RolloutEngine) -> int:
    return engine.counters().get("prefilled_tokens", 0)


@torch.inference_mode()
def logprobs_over(
    old: PreTrainedModel, new: PreTrainedModel, tokens: NDArray[np.int64], count: int
) -> NDArray[np.float32]:
    """Log-prob of each token where the first `count` have the keys of the old weights, and the new ones read on."""
    ids, cache = torch.from_numpy(tokens)[None], DynamicCache()
    if count:
        old(ids[:, :count], past_key_values=cache)
    logits = new(ids[:, count:], past_key_values=cache).logits[0, :-1]
    scores = logits.float().log_softmax(-1).gather(-1, ids[0, count + 1 :, None])[:, 0]
    return np.concatenate([np.zeros(count + 1, dtype=np.float32), scores.numpy()])


def test_limits_hold_for_the_whole(engine: RolloutEngine) -> None:
    samples = drawn(engine, break_after=(2, 20, 38, 39), other=True)
    written_B = samples.sum_by_sequence("loss_mask_T")
    assert written_B.max() == SAMPLING.max_response_tokens
    assert (samples["finished_B"][written_B < SAMPLING.max_response_tokens] == 1).all()


def test_what_comes_while_weights_change_waits_though_nothing_was_open(engine: RolloutEngine) -> None:
    """So do turns of episodes that all waited for their tools when a sync began."""
    open_, parts = OpenRequests(engine), list[Batch]()
    completions = Completions(make_prompts(2, 2), SAMPLING, lambda part: parts.append(open_.versions_of(part)))
    open_.suspend(OLD)
    open_.add(completions.requests())
    give_weights(engine, seed=NEW)
    open_.resume()
    while len(open_):
        for completion in open_.step(NEW):
            completions.finish(completion)
        completions.flush()
    assert {version for part in parts for version in part["version_T"].tolist()} == {NO_VERSION, NEW}


@pytest.mark.parametrize("engine", KEEPING, indirect=True)
def test_calls_that_come_while_weights_change_count_their_prompts_apart(engine: RolloutEngine) -> None:
    """Each call of episodes counts its distinct prompts from 0."""
    open_, found = OpenRequests(engine), list[int]()
    calls = [batch_of([np.arange(4 + n) + 2] * 2, np.arange(2) + 10 * n, np.zeros(2, dtype=np.int64)) for n in range(3)]
    first, *late = [Completions(call, SAMPLING, lambda part: None).requests() for call in calls]
    open_.add(first)
    found += [completion.id for completion in open_.step(OLD)]
    open_.suspend(OLD)
    for call in late:
        open_.add(call)
    give_weights(engine, seed=NEW)
    open_.resume()
    while len(open_):
        found += [completion.id for completion in open_.step(NEW)]
    assert sorted(found) == [0, 1, 10, 11, 20, 21]


def test_an_engine_is_not_changed_under_open_requests(engine: RolloutEngine) -> None:
    open_ = OpenRequests(engine)
    open_.add(Completions(make_prompts(2, 2), SAMPLING, lambda part: None).requests())
    open_.step(OLD)
    with pytest.raises(SyncError):
        give_weights(engine)
    engine.abort()


def test_completions_are_sent_every_few_steps_and_turns_at_once(tmp_path: Path) -> None:
    rollout, prompts = Rollout(Rank()), make_prompts(16, 1)
    rollout.build(Request(rollout_config(write_model(tmp_path / "model")), {}), lambda *_: None)
    give_weights(rollout.engine)

    def parts(*, keep: bool) -> list[int]:
        sent: list[int] = []
        body = bodies.Generate(sampling=SAMPLING, keep=keep)
        reply = rollout.generate(Request(body, prompts.columns), lambda _, columns: sent.append(len(columns["id_B"])))
        while rollout.pending:
            rollout.advance()
        assert reply.done()
        return sent

    together, at_once = parts(keep=False), parts(keep=True)
    assert sum(together) == sum(at_once) == len(prompts)
    assert len(together) <= -(-40 // PART_STEPS) < len(at_once)

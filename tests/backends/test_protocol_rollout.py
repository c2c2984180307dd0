"""What every rollout engine promises (`backends.protocol.RolloutEngine`). vLLM runs in its own interpreter, one process
for all tests (`vllm_process.py`); sglang speaks to a server of ours (`tests/support/sglang_server.py`)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from families import VOCAB
from off_the_host import nothing_over_the_host
from optional import needs_vllm
from rollout_helpers import END, MAX_TOKENS, answer, batch_of, give_weights, make_prompts, rollout_config, write_model
from sglang_helpers import SharedSglang
from vllm_process import RemoteVllm, shared_folder

from backends import activity
from backends.completions import Completion, Completions, SampleRequest
from backends.protocol import Rank, RolloutEngine, WeightSpec
from backends.registry import rollout_engine
from backends.torch_rollout.kv_cache import KvCache
from backends.weights.checksum import checksum_bytes
from backends.weights.word_sum import word_sums
from specs.errors import BatchError, ModelError, RlctlError, SyncError
from specs.wire.batch import Batch
from specs.wire.messages import SAMPLE_COLUMNS
from specs.wire.role_config import Sampling

pytestmark = pytest.mark.slow


@pytest.fixture(params=["fake", "torch", "sglang", pytest.param("vllm", marks=needs_vllm)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    return shared_folder() if kind == "vllm" else write_model(tmp_path / "model")


@pytest.fixture
def engine(kind: str, folder: Path) -> RolloutEngine:
    return build(kind, folder)


def build(kind: str, folder: Path, **table: int) -> RolloutEngine:
    built = engine_class(kind).build(rollout_config(folder, kind, **table), Rank())
    give_weights(built)
    return built


def engine_class(kind: str) -> type[RolloutEngine]:
    elsewhere: dict[str, type[RolloutEngine]] = {"vllm": RemoteVllm, "sglang": SharedSglang}
    return elsewhere.get(kind) or rollout_engine(kind)


def test_every_sample_comes_once_with_its_columns(engine: RolloutEngine) -> None:
    prompts = make_prompts()
    parts: list[Batch] = []
    before = activity.total("token")
    counters = engine.generate(prompts, Sampling(seed=1, max_response_tokens=9), parts.append)
    samples = Batch.concat(parts)
    assert set(samples.columns) == {*SAMPLE_COLUMNS, "length_B"}
    assert sorted(samples["id_B"].tolist()) == sorted(prompts["id_B"].tolist())
    asked = {
        i: (g, a, r, t.tolist())
        for i, g, a, r, t in zip(
            *(prompts[n].tolist() for n in ("id_B", "group_B", "rollout_B", "row_B")),
            prompts.sequences("tokens_T"),
            strict=True,
        )
    }
    generated = 0
    for index, (tokens, mask) in enumerate(
        zip(samples.sequences("tokens_T"), samples.sequences("loss_mask_T"), strict=True)
    ):
        group, rollout, row, prompt = asked[int(samples["id_B"][index])]
        assert [int(samples[name][index]) for name in ("group_B", "rollout_B", "row_B")] == [group, rollout, row]
        assert tokens[: len(prompt)].tolist() == prompt
        assert mask.tolist() == [0] * len(prompt) + [1] * (len(tokens) - len(prompt))
        answer_tokens = tokens[len(prompt) :].tolist()
        assert 1 <= len(answer_tokens) <= 9
        assert END not in answer_tokens[:-1], "nothing may follow the end token"
        assert bool(samples["finished_B"][index]) == (answer_tokens[-1] == END)
        assert samples["finished_B"][index] or len(answer_tokens) == 9
        generated += len(answer_tokens)
    assert counters["generated_tokens"] == generated
    if not isinstance(engine, RemoteVllm):  # which counts elsewhere
        assert activity.total("token") - before == generated
    assert (samples["rollout_logprob_T"][samples["loss_mask_T"] == 0] == 0).all()
    assert 0 < samples["finished_B"].sum() < len(samples), "the case must hold both kinds of ending"


def test_groups_are_emitted_whole(engine: RolloutEngine) -> None:
    parts: list[Batch] = []
    engine.generate(make_prompts(16, 2), Sampling(seed=1, max_response_tokens=60), parts.append)
    assert len(parts) > 1
    for part in parts:
        assert set(np.unique(part["group_B"], return_counts=True)[1]) == {2}


def test_samples_depend_on_seed_and_id_only(kind: str, folder: Path, engine: RolloutEngine) -> None:
    prompts = make_prompts(6, 4)
    whole = answer(engine, prompts)
    shuffled = prompts.select(np.random.default_rng(1).permutation(len(prompts)))
    halves = [prompts.select(np.arange(0, 24, 2)), prompts.select(np.arange(1, 24, 2))]
    few = {"torch": {"max_sequences": 3, "prefill_tokens": 8}, "sglang": {"max_sequences": 3}}
    few_slots = build(kind, folder, **few.get(kind, {}))
    others = [
        answer(engine, shuffled),
        answer(few_slots, prompts),
        {k: v for h in halves for k, v in answer(engine, h).items()},
    ]
    for other in others:
        assert {k: v[0] for k, v in other.items()} == {k: v[0] for k, v in whole.items()}
        for name, (_, logprobs, _) in whole.items():
            np.testing.assert_allclose(other[name][1], logprobs, atol=1e-4)
    reseeded = answer(engine, prompts, Sampling(seed=4, max_response_tokens=12))
    assert {k: v[0] for k, v in reseeded.items()} != {k: v[0] for k, v in whole.items()}
    assert len({tuple(v[0]) for v in whole.values()}) > 12, "samples of one prompt must differ"


def test_logprobs_equal_score(engine: RolloutEngine) -> None:
    parts: list[Batch] = []
    engine.generate(make_prompts(), Sampling(seed=2, temperature=0.7, max_response_tokens=15), parts.append)
    samples = Batch.concat(parts)
    scores = engine.score(samples.only(["tokens_T"]), 0.7)
    inside = samples["loss_mask_T"] == 1
    np.testing.assert_allclose(samples["rollout_logprob_T"][inside], scores[inside], atol=1e-4)
    assert (scores[samples.offsets[:-1]] == 0).all()
    others = np.delete(scores, samples.offsets[:-1])
    assert (others < 0).all(), "every token but each first has a log-prob"


def test_sampling_follows_the_distribution(kind: str, engine: RolloutEngine) -> None:
    """Pearson's χ² of 4000 first tokens against score's probabilities. The seed is fixed, so this cannot flake."""
    count = 4000
    prompt = np.array([5, 9])
    prompts = batch_of([prompt] * count, np.arange(count), np.zeros(count, dtype=np.int64))
    for temperature, top_k in ((1.0, 0), (1.3, 0 if kind == "sglang" else 4)):  # sglang refuses top_k
        found = answer(engine, prompts, Sampling(seed=11, temperature=temperature, top_k=top_k, max_response_tokens=1))
        seen = np.bincount([tokens[0] for tokens, _, _ in found.values()], minlength=23)
        pairs = batch_of([np.array([5, 9, token]) for token in range(23)], np.arange(23), np.arange(23))
        probability = np.exp(engine.score(pairs, temperature).reshape(23, 3)[:, 2].astype(np.float64))
        if top_k:
            probability[probability < np.sort(probability)[-top_k]] = 0
            assert seen[probability == 0].sum() == 0
        probability /= probability.sum()
        likely = probability * count > 5
        chi2 = (((seen - probability * count) ** 2)[likely] / (probability * count)[likely]).sum()
        degrees = likely.sum() - 1
        assert chi2 < degrees + 4 * np.sqrt(2 * degrees), f"chi2 {chi2:.1f} with {degrees} degrees of freedom"


def test_new_weights_change_samples_and_old_ones_return(engine: RolloutEngine) -> None:
    """A cache that outlives a sync would answer from the old weights."""
    prompts = make_prompts()
    before = answer(engine, prompts)
    give_weights(engine, seed=1)
    assert {k: v[0] for k, v in answer(engine, prompts).items()} != {k: v[0] for k, v in before.items()}
    give_weights(engine, seed=0)
    assert answer(engine, prompts) == before


def test_import_returns_the_checksum_of_what_is_held(engine: RolloutEngine) -> None:
    for spec in engine.weight_specs():
        data = np.random.default_rng(0).normal(size=spec.shape).astype(np.float32).reshape(-1).view(np.uint8)
        frozen = data.copy()
        frozen.flags.writeable = False
        assert len(data) == spec.nbytes
        assert engine.import_weight(spec, frozen) == checksum_bytes(data)


def test_weights_from_a_device_are_loaded_and_summed_there(kind: str, engine: RolloutEngine) -> None:
    """As a sync on one GPU brings them, several at once, into an engine that can: the samples are those of weights from
    the host. (Here the device is the CPU. The `torch` engine and vLLM's worker must do without numpy meanwhile.)"""
    import torch

    prompts = make_prompts()
    before = answer(engine, prompts)
    rng, weights = np.random.default_rng(0), []
    for spec in engine.weight_specs():
        values = 0.3 * rng.standard_normal(spec.shape, dtype=np.float32) + ("norm" in spec.name)
        weights.append((spec, torch.from_numpy(values.astype(np.float32).reshape(-1).view(np.uint8))))
    give_weights(engine, seed=1)
    with nothing_over_the_host() if kind == "torch" else nullcontext():
        checksums = [engine.import_from_device(some) for some in (weights[:3], weights[3:])]
    if kind in ("fake", "sglang"):
        assert checksums == [None, None]
        assert answer(engine, prompts) != before
        return
    assert [*checksums[0], *checksums[1]] == word_sums([bytes_U.view(torch.float32) for _, bytes_U in weights])
    engine.finish_import()
    assert answer(engine, prompts) == before
    spec, bytes_U = weights[1]
    with pytest.raises(SyncError, match=spec.name):
        engine.import_from_device([weights[0], (spec, bytes_U[:-4])])


def test_bad_imports_name_the_weight(engine: RolloutEngine) -> None:
    spec = engine.weight_specs()[0]
    data = np.zeros(spec.nbytes, dtype=np.uint8)
    wrong = [
        (WeightSpec("no.such.weight", spec.dtype, spec.shape, spec.nbytes), data),
        (WeightSpec(spec.name, "bf16", spec.shape, spec.nbytes), data),
        (WeightSpec(spec.name, spec.dtype, (*spec.shape, 1), spec.nbytes), data),
        (spec, data[:-4]),
    ]
    for bad, buffer in wrong:
        with pytest.raises(SyncError, match=bad.name):
            engine.import_weight(bad, buffer)


def test_an_incomplete_import_is_refused(kind: str, folder: Path) -> None:
    fresh = engine_class(kind).build(rollout_config(folder, kind), Rank())
    with pytest.raises(SyncError, match="no complete set"):
        answer(fresh, make_prompts())
    specs = fresh.weight_specs()
    for spec in specs[1:]:
        fresh.import_weight(spec, np.zeros(spec.nbytes, dtype=np.uint8))
    with pytest.raises(SyncError, match=specs[0].name):
        fresh.finish_import()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(engine: RolloutEngine, level: int) -> None:
    prompts = make_prompts()
    before = answer(engine, prompts)
    engine.sleep(level)
    with pytest.raises(RlctlError, match="asleep"):
        answer(engine, prompts)
    engine.wake(["weights"])
    with pytest.raises(RlctlError, match="asleep"):
        answer(engine, prompts)
    if level == 2:
        with pytest.raises(SyncError, match="no complete set"):
            engine.score(prompts.only(["tokens_T"]), 1.0)
        give_weights(engine)
    engine.wake(["kv_cache"])
    assert answer(engine, prompts) == before


def test_too_long_and_empty_prompts_are_refused(engine: RolloutEngine) -> None:
    with pytest.raises(BatchError, match=f"built for {MAX_TOKENS}"):
        answer(engine, make_prompts(), Sampling(seed=0, max_response_tokens=MAX_TOKENS))
    one = np.zeros(1, dtype=np.int64)
    with pytest.raises(BatchError, match="empty"):
        answer(engine, batch_of([np.zeros(0, dtype=np.int64)], one, one))


def test_prompts_of_a_prefix_are_equal_and_those_of_a_group_need_not_be(engine: RolloutEngine) -> None:
    rows, id_B, group_B = [np.array([3, 4]), np.array([3, 5]), np.array([3, 4])], np.arange(3), np.array([6, 6, 7])
    with pytest.raises(BatchError, match="samples 0 and 1 have prefix_B 8 but different prompts"):
        answer(engine, batch_of(rows, id_B, group_B, prefix_B=np.array([8, 8, 9])))
    apart = answer(engine, batch_of(rows, id_B, group_B, prefix_B=np.array([0, 1, 2])))
    assert answer(engine, batch_of(rows, id_B, group_B, prefix_B=np.array([0, 1, 0]))) == apart
    with pytest.raises(BatchError, match="position_B is negative"):
        answer(engine, batch_of(rows, id_B, id_B, position_B=np.array([0, -1, 0])))


def test_a_second_turn_draws_on_from_the_first(kind: str, engine: RolloutEngine) -> None:
    """A completion that is cut and gone on with, as one turn follows another. Engines that draw with numbers of ours
    write what they would have written in one call; the others draw anew, but never the same numbers twice."""
    prompts, cut = make_prompts(6, 4), 5
    whole = answer(engine, prompts, Sampling(seed=3, max_response_tokens=12))
    named = dict(zip(prompts["id_B"].tolist(), prompts.sequences("tokens_T"), strict=True))
    longer = sorted(name for name, (tokens, _, _) in whole.items() if len(tokens) > cut)
    assert len(longer) > 8

    def second_turn(position: int) -> dict[int, tuple[list[int], list[float], int]]:
        rows = [np.array([*named[name], *whole[name][0][:cut]]) for name in longer]
        ids, names = np.array(longer), np.arange(len(longer))
        group_B = prompts.select(np.flatnonzero(np.isin(prompts["id_B"], ids)))["group_B"]
        turn = batch_of(rows, ids, group_B, prefix_B=names, position_B=np.full(len(rows), position))
        return answer(engine, turn, Sampling(seed=3, max_response_tokens=12 - cut))

    on, anew = second_turn(cut), second_turn(0)
    assert {name: found[0] for name, found in anew.items()} != {name: found[0] for name, found in on.items()}
    assert second_turn(cut) == on
    if kind in ("fake", "torch"):
        for name in longer:
            tokens, logprobs, finished = whole[name]
            assert (on[name][0], on[name][2]) == (tokens[cut:], finished)
            np.testing.assert_allclose(on[name][1], logprobs[cut:], atol=0 if kind == "fake" else 1e-5)


def test_turns_join_into_one_sample_with_a_hole_in_its_mask(engine: RolloutEngine) -> None:
    """As an environment does it: a tool's reply goes behind each completion; the second turn's columns, with the first
    turn's mask and log-probs laid over their beginning, are the sample."""
    first: list[Batch] = []
    engine.generate(make_prompts(3, 2), Sampling(seed=5, max_response_tokens=6), first.append)
    turn = Batch.concat(first)
    tool = np.array([9, 8, 9])
    rows = [np.concatenate([tokens, tool]) for tokens in turn.sequences("tokens_T")]
    names, drawn_B = np.arange(len(turn)), turn.sum_by_sequence("loss_mask_T")
    again = batch_of(rows, turn["id_B"], turn["group_B"], prefix_B=names, position_B=drawn_B)
    second: list[Batch] = []
    engine.generate(again, Sampling(seed=5, max_response_tokens=6), second.append)
    last = Batch.concat(second)
    last = last.select([last["id_B"].tolist().index(name) for name in turn["id_B"].tolist()])
    joined = {name: last[name].copy() for name in ("tokens_T", "loss_mask_T", "rollout_logprob_T", "length_B")}
    for index, start in enumerate(last.offsets[:-1]):
        for name in ("loss_mask_T", "rollout_logprob_T"):
            before = turn.sequences(name)[index]
            joined[name][start : start + len(before)] = before
    samples = Batch(joined)
    mask_T = samples["loss_mask_T"] == 1
    turns_B = [int((np.diff(mask, prepend=0) == 1).sum()) for mask in samples.sequences("loss_mask_T")]
    assert turns_B == [2] * len(turn)
    assert samples["tokens_T"][mask_T].size == drawn_B.sum() + last.sum_by_sequence("loss_mask_T").sum()
    scores = engine.score(samples.only(["tokens_T"]), 1.0)
    np.testing.assert_allclose(samples["rollout_logprob_T"][mask_T], scores[mask_T], atol=1e-4)


def test_greedy_samples_among_others(kind: str, engine: RolloutEngine) -> None:
    """As in a call of their own, and nothing of them moves the others."""
    prompts, sampling = make_prompts(), Sampling(seed=1, temperature=0.7, max_response_tokens=10)
    chosen = np.arange(len(prompts)) % 4 == 3
    mixed = answer(engine, prompts.with_columns(greedy_B=chosen.astype(np.uint8)), sampling)
    drawn = answer(engine, prompts, sampling)
    likeliest = answer(engine, prompts, sampling.model_copy(update={"greedy": True}))
    for name, greedy in zip(prompts["id_B"].tolist(), chosen.tolist(), strict=True):
        alone = (likeliest if greedy else drawn)[name]
        assert (mixed[name][0], mixed[name][2]) == (alone[0], alone[2])
        np.testing.assert_allclose(mixed[name][1], alone[1], atol=1e-4)
    assert any(drawn[name][0] != likeliest[name][0] for name in mixed)


# ── requests ──────────────────────────────────────────────────────────────────────────────────────


def requests_of(prompts: Batch, sampling: Sampling) -> list[SampleRequest]:
    return Completions(prompts, sampling, lambda part: None).requests()


def test_requests_that_come_and_go_are_what_they_are_in_a_batch(engine: RolloutEngine) -> None:
    """Whoever else is there, however each is sampled, and after how many of the others it comes."""
    prompts, hot = make_prompts(6, 3), Sampling(seed=4, temperature=0.8, max_response_tokens=14)
    ways = (hot, hot.model_copy(update={"greedy": True}), hot.model_copy(update={"max_response_tokens": 5}))
    wanted = [answer(engine, prompts, way) for way in ways]
    mixed = [
        replace(request, sampling=ways[number % 3], prefix=number)
        for number, request in enumerate(requests_of(prompts, hot))
    ]
    found: dict[int, Completion] = {}

    def step() -> None:
        found.update({done.id: done for done in engine.step()})

    engine.add(mixed[:4])
    step()
    engine.add(mixed[4:11])
    open_ids = [request.id for request in mixed[:11] if request.id not in found]
    dropped = [open_ids[0], open_ids[-1]]  # begun, unless a server was done with all four, and just added
    engine.abort([*dropped, 7])
    assert engine.open_requests == len(open_ids) - 2, "one that is not open is left alone"
    with pytest.raises(BatchError, match="is being drawn already"):
        engine.add([mixed[12], next(one for one in mixed if one.id == open_ids[1])])
    step()
    engine.add(mixed[11:])
    while engine.open_requests:
        step()
    assert found.keys() == {request.id for request in mixed} - set(dropped)
    engine.add([request for request in mixed if request.id in dropped])
    while engine.open_requests:
        step()
    for number, request in enumerate(mixed):
        tokens, logprobs, finished = wanted[number % 3][request.id]
        done = found[request.id]
        assert (done.tokens.tolist(), done.finished) == (tokens, bool(finished))
        np.testing.assert_allclose(done.logprobs, logprobs, atol=1e-4)


def test_nothing_changes_under_requests_that_are_open(engine: RolloutEngine) -> None:
    requests = requests_of(make_prompts(3, 2), Sampling(seed=4, max_response_tokens=9))
    spec = engine.weight_specs()[0]
    engine.add(requests)
    with pytest.raises(SyncError, match="while 6 samples are being drawn"):
        engine.import_weight(spec, np.zeros(spec.nbytes, np.uint8))
    with pytest.raises(SyncError, match="while 6 samples are being drawn"):
        engine.finish_import()
    with pytest.raises(SyncError, match="put to sleep while 6 samples are being drawn"):
        engine.sleep(1)
    engine.abort()
    assert (engine.open_requests, list(engine.step())) == (0, [])
    assert answer(engine, make_prompts()), "goes on"


def test_requests_that_cannot_begin_leave_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as without memory for a cache: the engine serves those that come after, and those that were there."""
    engine = build("torch", write_model(tmp_path / "model"))
    first, *rest = requests_of(make_prompts(3, 2), Sampling(seed=4, max_response_tokens=9))
    engine.add([first])
    with monkeypatch.context() as patched:
        patched.setattr(KvCache, "grow", raised)
        with pytest.raises(MemoryError):
            engine.add(rest)
    assert engine.open_requests == 1
    found = [done.id for _ in range(9) for done in engine.step()]
    assert found == [first.id]
    assert len(answer(engine, make_prompts())) == len(make_prompts())


def raised(*given: object) -> None:
    raise MemoryError


def test_a_request_that_is_wrong_is_refused_with_those_that_came_along(engine: RolloutEngine) -> None:
    first, second = requests_of(make_prompts(2, 1), Sampling(seed=4, max_response_tokens=9))
    long = second.sampling.model_copy(update={"max_response_tokens": MAX_TOKENS})
    for wrong, why in (
        (replace(second, sampling=long), "the rollout was built for"),
        (replace(second, tokens=second.tokens[:0]), "needs a token to start from"),
        (replace(second, tokens=np.array([4, VOCAB])), "has token 23, and the model knows those below 23"),
        (replace(second, id=first.id), "is being drawn already"),
        (replace(second, position=-1), "position_B is negative"),
        (replace(second, prefix=first.prefix), "a prefix needs equal prompts"),
    ):
        with pytest.raises(BatchError, match=why):
            engine.add([first, wrong])
        assert engine.open_requests == 0


def test_a_stop_text_must_be_one_token(kind: str) -> None:
    if kind == "vllm":
        pytest.skip("another model wants a process of its own: test_vllm_rollout.py has one")
    tiny = Path(__file__).parents[2] / "specs" / "builtin" / "tiny-digits"
    config = rollout_config(tiny, kind, stop=("12",))
    config = config.model_copy(update={"model": config.model.model_copy(update={"max_sequence_tokens": 32})})
    with pytest.raises(ModelError, match="'12' is 2 tokens"):
        engine_class(kind).build(config, Rank())
    single = engine_class(kind).build(config.model_copy(update={"stop": ("7",)}), Rank())
    give_weights(single)
    found = answer(single, batch_of([np.array([4])] * 64, np.arange(64), np.zeros(64, dtype=np.int64)))
    ends = {tokens[-1] for tokens, _, finished in found.values() if finished}
    assert len(ends) == 2, "answers end at the model's end token or at the stop text"

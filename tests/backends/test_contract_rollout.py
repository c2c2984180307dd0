"""What every rollout engine promises (`backends.protocol.RolloutEngine`). vLLM runs in its own interpreter, one process
for all tests (`vllm_process.py`); sglang speaks to a server of ours (`tests/support/sglang_server.py`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rollout_helpers import END, MAX_TOKENS, answer, batch_of, give_weights, make_prompts, rollout_config, write_model
from sglang_helpers import SharedSglang
from vllm_process import RemoteVllm, needs_vllm, shared_folder

from backends.checksum import checksum_bytes
from backends.protocol import Rank, RolloutEngine, WeightSpec
from backends.registry import rollout_engine
from specs.batch import Batch
from specs.errors import BatchError, ModelError, RlctlError, SyncError
from specs.messages import SAMPLE_COLUMNS
from specs.role_config import Sampling

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
    counters = engine.generate(prompts, Sampling(seed=1, max_response_tokens=9), parts.append)
    samples = Batch.concat(parts)
    assert set(samples.columns) == {*SAMPLE_COLUMNS, "length_B"}
    assert sorted(samples["id_B"].tolist()) == sorted(prompts["id_B"].tolist())
    asked = {
        i: (g, r, t.tolist())
        for i, g, r, t in zip(
            *(prompts[n].tolist() for n in ("id_B", "group_B", "row_B")), prompts.sequences("tokens_T"), strict=True
        )
    }
    generated = 0
    for index, (tokens, mask) in enumerate(
        zip(samples.sequences("tokens_T"), samples.sequences("loss_mask_T"), strict=True)
    ):
        group, row, prompt = asked[int(samples["id_B"][index])]
        assert (int(samples["group_B"][index]), int(samples["row_B"][index])) == (group, row)
        assert tokens[: len(prompt)].tolist() == prompt
        assert mask.tolist() == [0] * len(prompt) + [1] * (len(tokens) - len(prompt))
        answer_tokens = tokens[len(prompt) :].tolist()
        assert 1 <= len(answer_tokens) <= 9
        assert END not in answer_tokens[:-1], "nothing may follow the end token"
        assert bool(samples["finished_B"][index]) == (answer_tokens[-1] == END)
        assert samples["finished_B"][index] or len(answer_tokens) == 9
        generated += len(answer_tokens)
    assert counters["generated_tokens"] == generated
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


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logprobs_equal_score(engine: RolloutEngine, temperature: float) -> None:
    parts: list[Batch] = []
    engine.generate(make_prompts(), Sampling(seed=2, temperature=temperature, max_response_tokens=15), parts.append)
    samples = Batch.concat(parts)
    scores = engine.score(samples.only(["tokens_T"]), temperature)
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


def test_nothing_asked_nothing_given(engine: RolloutEngine) -> None:
    assert answer(engine, make_prompts().select([])) == {}


def test_too_long_and_empty_prompts_are_refused(engine: RolloutEngine) -> None:
    with pytest.raises(BatchError, match=f"built for {MAX_TOKENS}"):
        answer(engine, make_prompts(), Sampling(seed=0, max_response_tokens=MAX_TOKENS))
    one = np.zeros(1, dtype=np.int64)
    with pytest.raises(BatchError, match="empty"):
        answer(engine, batch_of([np.zeros(0, dtype=np.int64)], one, one))


def test_a_group_with_two_prompts_is_refused(engine: RolloutEngine) -> None:
    rows = [np.array([3, 4]), np.array([3, 5])]
    with pytest.raises(BatchError, match="different prompts"):
        answer(engine, batch_of(rows, np.arange(2), np.zeros(2, dtype=np.int64)))


def test_greedy_ignores_seed_and_id(engine: RolloutEngine) -> None:
    first, second = (
        answer(engine, make_prompts(first_id=first), Sampling(seed=seed, greedy=True, max_response_tokens=10))
        for first, seed in ((0, 1), (999, 2))
    )
    assert [v[0] for _, v in sorted(first.items())] == [v[0] for _, v in sorted(second.items())]


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

"""The sglang engine against a strict server of SGLang's interface (`tests/support/sglang_server.py`), real log-probs.

What it promises as every rollout engine does is in `test_protocol_rollout.py`. The real SGLang runs on GPUs only: the
tests at the end.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from process_ends import ended
from rollout_helpers import answer, batch_of, give_weights, given_model, make_prompts, rollout_config, write_model
from sglang_helpers import build_sglang, fault, mend, sglang_installed
from stock_model import logprobs

from backends.completions import SampleRequest
from backends.protocol import Rank
from backends.sglang_rollout.client import ServerError, parse_sample
from backends.sglang_rollout.engine import SglangRolloutEngine
from specs.errors import ModelError, RlctlError, SamplerDied, SyncError
from specs.wire.batch import Batch
from specs.wire.role_config import Sampling


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def engine(folder: Path) -> SglangRolloutEngine:
    built = build_sglang(folder)
    give_weights(built)
    return built


@torch.inference_mode()
def hf_logprobs(engine: SglangRolloutEngine, samples: Batch, temperature: float, seed: int = 0) -> np.ndarray:
    """log p of every token but each first, by the Hugging Face model with the weights of `give_weights`."""
    return logprobs(given_model(engine, seed), samples.only(["tokens_T"]), temperature).numpy()


# ── log-probs ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tied", [False, True])
def test_logprobs_are_those_of_the_model_at_the_temperature(tmp_path: Path, tied: bool) -> None:
    folder = write_model(tmp_path / "model", tie_word_embeddings=tied)
    engine = build_sglang(folder)
    give_weights(engine)
    parts: list[Batch] = []
    prompts, counts = make_prompts(), engine.counts
    engine.generate(prompts, Sampling(seed=5, temperature=0.8, max_response_tokens=12), parts.append)
    assert 0 < counts["reused_tokens"] == prompts.num_tokens - counts["prefilled_tokens"], "a group has one prompt"
    samples = Batch.concat(parts)
    want_T = hf_logprobs(engine, samples, 0.8)
    inside = samples["loss_mask_T"] == 1
    np.testing.assert_allclose(samples["rollout_logprob_T"][inside], want_T[inside], atol=1e-5)
    np.testing.assert_allclose(engine.score(samples.only(["tokens_T"]), 0.8), want_T, atol=1e-5)
    assert np.abs(hf_logprobs(engine, samples, 1.0) - want_T)[inside].max() > 0.1, "the temperature must show"


# ── groups ────────────────────────────────────────────────────────────────────────────────────────


def test_a_slow_group_holds_nobody_up(engine) -> None:
    rows = [np.array([first, 4]) for first in (9, 5, 6, 7)]
    came: list[int] = []
    meanwhile: list[int] = []  # before the slow one may be answered

    def note(part: Batch) -> None:
        came.extend(part["group_B"].tolist())
        if len(came) == 3:
            meanwhile.extend(came)
            mend()

    with fault("slow:9"):  # the first in the queue
        engine.generate(batch_of(rows, np.arange(4), np.arange(4)), Sampling(seed=0, max_response_tokens=4), note)
    assert sorted(meanwhile) == [1, 2, 3]
    assert came == [*meanwhile, 0]


# ── weights ───────────────────────────────────────────────────────────────────────────────────────


def test_no_copy_of_the_weights_outlives_the_role_or_the_sync(folder: Path, tmp_path: Path) -> None:
    transport = tmp_path / "transport"
    transport.mkdir()
    engine = build_sglang(folder, weights_dir=str(transport))
    spec = engine.weight_specs()[0]
    engine.import_weight(spec, np.zeros(spec.nbytes, dtype=np.uint8))
    half_way = engine._folder
    (link,) = half_way.path.iterdir()
    assert link.is_symlink(), "a killed role must leave no file behind"
    assert link.stat().st_size > sum(one.nbytes for one in engine.weight_specs())
    assert list(transport.iterdir()) == []
    assert half_way.path.stat().st_mode & 0o077 == 0, "others can reach the weights"
    engine.sleep(2)
    assert not half_way.path.exists()
    engine.wake(["weights", "kv_cache"])
    give_weights(engine)
    assert engine._folder is None


def test_weights_stay_until_all_ranks_of_the_server_have_read_them(engine) -> None:
    """SGLang answers for its first rank, which waits for no other."""
    with fault("late-rank"):
        give_weights(engine, seed=1)
    assert engine._folder is None


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_tensor_that_the_server_did_not_load_is_named(engine, name) -> None:
    with fault(f"stale:{name}"), pytest.raises(SyncError, match=f"{name} .*still the old one"):
        give_weights(engine, seed=1)
    with pytest.raises(SyncError, match="no complete set"):
        answer(engine, make_prompts())


@pytest.mark.parametrize("kind", ["stale:model.layers.1.self_attn.k_proj.weight", "packed-head"])
def test_what_hashes_cannot_show_behaviour_does(engine, kind: str) -> None:
    """A part of a fused tensor whose other parts changed; a packed copy of the head. Only the probe sees these."""
    probe = batch_of([np.array([3, 4, 5, 6])], np.arange(1), np.arange(1))
    gaps = []
    for seed in (1, 2):
        with fault(kind if seed == 1 else ""):
            give_weights(engine, seed=seed)
        want_T = hf_logprobs(engine, probe, 1.0, seed)
        gaps.append(np.abs(engine.score(probe, 1.0) - want_T).max())
    assert gaps[0] > 0.01, "with the fault"
    assert gaps[1] < 1e-5, "after the next, sound sync"


def test_weights_that_change_by_themselves_are_named(engine) -> None:
    other = build_sglang(Path(engine.config.model.path))
    assert other.server is engine.server
    give_weights(other, seed=7)  # behind the first one's back
    give_weights(engine, seed=0)  # loads its own again: all is as it was
    engine._fingerprints.check(engine._fingerprints._checksums, engine._hashes())
    give_weights(other, seed=7)
    with pytest.raises(SyncError, match="something else wrote"):
        engine._fingerprints.check(engine._fingerprints._checksums, engine._hashes())


# ── sleep ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_probe_works_while_the_cache_sleeps_and_leaves_it_asleep(engine) -> None:
    probe = batch_of([np.array([3, 4, 5])], np.arange(1), np.arange(1))
    before = engine.score(probe, 1.0)
    engine.sleep(2)
    engine.wake(["weights"])
    give_weights(engine)
    assert engine.score(probe, 1.0).tolist() == before.tolist()
    with pytest.raises(RlctlError, match="kv_cache are asleep"):
        answer(engine, make_prompts())


# ── the server ────────────────────────────────────────────────────────────────────────────────────


def test_what_was_built_is_what_the_server_says(engine) -> None:
    built = engine.built()
    assert (built.model_class, built.dtype, built.attn_implementation) == ("Qwen2ForCausalLM", "fp32", "torch_native")
    assert built.attn_function == "sglang 0.5.23: torch_native"
    assert (built.layers, built.hidden_size, built.vocab_size) == (2, 32, 23)


def test_an_older_sglang_is_refused(folder: Path) -> None:
    with fault("version:0.5.9"), pytest.raises(ModelError, match=r"0\.5\.9 is older than 0\.5\.23"):
        build_sglang(folder)


def test_a_server_that_dies_is_named(folder: Path) -> None:
    with sglang_installed(), warm.children():
        engine = SglangRolloutEngine.build(rollout_config(folder, "sglang"), Rank())
    give_weights(engine)
    for _ in ("while it answers", "before"):
        with fault("die"), pytest.raises(SamplerDied, match="ended with exit code 17"):
            answer(engine, make_prompts())
    engine.close()


def test_the_server_dies_with_the_role(folder: Path) -> None:
    with sglang_installed():
        child = os.fork()
        if child == 0:  # a role that is killed before it can close anything
            server = SglangRolloutEngine.build(rollout_config(folder, "sglang"), Rank()).server
            Path(folder, "pid").write_text(str(server.process.pid))
            os.kill(os.getpid(), 9)
        os.waitpid(child, 0)
    pid = int(Path(folder, "pid").read_text())
    assert ended(pid)


# ── answers that do not add up ────────────────────────────────────────────────────────────────────

GOOD = {
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 1},
        "completion_tokens": 2,
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 1, None]],
    }
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"finish_reason": {"type": "abort", "message": "out of memory"}}, "out of memory"),
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, "NaN happened"),
        ({"finish_reason": {"type": "length", "length": 2}}, "2 tokens, though 9 were allowed"),
        ({"completion_tokens": 3}, "2 log-probs came with a completion of 3 tokens"),
        ({"output_token_logprobs": [[-0.5, 7, None], [float("nan"), 1, None]]}, "not a finite number"),
    ],
)
def test_broken_answers_are_refused(change, words) -> None:
    request = SampleRequest(0, np.zeros(1, dtype=np.int64), Sampling(seed=0, temperature=1.0, max_response_tokens=9))
    parse_sample(GOOD, request)
    with pytest.raises(ServerError, match=words):
        parse_sample({"meta_info": GOOD["meta_info"] | change}, request)


# ── the real SGLang ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.gpu
@pytest.mark.slow
def test_real_sglang(tmp_path: Path) -> None:
    """Import, log-probs against Hugging Face, sleep at level 2, import again. Needs SGLang in this interpreter."""
    pytest.importorskip("sglang")
    folder = write_model(tmp_path / "model", hidden_size=256, intermediate_size=512, architectures=["Qwen2ForCausalLM"])
    config = rollout_config(folder, "sglang", memory_fraction=0.2)
    config = config.model_copy(update={"model": config.model.model_copy(update={"device": "cuda"})})
    engine = SglangRolloutEngine.build(config, Rank())
    try:
        give_weights(engine, scale=0.1)
        parts: list[Batch] = []
        for round_ in range(2):
            engine.generate(
                make_prompts(), Sampling(seed=round_, temperature=0.8, max_response_tokens=12), parts.append
            )
            samples = parts[-1]
            inside = samples["loss_mask_T"] == 1
            scores = engine.score(samples.only(["tokens_T"]), 0.8)
            np.testing.assert_allclose(samples["rollout_logprob_T"][inside], scores[inside], atol=5e-3)
            engine.sleep(2)
            engine.wake(["weights"])
            give_weights(engine, seed=round_ + 1, scale=0.1)
            engine.wake(["kv_cache"])
    finally:
        engine.close()

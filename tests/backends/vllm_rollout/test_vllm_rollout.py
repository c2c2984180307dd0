"""The vLLM rollout engine against Hugging Face's forward pass. What all rollout engines promise is tested in
`test_protocol_rollout.py`, with the same vLLM process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from families import FAMILIES
from numpy.typing import NDArray
from optional import needs_vllm
from rollout_helpers import answer, batch_of, give_weights, make_prompts, rollout_config
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_process import VLLM_SHAPE, RemoteVllm, VllmProcess, fresh_vllm, shared_folder

from backends.completions import Completions
from backends.protocol import WeightSpec
from backends.vllm_rollout.read_back import checksum_of, word_sum_of
from backends.vllm_rollout.worker import CopiesFrom, Piece, SummedPiece
from backends.weights.checksum import checksum_bytes
from backends.weights.tensor_bytes import named_weights, tensor_bytes, wire_dtype
from backends.weights.word_sum import total_of_part, word_sums
from specs.errors import SyncError
from specs.wire.batch import Batch
from specs.wire.role_config import Sampling

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(400)]

EXACT = 1e-4  # nats, fp32
TINY_DIGITS = Path(__file__).parents[3] / "specs" / "builtin" / "tiny-digits"


class Reference:
    """The trainer's side: a Hugging Face model of the same folder, in this interpreter's own transformers."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa")
        self.model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)

    def send_to(self, engine: RemoteVllm) -> None:
        """A sync: every weight's checksum as it was sent must be the one read back."""
        for spec in engine.weight_specs():
            data = tensor_bytes(named_weights(self.model)[spec.name])
            assert engine.import_weight(spec, data) == checksum_bytes(data), spec.name
        engine.finish_import()

    @torch.inference_mode()
    def logits(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        return self.model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0]

    def logprobs(self, batch: Batch, temperature: float, top_k: int = 0) -> NDArray[np.float32]:
        """`logprob_T` of every token but each first, after temperature and top-k."""
        found = []
        for tokens in batch.sequences("tokens_T"):
            logits = self.logits(tokens)[:-1] / temperature
            if top_k:
                logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
            scores = logits.log_softmax(-1).gather(-1, torch.from_numpy(tokens)[1:, None])[:, 0]
            found += [np.zeros(1, np.float32), scores.numpy()]
        return np.concatenate(found)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(shared_folder())


@pytest.fixture
def engine(reference: Reference) -> RemoteVllm:
    fresh = fresh_vllm()
    reference.send_to(fresh)
    return fresh


def sample(engine: RemoteVllm, **sampling: float) -> Batch:
    parts: list[Batch] = []
    engine.generate(make_prompts(), Sampling(seed=5, max_response_tokens=15, **sampling), parts.append)
    return Batch.concat(parts)


def test_log_probs_are_hugging_faces(engine: RemoteVllm, reference: Reference) -> None:
    batch = sample(engine, temperature=0.8)
    inside = batch["loss_mask_T"] == 1
    want_T = reference.logprobs(batch, 0.8)
    np.testing.assert_allclose(batch["rollout_logprob_T"][inside], want_T[inside], atol=EXACT)
    assert inside.sum() > 100
    assert want_T[inside].std() > 0.3, "a distribution this flat would hide a wrong token"
    batch = batch.only(["tokens_T"])
    np.testing.assert_allclose(engine.score(batch, 0.7), reference.logprobs(batch, 0.7), atol=EXACT)


def test_greedy_takes_the_likeliest_and_reports_its_plain_logprob(engine: RemoteVllm, reference: Reference) -> None:
    prompts = make_prompts(4, 1)
    found = answer(engine, prompts, Sampling(seed=0, greedy=True, temperature=0.5, max_response_tokens=10))
    for index, prompt in enumerate(prompts.sequences("tokens_T")):
        tokens, logprobs, _ = found[int(prompts["id_B"][index])]
        sequence = np.concatenate([prompt, tokens])
        scores = reference.logits(sequence)[len(prompt) - 1 : -1].log_softmax(-1)
        assert tokens == scores.argmax(-1).tolist()
        np.testing.assert_allclose(logprobs, scores.max(-1).values.numpy(), atol=EXACT)


def test_prompts_beyond_what_a_step_of_vllm_takes(engine: RemoteVllm, reference: Reference) -> None:
    """It takes 4096 tokens at most, and a part of the prompt that has no room would want a random state back."""
    rows = list(np.random.default_rng(3).integers(2, 23, (60, 80)))
    prompts = batch_of(rows, np.arange(60), np.arange(60))
    parts: list[Batch] = []
    engine.generate(prompts, Sampling(seed=5, max_response_tokens=4), parts.append)
    batch = Batch.concat(parts)
    assert len(batch) == 60
    inside = batch["loss_mask_T"] == 1
    want_T = reference.logprobs(batch, 1.0)
    np.testing.assert_allclose(batch["rollout_logprob_T"][inside], want_T[inside], atol=EXACT)


def test_what_was_built(engine: RemoteVllm, reference: Reference) -> None:
    built = engine.built()
    assert built.model_class == "Qwen2ForCausalLM"
    assert built.parameters == sum(p.numel() for p in reference.model.parameters())
    assert (built.hidden_size, built.layers, built.vocab_size) == (VLLM_SHAPE["hidden_size"], 2, 23)
    assert (built.dtype, built.tied_embeddings, built.path) == ("fp32", False, str(shared_folder()))
    assert built.attn_implementation == "CPU_ATTN"
    assert built.attn_function.startswith("vllm.v1.attention")


def test_a_swapped_weight_is_seen_by_score(engine: RemoteVllm, reference: Reference) -> None:
    """Two halves of one fused tensor, of the same shape: each lands in its own place."""
    batch = sample(engine).only(["tokens_T"])
    weights = named_weights(reference.model)
    names = [f"model.layers.0.mlp.{half}_proj.weight" for half in ("gate", "up")]
    specs = {spec.name: spec for spec in engine.weight_specs()}
    for spec in specs.values():
        taken = dict(zip(names, reversed(names), strict=True)).get(spec.name, spec.name)
        engine.import_weight(spec, tensor_bytes(weights[taken]))
    engine.finish_import()
    assert np.abs(engine.score(batch, 1.0) - reference.logprobs(batch, 1.0)).max() > 0.05
    for name in names:
        engine.import_weight(specs[name], tensor_bytes(weights[name]))
    for spec in specs.values():
        engine.import_weight(spec, tensor_bytes(weights[spec.name]))
    engine.finish_import()
    np.testing.assert_allclose(engine.score(batch, 1.0), reference.logprobs(batch, 1.0), atol=EXACT)


def test_the_probe_runs_between_waking_weights_and_cache(engine: RemoteVllm, reference: Reference) -> None:
    """The order of a sync on shared devices: asleep, weights awake, import, score, cache awake."""
    batch = sample(engine).only(["tokens_T"])
    later = Reference(shared_folder(), seed=1)
    engine.sleep(2)
    engine.wake(["weights"])
    with pytest.raises(SyncError, match="no complete set"):
        engine.score(batch, 1.0)
    later.send_to(engine)
    np.testing.assert_allclose(engine.score(batch, 1.0), later.logprobs(batch, 1.0), atol=EXACT)
    assert engine.process.call("is_idle")[0]["idle"], "vLLM's sleep mode would not give the cache back"
    engine.wake(["kv_cache"])
    batch = sample(engine)
    inside = batch["loss_mask_T"] == 1
    np.testing.assert_allclose(batch["rollout_logprob_T"][inside], later.logprobs(batch, 1.0)[inside], atol=EXACT)


# ── tied embeddings, stop texts: a vLLM of their own ──────────────────────────────────────────────


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3: tied as its small ones are, with norms of queries and keys."""
    folder = tmp_path_factory.mktemp("tied") / "model"
    shutil.copytree(TINY_DIGITS, folder)
    own = {"head_dim": 32, "vocab_size": 15, "eos_token_id": 0, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(FAMILIES["qwen3"].config | own))
    return folder


@pytest.fixture(scope="module")
def tied(tied_folder: Path) -> Iterator[RemoteVllm]:
    process = VllmProcess()
    # So many sequences are more than vLLM's own number of tokens in a step.
    yield RemoteVllm(process, rollout_config(tied_folder, "vllm", stop=("7",), max_sequences=5000))
    process.close()


def test_tied_embeddings_come_once_and_reach_the_head(tied: RemoteVllm, tied_folder: Path) -> None:
    assert tied.built().tied_embeddings
    names = [spec.name for spec in tied.weight_specs()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    rng = np.random.default_rng(0)
    batch = Batch({"tokens_T": rng.integers(0, 15, 24), "length_B": np.array([12, 12])})
    for seed in (0, 1):
        reference = Reference(tied_folder, seed)
        assert tied.built().parameters == sum(p.numel() for p in reference.model.parameters())
        reference.send_to(tied)
        np.testing.assert_allclose(tied.score(batch, 1.0), reference.logprobs(batch, 1.0), atol=EXACT)


# ── reading back ──────────────────────────────────────────────────────────────────────────────────


def pieces_of(whole: torch.Tensor, *parts: torch.Tensor) -> list[Piece]:
    """Views of `whole` as workers would report them."""
    return [Piece(tuple(p.shape), p.stride(), p.storage_offset(), tensor_bytes(p)) for p in parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_put_together_from_shards(dtype: torch.dtype) -> None:
    whole = torch.randn(6, 8).to(dtype)
    spec = WeightSpec("w", wire_dtype(dtype), (6, 8), whole.nbytes)
    want = checksum_bytes(tensor_bytes(whole))
    for parts in (
        (whole,),
        (whole[:2], whole[2:]),
        (whole[:, :3], whole[:, 3:]),
        (whole, whole),
        (whole[:4], whole[2:]),
    ):
        assert checksum_of(spec, pieces_of(whole, *parts)) == want
    with pytest.raises(SyncError, match="weight w: vLLM copied 40 of its 48 numbers"):
        checksum_of(spec, pieces_of(whole, whole[:5]))
    other = pieces_of(whole, whole[2:])[0]
    changed = other.data.copy()
    changed[3] ^= 1
    with pytest.raises(SyncError, match="different values"):
        checksum_of(spec, [*pieces_of(whole, whole), replace(other, data=changed)])
    assert checksum_of(spec, [*pieces_of(whole, whole[:2]), replace(other, data=changed)]) != want


def sums_of(*parts: torch.Tensor) -> list[SummedPiece]:
    places = [(tuple(p.shape), p.stride(), p.storage_offset()) for p in parts]
    return [SummedPiece(*at, int(total_of_part(p, at[1], at[2]))) for p, at in zip(parts, places, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_summed_over_shards(dtype: torch.dtype) -> None:
    """As it is put together, without its bytes."""
    whole = torch.randn(6, 8).to(dtype)
    spec = WeightSpec("w", wire_dtype(dtype), (6, 8), whole.nbytes)
    want = word_sums([whole])[0]
    for parts in [(whole,), (whole[:2], whole[2:]), (whole[:, :3], whole[:, 3:]), (whole, whole)]:
        assert word_sum_of(spec, sums_of(*parts)) == want
    with pytest.raises(SyncError, match="weight w: vLLM copied 40 of its 48 numbers"):
        word_sum_of(spec, sums_of(whole[:5]))
    assert word_sum_of(spec, sums_of(whole[:4], whole[2:4])) != want, "as many numbers, one part twice and one never"
    first, second = sums_of(whole, whole)
    with pytest.raises(SyncError, match="different values"):
        word_sum_of(spec, [first, replace(second, total=second.total + 1)])
    assert word_sum_of(spec, [replace(first, total=first.total + 1)]) != want


def test_copies_out_of_one_window_are_told_apart() -> None:
    """Weights of a bucket lie in one memory; what is copied from elsewhere is nobody's."""
    window = torch.arange(12, dtype=torch.float32)
    first, second = window[:4].view(2, 2), window[4:]
    target = torch.zeros(8)
    with CopiesFrom([first, second]) as copies:
        target[:3].copy_(second[5:])
        target[3:5].copy_(first[1])
        target[5:].copy_(torch.ones(3))
        target[6:7].copy_(second[:1])
    assert [[(part.tolist(), place) for _, part, place in found] for found in copies.found] == [
        [([2.0, 3.0], 2)],
        [([9.0, 10.0, 11.0], 5), ([4.0], 0)],
    ]


def test_a_probe_finds_a_place_beside_open_requests(process: VllmProcess) -> None:
    """vLLM's model runner on GPUs has a fixed number of places, and ends for want of one."""
    engine = RemoteVllm(process, rollout_config(shared_folder(), "vllm", keep_cache=True, max_sequences=4))
    give_weights(engine)
    engine.add(Completions(make_prompts(3, 2), Sampling(seed=3, max_response_tokens=30), lambda part: None).requests())
    for _ in range(4):
        engine.step()
    engine.suspend()
    give_weights(engine, seed=1)
    probe = make_prompts(2, 2, longest=16)
    scored_T = engine.score(probe, 0.5)
    places, _ = process.call("places")
    assert 4 < places["held"] <= places["most"]
    while engine.open_requests:
        engine.step()
    np.testing.assert_allclose(engine.score(probe, 0.5), scored_T, atol=1e-4)


# ── on a GPU ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.gpu
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_sleep_mode_on_a_gpu(tensor_parallel: int, reference: Reference) -> None:
    """Level 2, weights awake, import, probe, cache awake: in the order of a sync on a shared GPU. vLLM's attention
    computes fp32 in TF32: 0.01 nats were seen, where the log-probs spread over 9."""
    if torch.cuda.device_count() < tensor_parallel:
        pytest.skip(f"needs {tensor_parallel} GPUs")
    config = rollout_config(shared_folder(), "vllm", tensor_parallel=tensor_parallel)
    process = VllmProcess()
    try:
        engine = RemoteVllm(
            process, config.model_copy(update={"model": config.model.model_copy(update={"device": "cuda"})})
        )
        reference.send_to(engine)
        before = answer(engine, make_prompts())
        engine.sleep(2)
        engine.wake(["weights"])
        reference.send_to(engine)
        batch = Batch({"tokens_T": np.arange(2, 22), "length_B": np.array([20])})
        np.testing.assert_allclose(engine.score(batch, 0.8), reference.logprobs(batch, 0.8), atol=3e-2)
        engine.wake(["kv_cache"])
        assert {k: v[0] for k, v in answer(engine, make_prompts()).items()} == {k: v[0] for k, v in before.items()}
    finally:
        process.close()

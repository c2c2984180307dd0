"""The torch rollout engine against transformers itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from rollout_helpers import answer, make_prompts, rollout_config, write_model
from running import warm_python
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from backends.hf.hf_model import build_model, named_weights, tensor_bytes
from backends.protocol import Rank
from backends.torch_rollout.engine import TorchRolloutEngine
from backends.torch_rollout.fused import FusedForward
from specs.errors import ModelError, RlctlError
from specs.wire.batch import Batch
from specs.wire.role_config import RolloutConfig, Sampling

MODELS = {
    "qwen2": {},
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"head_dim": 16},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gemma3_text": {"head_dim": 16, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
}
FUSED = {"qwen2", "qwen2-tied", "qwen2-window", "qwen3"}


def build(folder: Path, **table: int) -> tuple[TorchRolloutEngine, PreTrainedModel]:
    """The engine, and a model of its own that holds the same weights and stock attention."""
    config = rollout_config(folder, **table)
    source = build_model(config.model, load_weights=True)
    for name, parameter in source.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    return engine_with(source, config), reference(source, folder)


def engine_with(source: PreTrainedModel, config: RolloutConfig) -> TorchRolloutEngine:
    engine = TorchRolloutEngine.build(config, Rank())
    load(engine, named_weights(source))
    return engine


def load(engine: TorchRolloutEngine, weights: Mapping[str, torch.Tensor]) -> None:
    for spec in engine.weight_specs():
        engine.import_weight(spec, tensor_bytes(weights[spec.name]))
    engine.finish_import()


def reference(source: PreTrainedModel, folder: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(source.state_dict())
    return model


@pytest.fixture(params=["qwen2-window", "llama", "qwen3", "gpt2", "gemma3_text"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def folder_of(family: str, tmp_path: Path) -> Path:
    return write_model(tmp_path / family, family.split("-")[0], **MODELS[family])


def test_logprobs_are_transformers_own(family: str, tmp_path: Path) -> None:
    """Ragged prompts, few slots, long answers: against a plain forward pass of each sequence alone."""
    engine, model = build(folder_of(family, tmp_path), max_sequences=7, prefill_tokens=16)
    assert isinstance(engine._forward, FusedForward) == (family in FUSED)
    prompts = make_prompts(6, 3)
    lengths = dict(zip(prompts["id_B"].tolist(), prompts.sequences("tokens_T"), strict=True))
    sampling = Sampling(seed=5, temperature=0.8, max_response_tokens=40)
    longest = 0
    for name, (tokens, logprobs, _) in answer(engine, prompts, sampling).items():
        prompt = lengths[name].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0]
        wanted = (logits / 0.8).log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, wanted.numpy(), atol=1e-4)
        longest = max(longest, len(tokens))
    assert longest > 15


def test_a_prompt_is_computed_once_and_slots_are_refilled_at_once(tmp_path: Path) -> None:
    engine, _ = build(folder_of("qwen2", tmp_path), max_sequences=5)
    prompts = make_prompts(8, 6)
    parts: list[Batch] = []
    counters = engine.generate(prompts, Sampling(seed=1, max_response_tokens=50), parts.append)
    firsts = [tokens for index, tokens in enumerate(prompts.sequences("tokens_T")) if index % 6 == 0]
    assert counters["prefilled_tokens"] == sum(map(len, firsts))
    samples = Batch.concat(parts)
    decoded = counters["generated_tokens"] - len(prompts)  # each first token comes from the prompt's own pass
    lengths = [int(mask.sum()) for mask in samples.sequences("loss_mask_T")]
    # Idle slots only at the very end: no more steps than full slots plus the last sequence's length.
    assert counters["decode_steps"] <= decoded / 5 + max(lengths)
    assert decoded / 5 > max(lengths), "the case must need many refills"


def test_bf16_samples_score_alike(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", initializer_range=0.1)
    config = rollout_config(folder, dtype="bf16")
    engine = engine_with(build_model(config.model, load_weights=True), config)
    assert engine.built().dtype == "bf16"
    assert {spec.dtype for spec in engine.weight_specs()} == {"bf16"}
    parts: list[Batch] = []
    engine.generate(make_prompts(), Sampling(seed=1, max_response_tokens=12), parts.append)
    samples = Batch.concat(parts)
    inside = samples["loss_mask_T"] == 1
    gap = np.abs(samples["rollout_logprob_T"] - engine.score(samples, 1.0))[inside]
    assert gap.max() < 0.1


# ── what it refuses ───────────────────────────────────────────────────────────────────────────────


def test_other_attention_is_refused(tmp_path: Path) -> None:
    config = rollout_config(folder_of("qwen2", tmp_path))
    asked = config.model.model_copy(update={"attn_implementation": "flex_attention"})
    with pytest.raises(ModelError, match="flex_attention"):
        TorchRolloutEngine.build(config.model_copy(update={"model": asked}), Rank())


def test_weights_that_diverged_are_named(tmp_path: Path) -> None:
    engine, _ = build(folder_of("qwen2", tmp_path))
    spec = engine.weight_specs()[-1]
    bad = np.full(spec.shape, np.nan, dtype=np.float32).reshape(-1).view(np.uint8)
    engine.import_weight(spec, bad)
    engine._imported.update(one.name for one in engine.weight_specs())
    engine.finish_import()
    with pytest.raises(RlctlError, match="not finite"):
        answer(engine, make_prompts())


# ── memory ────────────────────────────────────────────────────────────────────────────────────────


SLEEPER = """
import sys
import numpy as np, psutil, torch
from pathlib import Path
from rollout_helpers import answer, give_weights, make_prompts, rollout_config
from backends.protocol import Rank
from backends.torch_rollout.engine import TorchRolloutEngine
from specs.wire.role_config import Sampling

def resident(): return psutil.Process().memory_info().rss / 2**20
engine = TorchRolloutEngine.build(rollout_config(Path(sys.argv[1]), max_sequences=128), Rank())
give_weights(engine, scale=0.02)
weights = sum(spec.nbytes for spec in engine.weight_specs()) / 2**20
answer(engine, make_prompts(64, 2), Sampling(seed=0, max_response_tokens=2))
with torch.inference_mode():
    for cached in (held := [*engine._cache.keys.values(), *engine._cache.values.values()]):
        cached.fill_(1.0)  # pages that were never touched are not resident
cache = sum(cached.nbytes for cached in held) / 2**20
del cached, held
awake = resident()
engine.sleep(1); one = resident()
engine.wake(["weights", "kv_cache"]); engine.sleep(2); two = resident()
engine.wake(["weights"]); give_weights(engine, scale=0.02); engine.wake(["kv_cache"])
answer(engine, make_prompts(64, 2), Sampling(seed=0, max_response_tokens=2))
print(weights, cache, awake, one, two, resident())
"""


def test_sleep_gives_memory_back_to_the_system(tmp_path: Path) -> None:
    wide = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 1}
    folder = write_model(tmp_path / "model", **wide, num_attention_heads=16, num_key_value_heads=16)
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    weights, cache, awake, one, two, again = map(float, warm_python(script, folder).split())
    assert weights > 100
    assert cache > 90
    assert awake - one > 0.9 * cache, "level 1 frees the cache"
    assert one - two > 0.9 * weights, "level 2 frees the weights"
    assert again < awake + 0.5 * weights, "and nothing is held twice after waking"

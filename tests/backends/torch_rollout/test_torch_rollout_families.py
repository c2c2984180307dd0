"""Families of models from a trainer to the `torch` rollout engine, against transformers' own modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, SAMPLED
from rollout_helpers import answer, give_weights, make_prompts, rollout_config
from stock_model import ADAM, TEMPERATURE, Arrays, family_batch, logprobs, stock_model, stock_step, write_family
from train_helpers import build_engine, grpo, scale_of, train_config, weights_of

from backends.hf.model_shape import model_shape
from backends.protocol import Rank
from backends.torch_rollout.engine import TorchRolloutEngine
from backends.torch_rollout.slot_states import SlotStates
from specs.errors import ModelError
from specs.wire.batch import Batch
from specs.wire.role_config import Sampling

pytestmark = pytest.mark.slow
NEW_TOKENS = 8


TAKEN = [name for name, family in FAMILIES.items() if not family.torch]


@pytest.fixture(params=TAKEN, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("family") / "model", request.param)


@pytest.mark.parametrize("dtype", SAMPLED)
def test_a_family_is_sampled_as_stock_modules_do(folder: Path, dtype: str) -> None:
    """After a step, the trainer's weights arrive to the bit; scores and greedy completions are the stock model's."""
    given = {"dtype": dtype, "from_scratch": False}
    trainer = build_engine(train_config(folder, model=given, optimizer=ADAM, temperature=TEMPERATURE))
    batch = family_batch()
    want = stock_step(stock_model(folder), batch)
    if dtype == "fp32":
        np.testing.assert_allclose(trainer.forward(batch), want.logprob_T, rtol=0, atol=2e-5)
    trainer.forward_backward(batch, grpo(anchor="current"), scale_of(batch))
    trainer.optim_step()
    sampler = TorchRolloutEngine.build(rollout_config(folder, dtype=dtype), Rank())
    held = {spec.name: spec for spec in sampler.weight_specs()}
    for weight in trainer.export_weights(dtype):
        buffer_U = np.zeros(weight.spec.nbytes, dtype=np.uint8)
        assert weight.copy_to(buffer_U) == sampler.import_weight(held[weight.spec.name], buffer_U)
    sampler.finish_import()
    check_scores_and_greedy(sampler, folder, dtype, weights_of(trainer))


def test_a_bias_that_chooses_experts_travels_in_fp32_in_a_run_in_bf16(tmp_path: Path) -> None:
    """A buffer, which trainers and samplers never cast."""
    folder, name = write_family(tmp_path / "model", "deepseek_v3"), "model.layers.1.mlp.gate.e_score_correction_bias"
    trainer: Any = build_engine(train_config(folder, model={"dtype": "bf16", "from_scratch": False}))
    trainer.policy.model.get_buffer(name).copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    config = rollout_config(folder, dtype="bf16")
    sampler = TorchRolloutEngine.build(config, Rank())
    sent = {spec.name: spec for spec in trainer.weight_specs("bf16")}
    assert sent == {spec.name: spec for spec in sampler.weight_specs()} == model_shape(config.model).weights
    for weight in trainer.export_weights("bf16"):
        buffer_U = np.zeros(weight.spec.nbytes, dtype=np.uint8)
        assert weight.copy_to(buffer_U) == sampler.import_weight(sent[weight.spec.name], buffer_U)
    sampler.finish_import()
    assert sampler.model.get_buffer(name).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=1e-7)


@torch.no_grad()
def check_scores_and_greedy(sampler: TorchRolloutEngine, folder: Path, dtype: str, weights: Arrays) -> None:
    batch, model = family_batch(), stock_model(folder, dtype, weights)
    every = batch.only(["tokens_T"]).with_columns(loss_mask_T=np.ones_like(batch["loss_mask_T"]))
    ours_T, stock_T = sampler.score(batch.only(["tokens_T"]), TEMPERATURE), logprobs(model, every).numpy()
    if dtype == "fp32":
        np.testing.assert_allclose(ours_T, stock_T, rtol=0, atol=5e-5)
    else:  # as near to fp32 as the stock model is
        held = {name: torch.from_numpy(values).bfloat16().float().numpy() for name, values in weights.items()}
        exact_T = logprobs(stock_model(folder, "fp32", held), every).numpy()
        assert np.abs(ours_T - exact_T).mean() < 1.5 * np.abs(stock_T - exact_T).mean()
    prompts = make_prompts(4, 1)
    found = answer(sampler, prompts, Sampling(seed=0, greedy=True, max_response_tokens=NEW_TOKENS))
    for name, prompt in zip(prompts["id_B"].tolist(), prompts.sequences("tokens_T"), strict=True):
        row, written = torch.from_numpy(prompt)[None], torch.tensor([found[name][0]])
        if dtype == "fp32":
            ends = sorted(sampler.stops)  # the tokenizer's too
            asked = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0, "eos_token_id": ends}
            want = model.generate(row, attention_mask=torch.ones_like(row), **asked)
            assert written.tolist() == want[:, len(prompt) :].tolist()
        logits = model(torch.cat([row, written], 1), use_cache=False).logits[:, len(prompt) - 1 : -1]
        behind = logits.max(-1).values - logits.gather(-1, written[..., None])[..., 0]
        assert behind.max() <= (0 if dtype == "fp32" else 0.1)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in TAKEN])
def test_a_family_that_it_cannot_sample_is_refused_with_words(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=FAMILIES[name].torch):
        TorchRolloutEngine.build(rollout_config(write_family(tmp_path / "model", name)), Rank())


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "lfm2"])
def test_states_move_with_their_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """With more completions than slots, those of a group fork its prompt's state and move when others end; without
    their states they are others."""
    prompts, sampling = make_prompts(5, 4), Sampling(seed=3, max_response_tokens=12)
    folder = write_family(tmp_path / "model", family)
    few, many = (sampler_of(folder, max_sequences=slots) for slots in (3, 20))
    want = tokens_of(many, prompts, sampling)
    assert tokens_of(few, prompts, sampling) == want
    monkeypatch.setattr(SlotStates, "copy", lambda *_: None)
    assert tokens_of(few, prompts, sampling) != want


def tokens_of(sampler: TorchRolloutEngine, prompts: Batch, sampling: Sampling) -> dict[int, list[int]]:
    return {name: tokens for name, (tokens, *_) in answer(sampler, prompts, sampling).items()}


def sampler_of(folder: Path, **engine: int) -> TorchRolloutEngine:
    sampler = TorchRolloutEngine.build(rollout_config(folder, **engine), Rank())
    give_weights(sampler)
    return sampler

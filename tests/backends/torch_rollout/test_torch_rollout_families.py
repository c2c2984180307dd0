"""Families of models from a trainer to the `torch` rollout engine, against transformers' own modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES
from rollout_helpers import answer, give_weights, make_prompts, rollout_config
from stock_model import ADAM, TEMPERATURE, family_batch, logprobs, stock_model, write_family
from train_helpers import build_engine, grpo, scale_of, train_config, weights_of

from backends.hf.model_shape import model_shape
from backends.protocol import Rank
from backends.torch_rollout.engine import TorchRolloutEngine
from backends.torch_rollout.slot_states import SlotStates
from specs.wire.batch import Batch
from specs.wire.role_config import Sampling

pytestmark = pytest.mark.slow
NEW_TOKENS = 8


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_sampled_as_stock_modules_do(tmp_path: Path, family: str) -> None:
    """After a step, the trainer's weights arrive to the bit; scores and greedy completions are the stock model's."""
    folder, batch = write_family(tmp_path / "model", family), family_batch()
    given = {"from_scratch": False}
    trainer = build_engine(train_config(folder, model=given, optimizer=ADAM, temperature=TEMPERATURE))
    trainer.forward_backward(batch, grpo(anchor="current"), scale_of(batch))
    trainer.optim_step()
    sampler = TorchRolloutEngine.build(rollout_config(folder), Rank())
    held = {spec.name: spec for spec in sampler.weight_specs()}
    for weight in trainer.export_weights("fp32"):
        buffer_U = np.zeros(weight.spec.nbytes, dtype=np.uint8)
        assert weight.copy_to(buffer_U) == sampler.import_weight(held[weight.spec.name], buffer_U)
    sampler.finish_import()
    batch, model = batch.only(["tokens_T"]), stock_model(folder, weights=weights_of(trainer))
    with torch.no_grad():
        stock_T = logprobs(model, batch).numpy()
    np.testing.assert_allclose(sampler.score(batch, TEMPERATURE), stock_T, rtol=0, atol=5e-5)
    prompts = make_prompts(4, 1)
    found = answer(sampler, prompts, Sampling(seed=0, greedy=True, max_response_tokens=NEW_TOKENS))
    ends = sorted(sampler.stops)  # the tokenizer's too
    for name, prompt in zip(prompts["id_B"].tolist(), prompts.sequences("tokens_T"), strict=True):
        row = torch.from_numpy(prompt)[None]
        asked = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0, "eos_token_id": ends}
        want = model.generate(row, attention_mask=torch.ones_like(row), **asked)
        assert found[name][0] == want[0, len(prompt) :].tolist()


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

"""A critic by family against transformers' own sequence-classification module, and what its head may start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES
from safetensors.torch import load_file, save_file
from stock_model import family_batch, write_family
from train_helpers import QWEN2, build_engine, largest_gap, scale_of, train_config, weights_of, write_model
from transformers import AutoConfig, AutoModelForSequenceClassification

from backends.ddp.engine import DdpTrainEngine
from backends.protocol import TrainEngine
from specs.errors import ModelError
from specs.schema.algorithms.algorithm_tables import ValueLoss
from specs.schema.role_section import Optimizer
from specs.wire.batch import Batch

pytestmark = pytest.mark.slow

KINDS = ["ddp", "fsdp2"]
# Their backbones are proven elsewhere: a plain model, one of a multimodal family, experts, a state.
SCORED = ["qwen2", "gemma3_text", "mixtral", "qwen3_5_text"]


def critic(folder: Path, kind: str = "ddp", head: str = "value", **changes: Any) -> TrainEngine:
    model = {"head": head, "from_scratch": False, **changes.pop("model", {})}
    return build_engine(train_config(folder, kind, model=model, **{"role": "critic", **changes}))


def critics_batch() -> Batch:
    batch, rng = family_batch(), np.random.default_rng(4)
    drawn = {name: rng.normal(size=batch.num_tokens).astype(np.float32) for name in ("value_T", "return_T")}
    return batch.with_columns(**drawn)


def write_critic(folder: Path, outputs: int = 1, **changes: Any) -> Path:
    """A sequence-classification folder as transformers writes it, on the backbone of the one that lies there."""
    config = AutoConfig.from_pretrained(folder, num_labels=outputs, **changes)
    torch.manual_seed(7)
    model = AutoModelForSequenceClassification.from_pretrained(folder, config=config, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder / f"critic{outputs}")
    return folder / f"critic{outputs}"


@pytest.mark.parametrize("family", SCORED)
def test_a_family_is_what_stock_modules_compute(tmp_path: Path, family: str) -> None:
    """Values, scores and gradients from packed rows with shared prompts and holes, against single sequences."""
    folder = write_critic(write_family(tmp_path / "model", family))
    plain = {"attn_implementation": "eager"} | (
        {"experts_implementation": "eager"} if "experts" in str(FAMILIES[family].config) else {}
    )
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, **plain).eval()
    engine, batch = critic(folder, optimizer=Optimizer(max_grad_norm=0)), critics_batch()
    assert isinstance(engine, DdpTrainEngine)
    values, loss = [], torch.zeros(())
    columns = (batch.sequences(name) for name in ("tokens_T", "loss_mask_T", "value_T", "return_T"))
    for tokens, mask, old, ret in zip(*columns, strict=True):
        ids = torch.from_numpy(tokens.astype(np.int64))
        value_T = model.score(model.model(input_ids=ids[None], use_cache=False)[0])[0, :, 0].roll(1)
        on = torch.from_numpy(mask != 0)
        old, ret = torch.from_numpy(old.copy()), torch.from_numpy(ret.copy())
        near_T = old + (value_T - old).clamp(-0.5, 0.5)
        loss = loss + (torch.maximum((value_T - ret) ** 2, (near_T - ret) ** 2)[on]).sum() / 2
        values.append((value_T * on).detach().numpy())
    (loss / scale_of(batch).num_loss_tokens).backward()
    np.testing.assert_allclose(engine.values(batch), np.concatenate(values), atol=2e-5)
    sums = engine.forward_backward(batch, ValueLoss(value_clip=0.5), scale_of(batch))
    assert sums["loss"] == pytest.approx(loss.item() / scale_of(batch).num_loss_tokens, rel=1e-4)
    for name, parameter in model.named_parameters():
        (segment,) = (each for each in engine.flat.segments if each.name == name)
        expected = parameter.grad
        found = segment.view(engine.flat.grad_P)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()) + 1e-7)
    model.config.pad_token_id = None
    model.config.get_text_config().pad_token_id = None
    with torch.no_grad():
        rows = [torch.from_numpy(tokens.astype(np.int64))[None] for tokens in batch.sequences("tokens_T")]
        scores = [model(input_ids=row, use_cache=False).logits.item() for row in rows]
    np.testing.assert_allclose(engine.scores(batch), scores, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", ["value", "reward"])
def test_a_causal_model_that_learns_gets_a_head_of_zeros_and_keeps_its_backbone(
    tmp_path: Path, kind: str, head: str
) -> None:
    folder = write_family(tmp_path / "model", "llama")  # an untied head, which is left on disk
    engine, saved = critic(folder, kind, head), load_file(folder / "model.safetensors")
    weights = weights_of(engine)
    assert "lm_head.weight" in saved
    assert weights.keys() == saved.keys() - {"lm_head.weight"} | {"score.weight"}
    assert weights["score.weight"].shape == (1, 32)
    assert not weights["score.weight"].any()
    assert (
        largest_gap(
            {k: v for k, v in weights.items() if k in saved},
            {k: saved[k].numpy() for k in weights.keys() & saved.keys()},
        )
        == 0
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("head", "source", "said"),
    [
        ("reward", "causal", "no head that gives scores"),
        ("reward", "three outputs", r"score.weight has shape \[3, 32\]"),
        ("value", "three outputs", r"score.weight has shape \[3, 32\]"),
        ("value", "a norm is missing", "lacks 1 weights.*, first model.norm.weight"),
        ("reward", "a norm is missing", "lacks 1 weights.*, first model.norm.weight"),
        ("value", "no such class", "no sequence-classification class for olmoe models"),
        ("reward", "drawn", "no head that gives scores"),
    ],
)
def test_what_is_refused(tmp_path: Path, kind: str, head: str, source: str, said: str) -> None:
    folder = write_family(tmp_path / "model", "qwen2")
    if source == "three outputs":
        folder = write_critic(folder, outputs=3)
    if source == "a norm is missing":
        folder = write_critic(folder)
        weights = load_file(folder / "model.safetensors")
        del weights["model.norm.weight"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if source == "no such class":
        write_model(folder, {**QWEN2, "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"]})
    frozen = {"optimizer": None} if head == "reward" else {}
    with pytest.raises(ModelError, match=said):
        critic(folder, kind, head, model={"from_scratch": source == "drawn"}, **frozen)


def test_the_head_computes_in_fp32_in_a_bf16_model(tmp_path: Path) -> None:
    """Values lie closer together than bf16 can tell apart."""
    folder = write_critic(write_family(tmp_path / "model", "qwen2"))
    value_T = critic(folder, model={"dtype": "bf16"}, optimizer=None).values(critics_batch())
    told = value_T[value_T != 0]
    assert (told != torch.from_numpy(told).bfloat16().float().numpy()).mean() > 0.9

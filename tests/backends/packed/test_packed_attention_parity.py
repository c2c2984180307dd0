"""Every attention gives the same log-probs and gradients, packed ragged rows as well as one sequence at a time, for
whichever role holds the model. What needs a GPU is tried with a kernel of plain torch in its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_kernel import PlainKernel, put_plain_kernel
from train_helpers import (
    GEMMA2,
    GEMMA3,
    LLAMA,
    MISTRAL_WINDOW,
    QWEN2,
    assert_same_gradients,
    build_engine,
    grpo,
    make_batch,
    make_grouped_batch,
    model_config,
    scale_of,
    train_config,
    weights_of,
    write_model,
)

from backends.hf.attention_choice import functions_called
from backends.hf.hf_model import build_model
from backends.packed.packed_input import can_share_prompts, packed_row
from backends.packed.staging import Staging
from backends.protocol import Rank, TrainEngine
from backends.torch_rollout.engine import TorchRolloutEngine
from rlctl.models.paths import BUILTIN_FOLDER
from specs.errors import ModelError
from specs.wire.batch import Batch
from specs.wire.role_config import ModelConfig, RolloutConfig

LENGTHS = [7, 1, 12, 7, 9, 3]
TOLERANCE = {"fp32": 1e-5, "bf16": 0.06}  # of log-probs, nats; bf16 rounds scores and sums in another order
FAMILIES = {"qwen2": QWEN2, "llama": LLAMA, "mistral": MISTRAL_WINDOW, "gemma3": GEMMA3, "gemma2": GEMMA2}


def folder_of(name: str, tmp_path: Path) -> Path:
    return BUILTIN_FOLDER / name if name.startswith("tiny-") else write_model(tmp_path / name, FAMILIES[name])


def engine_of(folder: Path, attention: str, dtype: str = "fp32", **changes: Any) -> TrainEngine:
    model = {"attn_implementation": attention, "dtype": dtype}
    return build_engine(train_config(folder, model=model, temperature=1.0, **changes))


def one_by_one(batch: Batch) -> Iterator[Batch]:
    """A batch of each sequence."""
    lengths = batch["length_B"]
    for i, (start, length) in enumerate(zip(batch.offsets[:-1], lengths, strict=True)):
        columns = {name: batch[name][start : start + length] for name in batch.columns if name.endswith("_T")}
        yield Batch({"length_B": lengths[i : i + 1], **columns})


def batches() -> list[Batch]:
    """Ragged sequences, and groups that share their prompts in a row."""
    return [make_batch(vocab=15), make_grouped_batch(vocab=15)]


# ── the actor: eager against sdpa ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["tiny-digits", "llama", "mistral", "gemma3"])
def test_a_learner_has_the_same_log_probs_and_gradients(tmp_path: Path, name: str, dtype: str) -> None:
    folder = folder_of(name, tmp_path)
    eager, sdpa = (engine_of(folder, attention, dtype) for attention in ("eager", "sdpa"))
    assert [engine.built().attn_implementation for engine in (eager, sdpa)] == ["eager", "sdpa"]
    for batch in batches():
        packed = eager.forward(batch), sdpa.forward(batch)
        single = np.concatenate([sdpa.forward(part) for part in one_by_one(batch)])
        for found in packed:
            np.testing.assert_allclose(found, single, atol=TOLERANCE[dtype], rtol=0)
    if dtype == "bf16":
        return  # gradients in bf16 have no digits to compare here
    for engine in (eager, sdpa):
        engine.forward_backward(batch, grpo(), scale_of(batch))
    ours, theirs = (engine.policy.model.named_parameters() for engine in (eager, sdpa))  # type: ignore[attr-defined]
    for (name, one), (_, other) in zip(ours, theirs, strict=True):
        atol = 1e-5 * float(other.grad.abs().max()) + 1e-8
        torch.testing.assert_close(one.grad, other.grad, atol=atol, rtol=1e-3, msg=name)


def test_the_rollout_scores_as_an_eager_trainer_does(tmp_path: Path) -> None:
    folder = BUILTIN_FOLDER / "tiny-digits"
    trainer = engine_of(folder, "eager")
    values = {**model_config(folder).model_dump(), "from_scratch": True}
    config = RolloutConfig(
        model=ModelConfig(**values), engine={"kind": "torch"}, max_prompt_tokens=32, max_response_tokens=32, stop=()
    )
    sampler = TorchRolloutEngine.build(config, Rank())
    weights = weights_of(trainer)
    for spec in sampler.weight_specs():
        sampler.import_weight(spec, weights[spec.name].reshape(-1).view(np.uint8))
    sampler.finish_import()
    batch = make_batch(vocab=15)
    mask = batch["loss_mask_T"] != 0
    np.testing.assert_allclose(sampler.score(batch, 1.0)[mask], trainer.forward(batch)[mask], atol=1e-5, rtol=0)


# ── the reference: flex_attention, which has no gradient on the CPU ───────────────────────────────


@pytest.mark.parametrize("name", ["tiny-digits", "mistral", "gemma2"])
def test_flex_attention_scores_as_eager_does(tmp_path: Path, name: str) -> None:
    """gemma2 has softcap, full layers and sliding ones."""
    folder = folder_of(name, tmp_path)
    flex, eager = (engine_of(folder, attention, optimizer=None) for attention in ("flex_attention", "eager"))
    assert flex.built().attn_function == "transformers.integrations.flex_attention.flex_attention_forward"
    for batch in batches():
        np.testing.assert_allclose(flex.forward(batch), eager.forward(batch), atol=1e-5, rtol=0)


# ── flash attention, with a kernel of plain torch ─────────────────────────────────────────────────


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> PlainKernel:
    return put_plain_kernel(monkeypatch.setattr)


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3"])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_flash_attention_is_told_where_sequences_end(
    tmp_path: Path, kernel: PlainKernel, name: str, implementation: str
) -> None:
    config = model_config(folder_of(name, tmp_path), attn_implementation="eager")
    model = build_model(config, load_weights=True)
    tokens = np.random.default_rng(0).integers(0, 15, sum(LENGTHS))
    parts = torch.from_numpy(tokens).split(LENGTHS)
    single = torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in parts])
    model.config._attn_implementation = implementation  # building it so would want a GPU and the package
    assert not can_share_prompts(model)
    row = packed_row(model, Staging(model.device), tokens, np.concatenate([np.arange(n) for n in LENGTHS]), LENGTHS)
    with row.attending():
        packed = model(**row.inputs).logits[0]
    torch.testing.assert_close(packed, single, atol=2e-5, rtol=1e-4)
    ends, window = [0, 7, 8, 20, 27, 36, 39], (3, 3)
    windows = {"mistral": [window, window], "gemma3": [window, (-1, -1)], "gemma2": [window, (-1, -1)]}
    assert kernel.calls == [(ends, 12, size) for size in windows.get(name, [(-1, -1)] * 2)]
    (called,) = functions_called(model)
    assert called.startswith("transformers.integrations.flash_attention.flash_attention_forward → ")
    assert called.endswith("PlainKernel.flash_attn_varlen_func")
    assert_same_gradients(model, packed, single)


def test_an_attention_that_cannot_keep_sequences_apart_is_refused(tmp_path: Path) -> None:
    model = build_model(model_config(write_model(tmp_path, QWEN2)), load_weights=True)
    model.config._attn_implementation = "paged|eager"
    with pytest.raises(ModelError, match=r"paged\|eager attention cannot keep the sequences of a packed row apart"):
        packed_row(model, Staging(model.device), np.arange(4), np.array([0, 1, 0, 1]), [2, 2])

"""Attentions that only some devices have give the log-probs of eager attention, packed and one sequence at a time. What
needs a GPU is tried with a kernel of plain torch in its place."""

from __future__ import annotations

from pathlib import Path

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
    make_batch,
    make_grouped_batch,
    model_config,
    train_config,
    whole_row,
    write_model,
)

from backends.hf.attention_choice import functions_called
from backends.hf.hf_model import build_model
from backends.packed.packed_input import can_share_prompts, packed_row
from backends.packed.staging import Staging
from rlctl.models.paths import BUILTIN_FOLDER
from specs.errors import ModelError

LENGTHS = [7, 1, 12, 7, 9, 3]
FAMILIES = {"qwen2": QWEN2, "llama": LLAMA, "mistral": MISTRAL_WINDOW, "gemma3": GEMMA3, "gemma2": GEMMA2}


def folder_of(name: str, tmp_path: Path) -> Path:
    return BUILTIN_FOLDER / name if name.startswith("tiny-") else write_model(tmp_path / name, FAMILIES[name])


# ── the reference: flex_attention, which has no gradient on the CPU ───────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-digits", "mistral", "gemma2"])
def test_flex_attention_scores_as_eager_does(tmp_path: Path, name: str) -> None:
    """gemma2 has softcap, full layers and sliding ones."""
    folder = folder_of(name, tmp_path)
    flex, eager = (
        build_engine(train_config(folder, optimizer=None, temperature=1.0, model={"attn_implementation": attention}))
        for attention in ("flex_attention", "eager")
    )
    assert flex.built().attn_function == "transformers.integrations.flex_attention.flex_attention_forward"
    for batch in (make_batch(vocab=15), make_grouped_batch(vocab=15)):  # ragged, and with prompts that groups share
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
    row, _ = packed_row(model, Staging(model.device), whole_row(LENGTHS, tokens))
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
        packed_row(model, Staging(model.device), whole_row([2, 2], np.arange(4)))

"""A hybrid of attention and Mamba 2, LongRoPE, and latent attention, in a real vLLM, against their trainer."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from optional import needs_vllm
from rollout_helpers import MAX_TOKENS, make_prompts, rollout_config
from train_helpers import build_engine, learn, train_config, write_model
from vllm_process import VLLM_SHAPE, RemoteVllm, VllmProcess
from vllm_syncing import EXACT, check_samples, gap, sync

from backends.train.engine import HfTrainEngine
from backends.vllm_rollout.worker import _as_sent

GRANITE = {**FAMILIES["granitemoehybrid"].config, **VLLM_SHAPE, "mamba_n_heads": 16}
# As many tokens as a sequence may have: beyond them LongRoPE takes the long factors.
PHI3 = {
    **FAMILIES["phi3"].config,
    **VLLM_SHAPE,
    "original_max_position_embeddings": MAX_TOKENS,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5] * 4, "long_factor": [2.0, 3.0] * 4},
}
# With sizes that vLLM's kernels know.
DEEPSEEK = {
    **FAMILIES["deepseek_v3"].config,
    **{"first_k_dense_replace": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    **{"qk_nope_head_dim": 128, "v_head_dim": 128},
}


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("config", "device", "dtype", "close"),
    [
        (GRANITE, "cpu", "fp32", EXACT),
        (PHI3, "cpu", "fp32", EXACT),
        pytest.param(DEEPSEEK, "cuda", "bf16", 0.5, marks=pytest.mark.gpu),
    ],
)
def test_it_samples_what_the_trainer_learned(
    tmp_path: Path, config: dict[str, Any], device: str, dtype: str, close: float
) -> None:
    """After each sync: the prompts are the same, so states of the old weights would be found again. On a GPU latent
    attention has kernels for bf16 alone, and what it learns in a step moves the worst log-prob by three nats."""
    folder = write_model(tmp_path, config)
    trainer = build_engine(train_config(folder, micro_batch_tokens=512, model={"dtype": dtype}))
    assert isinstance(trainer, HfTrainEngine)
    asked = rollout_config(folder, "vllm")
    asked = asked.model_copy(update={"model": asked.model.model_copy(update={"device": device, "dtype": dtype})})
    with closing(VllmProcess()) as process:
        engine = RemoteVllm(process, asked)
        for step in range(2):
            learn(trainer, 2, first=10 * step)
            sync(trainer, engine)
            assert gap(trainer, engine) < close
            check_samples(trainer, engine, make_prompts(groups=2, longest=70), seed=step, tokens=8, close=close)


def test_decays_are_proven_by_what_vllm_made_of_them() -> None:
    sent, name = torch.tensor([0.5, -1.0]), "model.layers.0.mamba.A_log"
    held = -sent.exp()
    assert _as_sent(name, held, sent) is sent
    assert _as_sent(name, (off := held * 1.001), sent) is off
    assert _as_sent("model.norm.weight", held, sent) is held

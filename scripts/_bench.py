"""What the benchmarks share: a small random model, prompts, and the configs of roles that hold a model.

Import it before torch, which reads what it sets.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# As rlctl starts its roles: idle OpenMP threads do not spin against the working ones.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import numpy as np

from specs.schema.role_section import Optimizer
from specs.wire.batch import Batch
from specs.wire.role_config import ModelConfig, RolloutConfig, TrainConfig

ROOT = Path(__file__).resolve().parents[1]
# What samplers are timed on: prompts × answers, and the longest answer of each work.
GROUPS, GROUP_SIZE, PROMPT_TOKENS = 8, 16, 24
WORKS = {"short ragged": 64, "long tail": 256}
# 2.4 million parameters, or a few less when tied.
SMALL = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 52,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def write_config(folder: str | Path, shape: dict[str, Any]) -> None:
    """`config.json` alone: weights are drawn when the model is built."""
    Path(folder, "config.json").write_text(json.dumps(shape))


def write_model(folder: str | Path, shape: dict[str, Any]) -> int:
    """A random Qwen2 with weights; returns its number of parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def model_config(folder: str, max_sequence_tokens: int, **changed: Any) -> ModelConfig:
    """The model in `folder`, random and in fp32 on the CPU, unless `changed`."""
    usual: dict[str, Any] = {
        "from_scratch": True,
        "seed": 0,
        "dtype": "fp32",
        "attn_implementation": "auto",
        "trust_remote_code": False,
        "device": "cpu",
    }
    return ModelConfig(path=folder, max_sequence_tokens=max_sequence_tokens, **{**usual, **changed})


def actor_config(model: ModelConfig, engine: Any, micro_batch_tokens: int) -> TrainConfig:
    return TrainConfig(
        role="actor",
        model=model,
        engine=engine,
        optimizer=Optimizer(lr=1e-6),
        total_optimizer_steps=100,
        micro_batch_tokens=micro_batch_tokens,
        gradient_checkpointing=False,
        temperature=1.0,
    )


def rollout_config(model: ModelConfig, engine: dict[str, Any], prompt_tokens: int) -> RolloutConfig:
    """Answers may fill what a prompt leaves of the model's longest sequence."""
    return RolloutConfig.model_validate(
        {
            "model": model,
            "engine": engine,
            "max_prompt_tokens": prompt_tokens,
            "max_response_tokens": model.max_sequence_tokens - prompt_tokens,
            "stop": (),
        }
    )


def group_prompts(groups: int, group_size: int, tokens: int) -> Batch:
    """Random prompts for `SMALL` without its special tokens, each repeated for its group."""
    rows = np.random.default_rng(0).integers(2, SMALL["vocab_size"], (groups, tokens))
    group_B = np.repeat(np.arange(groups), group_size)
    return Batch(
        {
            "tokens_T": rows[group_B].reshape(-1),
            "length_B": np.full(len(group_B), tokens),
            "prefix_B": group_B,
            "position_B": np.zeros_like(group_B),
            "group_B": group_B,
            "rollout_B": np.arange(len(group_B)),
            "id_B": np.arange(len(group_B)),
            "row_B": group_B,
        }
    )

"""Parts that the benchmarks share: a small random model, prompts, and the configs of roles that hold a model.

Import it before torch, which reads what it sets.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# As rlctl starts its roles: idle OpenMP threads do not spin against the working ones.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import numpy as np

from specs.schema.algorithms.algorithm import AnyLoss
from specs.schema.role_section import Optimizer
from specs.wire.batch import Batch
from specs.wire.bodies import LossScale
from specs.wire.role_config import ModelConfig, RolloutConfig, TrainConfig

ROOT = Path(__file__).resolve().parents[1]
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
    """Write `config.json` alone: weights are drawn when the model is built."""
    Path(folder, "config.json").write_text(json.dumps(shape))


def write_model(folder: str | Path, shape: dict[str, Any]) -> int:
    """Write a random Qwen2 with weights; return its number of parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def model_config(folder: str, max_sequence_tokens: int, **changed: Any) -> ModelConfig:
    """Describe the model in `folder`, random and in fp32 on the CPU, unless `changed`."""
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


def torch_sampler(model: ModelConfig, prompt_tokens: int, **keys: Any) -> Any:
    """Build the `torch` rollout engine of a random model; answers may fill what a prompt leaves of its sequences."""
    from backends.hf.hf_model import build_model
    from backends.protocol import Rank
    from backends.torch_rollout.engine import TorchRolloutEngine
    from backends.weights.tensor_bytes import named_weights, tensor_bytes

    built = build_model(model, load_weights=True)
    config = {
        "model": model,
        "engine": {"kind": "torch", **keys},
        "max_prompt_tokens": prompt_tokens,
        "max_response_tokens": model.max_sequence_tokens - prompt_tokens,
        "stop": (),
    }
    engine = TorchRolloutEngine.build(RolloutConfig.model_validate(config), Rank())
    weights = named_weights(built)
    for spec in engine.weight_specs():
        engine.import_weight(spec, tensor_bytes(weights[spec.name]))
    engine.finish_import()
    return engine


def ddp_step(config: TrainConfig, batch: Batch, loss: AnyLoss, longest: int) -> Callable[[], float]:
    """Return an optimizer step of the `ddp` engine, which returns the loss."""
    from backends.ddp.engine import DdpTrainEngine
    from backends.protocol import Rank

    engine = DdpTrainEngine.build(config, Rank())
    tokens = int(batch["loss_mask_T"].sum())
    scale = LossScale(num_loss_tokens=tokens, num_sequences=len(batch), max_response_tokens=longest)

    def step() -> float:
        sums = engine.forward_backward(batch, loss, scale)
        engine.optim_step()
        return float(sums["loss"])

    return step


def random_prompts(count: int, tokens: int, vocabulary: int) -> Batch:
    """Return random prompts without special tokens, each a group of its own."""
    own_B = np.arange(count)
    return Batch(
        {
            "tokens_T": np.random.default_rng(0).integers(2, vocabulary, count * tokens),
            "length_B": np.full(count, tokens),
            "position_B": np.zeros_like(own_B),
            **dict.fromkeys(("prefix_B", "group_B", "rollout_B", "id_B", "row_B"), own_B),
        }
    )


def spec_text(folder: Path, steps: int, prompts: tuple[int, int], tokens: tuple[int, int], more: dict[str, str]) -> str:
    """Return a GRPO spec for the model, data and reward in `folder`. `prompts`: of a step, and completions of each.
    `tokens`: most of a prompt, and of a completion. `more`: other lines, by table."""
    tables = {
        "run": f'name = "bench"\nsteps = {steps}',
        "model": f"path = {json.dumps(str(folder / 'model'))}",
        "data": f"train = {json.dumps(str(folder / 'data.jsonl'))}\nprompts_per_step = {prompts[0]}\n"
        f"max_prompt_tokens = {tokens[0]}\nmax_response_tokens = {tokens[1]}",
        "reward": f'terms = [{{ kind = "function", path = {json.dumps(str(folder / "reward.py:score"))} }}]',
        "algorithm": f'kind = "grpo"\ngroup_size = {prompts[1]}',
        "checkpoint": f"every = {steps}",
    }
    names = dict.fromkeys((*tables, *more))
    return "schema = 1\n" + "".join(f"[{name}]\n{tables.get(name, '')}\n{more.get(name, '')}\n" for name in names)

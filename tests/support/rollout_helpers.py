"""Tiny models and prompts for the rollout tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import train_helpers
from families import LLAMA_LIKE, VOCAB
from numpy.typing import NDArray

from backends.protocol import RolloutEngine, WeightSpec
from specs.wire.batch import Batch
from specs.wire.role_config import RolloutConfig, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

END = 1
MAX_TOKENS = 96
ROLLOUT_IDS = 10**6  # a rollout is named apart from its sample, so that a mix-up shows

SHAPE = {
    **LLAMA_LIKE,
    "initializer_range": 0.3,  # far from uniform, so that a wrong token shows
    "eos_token_id": END,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def write_model(folder: Path, model_type: str = "qwen2", **changes: object) -> Path:
    """A folder with nothing but `config.json`."""
    return train_helpers.write_model(folder, {"model_type": model_type, **SHAPE, **changes})


def rollout_config(
    folder: Path, kind: str = "torch", dtype: str = "fp32", stop: tuple[str, ...] = (), **engine: int
) -> RolloutConfig:
    return RolloutConfig(
        model=train_helpers.model_config(folder, seed=0, dtype=dtype, max_sequence_tokens=MAX_TOKENS),
        engine={"kind": kind, **engine},
        max_prompt_tokens=16,
        max_response_tokens=MAX_TOKENS - 16,
        stop=stop,
    )


def give_weights(engine: RolloutEngine, seed: int = 0, scale: float = 0.3) -> None:
    """Random weights by the engine's own import, as a sync would bring them."""
    specs = engine.weight_specs()
    for spec, values in zip(specs, random_weights(specs, seed, scale).values(), strict=True):
        assert spec.dtype == "fp32"
        engine.import_weight(spec, values.reshape(-1).view(np.uint8))
    engine.finish_import()


def given_model(engine: RolloutEngine, seed: int = 0) -> PreTrainedModel:
    """transformers' own model with the weights that `give_weights` gives."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(engine.built().path)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    weights = random_weights(engine.weight_specs(), seed)
    model.load_state_dict({name: torch.from_numpy(values) for name, values in weights.items()}, strict=False)
    model.tie_weights()
    return model


def random_weights(specs: Sequence[WeightSpec], seed: int, scale: float = 0.3) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    drawn = {spec.name: scale * rng.standard_normal(spec.shape, dtype=np.float32) for spec in specs}
    return {name: 1 + values if "norm" in name else values for name, values in drawn.items()}


def make_prompts(groups: int = 5, group_size: int = 4, *, longest: int = 11, first_id: int = 100) -> Batch:
    """Prompts of ragged lengths; ids grow from `first_id`, and are larger than 32 bits to show truncation."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(2, VOCAB, int(length)) for length in rng.integers(1, longest + 1, groups)]
    rows = [prompt for prompt in prompts for _ in range(group_size)]
    group_B = np.repeat(np.arange(groups) + 10**10, group_size)
    return batch_of(rows, np.arange(len(rows)) + first_id + 2**40, group_B)


def batch_of(
    rows: Sequence[NDArray[np.int64]],
    id_B: NDArray[np.int64],
    group_B: NDArray[np.int64],
    prefix_B: NDArray[np.int64] | None = None,
    position_B: NDArray[np.int64] | None = None,
) -> Batch:
    """First turns of groups with one prompt each, unless `prefix_B` and `position_B` say otherwise."""
    return Batch(
        {
            "tokens_T": np.concatenate(rows).astype(np.int64),
            "length_B": np.array([len(row) for row in rows]),
            "id_B": id_B,
            "prefix_B": group_B - 10**9 if prefix_B is None else prefix_B,
            "position_B": np.zeros_like(id_B) if position_B is None else position_B,
            "group_B": group_B,
            "rollout_B": id_B + ROLLOUT_IDS,
            "row_B": group_B % 7,
        }
    )


def answer(
    engine: RolloutEngine, prompts: Batch, sampling: Sampling | None = None
) -> dict[int, tuple[list[int], list[float], int]]:
    """id → (answer tokens, their log-probs, finished)."""
    parts: list[Batch] = []
    engine.generate(prompts, sampling or Sampling(seed=3, max_response_tokens=12), parts.append)
    found: dict[int, tuple[list[int], list[float], int]] = {}
    for part in parts:
        masks, tokens, logprobs = (part.sequences(n) for n in ("loss_mask_T", "tokens_T", "rollout_logprob_T"))
        for index, name in enumerate(part["id_B"].tolist()):
            assert name not in found, f"sample {name} came twice"
            inside = masks[index] == 1
            found[name] = (
                tokens[index][inside].tolist(),
                logprobs[index][inside].tolist(),
                int(part["finished_B"][index]),
            )
    return found

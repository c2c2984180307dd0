"""Tiny models, configs and batches for tests of the train engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from families import FAMILIES, LLAMA_LIKE, VOCAB
from numpy.typing import NDArray

from backends.packed.packing import MicroBatch
from backends.protocol import LossScale, TrainEngine
from backends.registry import train_engine
from specs.schema.algorithms.algorithm import Loss
from specs.schema.algorithms.algorithm_tables import GspoLoss, PpoClip, ValueLoss, read_loss
from specs.schema.engines.ddp_table import DdpTable
from specs.schema.engines.fake_tables import FakeTrainTable
from specs.schema.engines.fsdp2_table import Fsdp2Table
from specs.schema.objectives import Objective
from specs.schema.role_section import Optimizer
from specs.schema.spec import WeightForm
from specs.wire.batch import Batch
from specs.wire.role_config import ModelConfig, TrainConfig

QWEN2 = FAMILIES["qwen2"].config
LLAMA = {"model_type": "llama", **LLAMA_LIKE}
MISTRAL_WINDOW = FAMILIES["mistral"].config
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "initializer_range": 0.2,
}
QWEN3_MOE = FAMILIES["qwen3_moe"].config
GEMMA3, GEMMA2 = FAMILIES["gemma3_text"].config, FAMILIES["gemma2"].config

# Engines that run in the test's own process, with their default table.
ENGINES: dict[str, Callable[[], Any]] = {"fake": FakeTrainTable, "ddp": DdpTable, "fsdp2": Fsdp2Table}


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def whole_row(lengths: Sequence[int], tokens_T: NDArray[np.int64], parents: Sequence[int] = ()) -> MicroBatch:
    """Segments of which every token is asked for."""
    parents = [*parents] or [-1] * len(lengths)
    starts = [0 if parent < 0 else lengths[parent] for parent in parents]
    positions_T = np.concatenate([start + np.arange(n) for start, n in zip(starts, lengths, strict=True)])
    place_T = np.arange(len(tokens_T))
    return MicroBatch([*lengths], [*parents], tokens_T, positions_T, place_T, place_T, place_T)


def model_config(folder: Path, **changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "path": str(folder),
        "from_scratch": True,
        "seed": 3,
        "dtype": "fp32",
        "attn_implementation": "auto",
        "trust_remote_code": False,
        "device": "cpu",
        "max_sequence_tokens": 64,
    }
    return ModelConfig(**{**values, **changes})


def train_config(folder: Path, kind: str = "ddp", **changes: Any) -> TrainConfig:
    model_changes = changes.pop("model", {})
    values: dict[str, Any] = {
        "role": "actor",
        "model": model_config(folder, **model_changes),
        "engine": ENGINES[kind](),
        # A large epsilon: with 1e-8 Adam takes the sign of gradients that are zero but for rounding.
        "optimizer": Optimizer(lr=1e-2, eps=1e-4, weight_decay=0.1, max_grad_norm=1.0),
        "total_optimizer_steps": 10,
        "micro_batch_tokens": 64,
        "gradient_checkpointing": False,
        "temperature": 0.7,
    }
    return TrainConfig(**{**values, **changes})


def build_engine(config: TrainConfig) -> TrainEngine:
    from backends.protocol import Rank

    return train_engine(config.engine.kind).build(config, Rank())


def grpo(**changes: Any) -> PpoClip:
    """GRPO's loss, for batches with `old_logprob_T`."""
    return PpoClip(**{"anchor": "trainer", **changes})


def gspo(**changes: Any) -> GspoLoss:
    """GSPO's loss; the batches' random log-probs are far from the model's, so that bounds of the paper clip all."""
    return GspoLoss(**{"anchor": "trainer", "clip_low": 0.4, "clip_high": 1.5, **changes})


def make_batch(sequences: int = 12, seed: int = 0, *, off_policy: bool = True, vocab: int = VOCAB) -> Batch:
    """Ragged sequences with a tool span that is masked out, one with no loss token, and every column."""
    rng = np.random.default_rng(seed)
    prompts, answers = rng.integers(1, 6, sequences), rng.integers(1, 15, sequences)
    lengths = prompts + answers
    masks = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        mask = np.array([0] * prompt + [1] * answer)
        if answer > 6:
            mask[prompt + 2 : prompt + 4] = 0
        masks.append(mask * (i != 3))
    total = int(lengths.sum())
    columns = {
        "length_B": lengths.astype(np.int64),
        "tokens_T": rng.integers(0, vocab, total).astype(np.int32),
        "loss_mask_T": np.concatenate(masks).astype(np.int8),
        "advantage_T": np.repeat(rng.normal(size=sequences), lengths).astype(np.float32),
        "rollout_logprob_T": rng.normal(-3, 0.3, total).astype(np.float32),
        "ref_logprob_T": rng.normal(-3, 0.3, total).astype(np.float32),
    }
    if off_policy:
        columns["old_logprob_T"] = rng.normal(-3, 0.3, total).astype(np.float32)
    columns["correction_T"] = (rng.random(total) * (rng.random(total) > 0.2)).astype(np.float32)
    columns["covariant_T"] = (np.arange(total) % 3 == 0).astype(np.float32)
    return Batch(columns)


def make_grouped_batch(seed: int = 0, vocab: int = VOCAB, groups: int = 4, size: int = 4) -> Batch:
    """Ragged answers to ragged prompts, `size` to each: with masked tool spans, an answer of one token, a sequence
    without a loss token, and a prompt that nobody answers."""
    rng = np.random.default_rng(seed)
    sequences, masks = [], []
    for group, prompt_tokens in enumerate(rng.integers(2, 9, groups)):
        prompt = rng.integers(0, vocab, prompt_tokens)
        for member in range(size):
            answer = rng.integers(0, vocab, 1 if member == 1 else rng.integers(1, 13))
            mask = np.ones(len(answer), dtype=np.int8)
            mask[2:4] = 0  # what a tool said
            if (group, member) == (1, 2) or group == groups - 1:
                mask[:] = 0
            sequences.append(np.concatenate([prompt, answer]))
            masks.append(np.concatenate([np.zeros(prompt_tokens, dtype=np.int8), mask]))
    lengths = np.array([len(sequence) for sequence in sequences])
    total = int(lengths.sum())
    return Batch(
        {
            "length_B": lengths,
            "tokens_T": np.concatenate(sequences).astype(np.int32),
            "loss_mask_T": np.concatenate(masks),
            "advantage_T": np.repeat(rng.normal(size=len(lengths)), lengths).astype(np.float32),
            "rollout_logprob_T": rng.normal(-3, 0.3, total).astype(np.float32),
            "old_logprob_T": rng.normal(-3, 0.3, total).astype(np.float32),
            "ref_logprob_T": rng.normal(-3, 0.3, total).astype(np.float32),
            "correction_T": (rng.random(total) * (rng.random(total) > 0.2)).astype(np.float32),
            "covariant_T": (np.arange(total) % 3 == 0).astype(np.float32),
        }
    )


def objective(kind: str, **keys: object) -> Objective:
    """An objective of rows, its other keys at their defaults."""
    found = read_loss({"kind": kind, **keys})
    assert isinstance(found, Objective)
    return found


def make_units(pairs: int = 7, seed: int = 0, vocab: int = VOCAB) -> Batch:
    """Pairs of ragged answers to a prompt, which two pairs share, with masked spans, and all columns of objectives."""
    rng = np.random.default_rng(seed)
    sequences, masks = [], []
    for unit in range(pairs):
        prompt = sequences[0][: masks[0].argmax()] if unit == 1 else rng.integers(0, vocab, rng.integers(2, 12))
        for answer in (rng.integers(0, vocab, size) for size in rng.integers(1, 10, 2)):
            sequences.append(np.concatenate([prompt, answer]))
            masks.append(np.concatenate([np.zeros(len(prompt)), np.ones(len(answer))]).astype(np.int8))
            masks[-1][len(prompt) + 2 : len(prompt) + 4] = 0
    mask_T, units = np.concatenate(masks), np.arange(pairs, dtype=np.int64)
    return Batch(
        {
            "length_B": np.array([len(sequence) for sequence in sequences]),
            "tokens_T": np.concatenate(sequences).astype(np.int32),
            "loss_mask_T": mask_T,
            "unit_B": np.repeat(units, 2),
            "chosen_B": np.tile(np.array([1, 0], dtype=np.uint8), pairs),
            "margin_B": np.repeat(rng.uniform(0, 1, pairs), 2).astype(np.float32),
            "kl_B": np.full(2 * pairs, 0.4, dtype=np.float32),
            "ref_logprob_T": np.where(mask_T, rng.normal(-3, 0.3, len(mask_T)), np.nan).astype(np.float32),
        }
    )


def unit_scale(batch: Batch) -> LossScale:
    chosen = batch["loss_mask_T"] * np.repeat(batch["chosen_B"], batch["length_B"])
    counts = {"num_units": len(np.unique(batch["unit_B"])), "num_chosen_tokens": int(chosen.sum())}
    return scale_of(batch).model_copy(update=counts)


def scale_of(batch: Batch, max_response_tokens: int = 15) -> LossScale:
    sequences, tokens = sum(mask.any() for mask in batch.sequences("loss_mask_T")), (batch["loss_mask_T"] != 0).sum()
    tokens, sequences = int(tokens), int(sequences)
    return LossScale(num_loss_tokens=tokens, num_sequences=sequences, max_response_tokens=max_response_tokens)


def weights_of(engine: TrainEngine, dtype: str = "fp32", form: WeightForm = "merged") -> dict[str, np.ndarray]:
    """Exported weights, decoded from the wire (fp32), or raw bytes of another dtype."""
    found = {}
    for weight in engine.export_weights(dtype, form):  # type: ignore[arg-type]
        buffer = np.zeros(weight.spec.nbytes, dtype=np.uint8)
        weight.copy_to(buffer)
        found[weight.spec.name] = buffer.view(np.float32).reshape(weight.spec.shape) if dtype == "fp32" else buffer
    return found


def largest_gap(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> float:
    assert first.keys() == second.keys()
    return max(float(np.abs(np.asarray(first[name]) - np.asarray(second[name])).max()) for name in first)


def assert_same_gradients(model: Any, first: Any, second: Any) -> None:
    """Two ways to the same logits [T, V] also lead back to the same gradients of every parameter."""
    import torch

    grads = []
    for logits in (first, second):
        model.zero_grad()
        logits.square().sum().backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4 * float(other.abs().max()) + 1e-6, rtol=1e-3)


def learn(
    engine: Any,
    steps: int = 3,
    first: int = 0,
    select: Callable[[Batch], Any] | None = None,
    loss: Loss | None = None,
    batches: Callable[..., Batch] = make_batch,
) -> list[float]:
    """Loss and gradient norm of each optimizer step, of an actor or a critic. `select`: this rank's sequences."""
    loss = loss or (ValueLoss(value_clip=0.3) if engine.config.model.head == "value" else grpo(kl_coef=0.1))
    history = []
    for step in range(first, first + steps):
        batch = batches(seed=step)
        batch = batch.with_columns(value_T=batch["ref_logprob_T"] + 3, return_T=batch["advantage_T"])
        mine = batch if select is None else batch.select(select(batch))
        sums = engine.forward_backward(mine, loss, scale_of(batch))
        history += [sums["loss"], engine.optim_step().grad_norm]
    return history

"""Measure one trial update of a role on random tokens, with one rank, before a run is started.

Weights are random and never read from the model's files: the values affect neither time nor memory.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np
from numpy.typing import NDArray

from backends import memory
from backends.protocol import LossScale, Rank, RolloutEngine, TrainEngine, WeightSpec
from backends.registry import rollout_engine, train_engine
from specs.schema.algorithms.algorithm_tables import read_loss
from specs.schema.roles import ROLES
from specs.wire.batch import Batch
from specs.wire.messages import IDENTITY_COLUMNS
from specs.wire.meta_request import OneUpdate, Probed, RoleRequest, UpdateShape
from specs.wire.role_config import RolloutConfig, Sampling, TrainConfig

_BLOCK = 2**20  # random values repeated in every weight: drawing all would take longer than the update
_SPREAD = 0.02


def one_update(role: str, asked: RoleRequest) -> Probed:
    """Build the role's engine on its device, and run it once."""
    assert asked.shape is not None
    samples = ROLES[role].samples
    config = (RolloutConfig if samples else TrainConfig).model_validate(asked.body)
    before, started = memory.held_GiB(config.model.device), time.monotonic()
    engine: RolloutEngine | TrainEngine
    if isinstance(config, RolloutConfig):
        engine = sampler = rollout_engine(config.engine.kind).build(config, Rank())
        update = partial(_generate, sampler, asked, asked.shape)
    else:
        engine = trainer = train_engine(config.engine.kind).build(config, Rank())
        update = partial(_train, trainer, config, asked, asked.shape)
    try:
        built = engine.built()
        if isinstance(config, RolloutConfig):
            _give_weights(sampler)
        stepping = time.monotonic()
        took = OneUpdate(
            tokens=update(built.vocab_size),
            build_s=round(stepping - started, 3),
            step_s=round(time.monotonic() - stepping, 3),
            before_GiB=round(before, 3),
            peak_GiB=round(memory.peak_GiB(config.model.device), 3),
        )
    finally:
        engine.close()
    return Probed(role=role, model=built, not_seen=() if samples else ("mesh",), one_update=took)


# ── trainers ──────────────────────────────────────────────────────────────────────────────────────


def _train(engine: TrainEngine, config: TrainConfig, asked: RoleRequest, shape: UpdateShape, vocab_size: int) -> int:
    """Compute gradients and the optimizer step of a role that learns, else its log-probs; return the tokens."""
    batch = _completions(shape, vocab_size)
    if config.optimizer is None:
        (engine.forward if config.model.head == "lm" else engine.scores)(batch)
    else:
        counts = (shape.sequences * shape.response_tokens, shape.sequences, shape.response_tokens)
        scale = LossScale(*counts, num_units=shape.sequences // 2, num_chosen_tokens=counts[0] // 2)
        engine.forward_backward(batch, read_loss(asked.loss), scale)
        engine.optim_step()
    return batch.num_tokens


def _completions(shape: UpdateShape, vocab_size: int) -> Batch:
    """Return every column that an update may need; all sequences are as long as they may be."""
    length = shape.prompt_tokens + shape.response_tokens
    rng = np.random.default_rng(0)
    tokens_T = rng.integers(0, vocab_size, shape.sequences * length).astype(np.int32)
    mask_T = np.tile(
        np.repeat(np.array([0, 1], np.uint8), [shape.prompt_tokens, shape.response_tokens]), shape.sequences
    )
    logprob_T = np.where(mask_T, np.float32(-np.log(vocab_size)), np.float32(0))
    return Batch(
        {
            "length_B": np.full(shape.sequences, length, np.int32),
            "tokens_T": tokens_T,
            "loss_mask_T": mask_T,
            "advantage_T": np.where(mask_T, rng.standard_normal(len(tokens_T)), 0).astype(np.float32),
            **dict.fromkeys(("rollout_logprob_T", "old_logprob_T", "ref_logprob_T"), logprob_T),
            "correction_T": np.ones(len(tokens_T), dtype=np.float32),
            "covariant_T": np.zeros(len(tokens_T), dtype=np.float32),
            **dict.fromkeys(("value_T", "return_T"), np.zeros(len(tokens_T), dtype=np.float32)),
            "unit_B": np.arange(shape.sequences) // 2,
            "chosen_B": (np.arange(shape.sequences) % 2 == 0).astype(np.uint8),
            **dict.fromkeys(("kl_B", "margin_B"), np.zeros(shape.sequences, dtype=np.float32)),
        }
    )


# ── rollouts ──────────────────────────────────────────────────────────────────────────────────────


def _generate(engine: RolloutEngine, asked: RoleRequest, shape: UpdateShape, vocab_size: int) -> int:
    """Sample one completion per prompt, of full length where the engine can do without stop tokens; return the
    tokens."""
    if hasattr(engine, "stops"):
        engine.stops = frozenset()
    sampling = Sampling(seed=0, max_response_tokens=shape.response_tokens, **asked.sampling)
    return int(engine.generate(_prompts(shape, vocab_size), sampling, lambda _: None)["generated_tokens"])


def _give_weights(engine: RolloutEngine) -> None:
    block = np.random.default_rng(0).standard_normal(_BLOCK, dtype=np.float32) * np.float32(_SPREAD)
    for spec in engine.weight_specs():
        engine.import_weight(spec, _random_bytes(spec, block))
    engine.finish_import()


def _random_bytes(spec: WeightSpec, block: NDArray[np.float32]) -> NDArray[np.uint8]:
    if spec.dtype not in ("fp32", "bf16"):
        return np.zeros(spec.nbytes, np.uint8)
    values = block if spec.dtype == "fp32" else (block.view(np.uint32) >> 16).astype(np.uint16)
    return np.resize(values.view(np.uint8), spec.nbytes)


def _prompts(shape: UpdateShape, vocab_size: int) -> Batch:
    count = shape.sequences
    index_B = np.arange(count)
    tokens_T = np.random.default_rng(0).integers(0, vocab_size, count * shape.prompt_tokens)
    return Batch(
        {
            "length_B": np.full(count, shape.prompt_tokens, np.int32),
            "tokens_T": tokens_T.astype(np.int32),
            "position_B": np.zeros(count, np.int64),
            **{name: index_B.astype(np.int64) for name in ("prefix_B", *IDENTITY_COLUMNS)},
        }
    )

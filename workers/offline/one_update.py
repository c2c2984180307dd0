"""Measures one trial update of a role on random tokens, with one rank, before a run is started.

Weights are random and never read from the model's files: the values affect neither time nor memory.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from backends import memory
from backends.protocol import LossScale, Rank, RolloutEngine, TrainEngine, WeightSpec
from backends.registry import rollout_engine, train_engine
from specs.schema.algorithms.algorithm import AnyLoss
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
    return _generate(role, asked, asked.shape) if ROLES[role].samples else _train(role, asked, asked.shape)


# ── trainers ──────────────────────────────────────────────────────────────────────────────────────


def _train(role: str, asked: RoleRequest, shape: UpdateShape) -> Probed:
    """Gradients and optimizer step of a role that learns; else its log-probs."""
    config = TrainConfig.model_validate(asked.body)
    device = config.model.device
    kind = train_engine(config.engine.kind)
    before, started = memory.held_GiB(device), time.monotonic()
    engine = kind.build(config, Rank())
    built, stepping = engine.built(), time.monotonic()
    try:
        batch = _completions(shape, built.vocab_size)
        if config.optimizer is None:
            (engine.forward if config.model.head == "lm" else engine.scores)(batch)
        else:
            _learn(engine, batch, read_loss(asked.loss), shape)
        ended = time.monotonic()
        took = _took(batch.num_tokens, started, stepping, ended, before, device)
    finally:
        engine.close()
    return Probed(role=role, model=built, not_seen=("mesh",), one_update=took)


def _learn(engine: TrainEngine, batch: Batch, loss: AnyLoss, shape: UpdateShape) -> None:
    tokens = shape.sequences * shape.response_tokens
    engine.forward_backward(batch, loss, LossScale(tokens, shape.sequences, shape.response_tokens))
    engine.optim_step()


def _completions(shape: UpdateShape, vocab_size: int) -> Batch:
    """Every column that an update may need; all sequences are as long as they may be."""
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
        }
    )


# ── rollouts ──────────────────────────────────────────────────────────────────────────────────────


def _generate(role: str, asked: RoleRequest, shape: UpdateShape) -> Probed:
    """Sample one completion of full length per prompt."""
    config = RolloutConfig.model_validate(asked.body)
    device = config.model.device
    kind = rollout_engine(config.engine.kind)
    before, started = memory.held_GiB(device), time.monotonic()
    engine = kind.build(config, Rank())
    try:
        built = engine.built()
        _give_weights(engine)
        stepping = time.monotonic()
        counters = engine.generate(_prompts(shape, built.vocab_size), _endless(engine, asked, shape), lambda _: None)
        ended = time.monotonic()
        took = _took(int(counters["generated_tokens"]), started, stepping, ended, before, device)
    finally:
        engine.close()
    return Probed(role=role, model=built, one_update=took)


def _endless(engine: RolloutEngine, asked: RoleRequest, shape: UpdateShape) -> Sampling:
    """Sampling without stop tokens, where the engine allows that: every completion has full length."""
    if hasattr(engine, "stops"):
        engine.stops = frozenset()
    return Sampling(seed=0, max_response_tokens=shape.response_tokens, **asked.sampling)


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


def _took(tokens: int, started: float, stepping: float, ended: float, before: float, device: str) -> OneUpdate:
    return OneUpdate(
        tokens=tokens,
        build_s=round(stepping - started, 3),
        step_s=round(ended - stepping, 3),
        before_GiB=round(before, 3),
        peak_GiB=round(memory.peak_GiB(device), 3),
    )

"""A trainer with adapters and a real vLLM that applies them itself: how they are made, synced and compared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from rollout_helpers import rollout_config
from train_helpers import build_engine, learn, train_config
from vllm_process import RemoteVllm, shared_folder

from backends.protocol import Weight, WeightSpec
from backends.train.engine import HfTrainEngine
from specs.errors import SyncError
from specs.schema.role_section import DType, Lora
from specs.schema.spec import WeightForm
from specs.wire.batch import Batch
from specs.wire.role_config import RolloutConfig, Sampling

EXACT = 1e-4  # nats, fp32
RANK = 5  # vLLM makes room for 8
LORA = Lora(rank=RANK, alpha=12.0)
TEMPERATURE = 0.7  # of `train_config`
ONE = "model.layers.1.mlp.up_proj.lora_B.weight"  # a weight that tests spoil


def config_of(lora: Lora, dtype: DType = "fp32", device: str = "cpu") -> RolloutConfig:
    config = rollout_config(shared_folder(), "vllm", dtype)
    engine = config.engine.model_copy(update={"lora": "adapters"})
    model = config.model.model_copy(update={"device": device})
    return config.model_copy(update={"lora": lora, "engine": engine, "model": model})


def trainer_of(lora: Lora = LORA, dtype: DType = "fp32") -> HfTrainEngine:
    config = train_config(shared_folder(), lora=lora, micro_batch_tokens=512, model={"dtype": dtype})
    engine = build_engine(config)
    assert isinstance(engine, HfTrainEngine)
    learn(engine, 2)
    return engine


Change = Callable[[Weight, NDArray[np.uint8]], tuple[WeightSpec, NDArray[np.uint8]] | None]


def sync(trainer: HfTrainEngine, engine: RemoteVllm, change: Change | None = None) -> tuple[WeightForm, int]:
    """What a sync does: every checksum as sent must be the one read back. Returns the form, and how many bytes."""
    form = engine.weight_form()
    nbytes = 0
    for weight in trainer.export_weights(trainer.config.model.dtype, form):
        buffer = np.zeros(weight.spec.nbytes, dtype=np.uint8)
        checksum, spec = weight.copy_to(buffer), weight.spec
        if change is not None:
            changed = change(weight, buffer)
            if changed is None:
                continue
            spec, buffer = changed
        if engine.import_weight(spec, buffer) != checksum:
            raise SyncError(f"weight {spec.name} differs")
        nbytes += weight.spec.nbytes
    engine.finish_import()
    return form, nbytes


def sync_on_device(trainer: HfTrainEngine, engine: RemoteVllm) -> WeightForm:
    """As `sync`, with the sums of what lies on a device, here the CPU; all weights are one bucket."""
    form = engine.weight_form()
    sent = []
    for weight in trainer.export_weights(trainer.config.model.dtype, form):
        window_U = torch.zeros(weight.spec.nbytes, dtype=torch.uint8)
        sent.append((weight.copy_to(window_U), (weight.spec, window_U)))
    assert engine.import_from_device([each for _, each in sent]) == [checksum for checksum, _ in sent]
    engine.finish_import()
    return form


def probe(seed: int = 0, sequences: int = 4, length: int = 20) -> Batch:
    tokens_T = np.random.default_rng(seed).integers(2, 23, sequences * length)
    mask_T = np.ones(len(tokens_T), dtype=np.uint8)
    mask_T[::length] = 0
    return Batch({"tokens_T": tokens_T, "length_B": np.full(sequences, length), "loss_mask_T": mask_T})


def gap(trainer: HfTrainEngine, engine: RemoteVllm, *, adapters: bool = True) -> float:
    batch = probe()
    theirs = engine.score(batch.only(["tokens_T"]), TEMPERATURE)
    return float(np.abs(theirs - trainer.forward(batch, adapters=adapters)).max())


def check_samples(
    trainer: HfTrainEngine, engine: RemoteVllm, prompts: Batch, *, seed: int, tokens: int, close: float = EXACT
) -> None:
    """Log-probs of what is sampled are the trainer's."""
    parts: list[Batch] = []
    sampling = Sampling(seed=seed, temperature=TEMPERATURE, max_response_tokens=tokens)
    engine.generate(prompts, sampling, parts.append)
    samples = Batch.concat(parts)
    inside = samples["loss_mask_T"] == 1
    want_T = trainer.forward(samples.only(["tokens_T", "loss_mask_T"]))
    np.testing.assert_allclose(samples["rollout_logprob_T"][inside], want_T[inside], atol=close)
    assert want_T[inside].std() > 0.3, "a distribution this flat would hide a wrong token"

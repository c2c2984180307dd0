"""Engines on the device that they are made for: the same bodies on the CPU and, marked `gpu`, on a GPU, where memory is
counted too."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu import needs, on_cpu_and_gpu
from numpy.typing import NDArray
from rollout_helpers import VOCAB, answer, give_weights, make_prompts, rollout_config
from rollout_helpers import write_model as write_shape
from train_helpers import (
    QWEN2,
    build_engine,
    learn,
    make_batch,
    make_units,
    objective,
    train_config,
    unit_scale,
    write_model,
)

from backends import memory
from backends.packed.staging import Staging
from backends.protocol import Rank
from backends.torch_rollout.decode_graphs import DecodeGraphs
from backends.torch_rollout.engine import TorchRolloutEngine
from backends.torch_rollout.kv_cache import KvCache
from backends.train.engine import HfTrainEngine
from backends.train.lm_head import add_product
from specs.schema.role_section import Lora
from specs.wire.role_config import Sampling

RESIDUAL_GIB = 80 / 1024  # held after a sleep at level 2: a workspace of cuBLAS for decoding, one for its graphs
WIDE = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 16}


def trainer_on(device: str, folder: Path, **model: object) -> HfTrainEngine:
    engine = build_engine(train_config(folder, model={"device": device, **model}))
    assert isinstance(engine, HfTrainEngine)
    return engine


@pytest.mark.parametrize("device", on_cpu_and_gpu())
def test_sleep_frees_the_device_and_waking_changes_nothing(tmp_path: Path, device: str) -> None:
    """Level 1 keeps the weights, level 2 drops them; five cycles, and what stays behind does not grow."""
    wide = rollout_config(write_shape(tmp_path / "wide", **WIDE, **HEADS), max_sequences=64)
    weights_GiB = TorchRolloutEngine.on_meta(wide, Rank()).model.parameters * 4 / 2**30
    assert weights_GiB > 4 * RESIDUAL_GIB, "small weights would hide in what may stay"
    config = wide if device == "cuda" else rollout_config(write_shape(tmp_path / "model"), max_sequences=64)
    config = config.model_copy(update={"model": config.model.model_copy(update={"device": device})})
    before = memory.held_GiB(device)
    engine = TorchRolloutEngine.build(config, Rank())
    give_weights(engine, scale=0.02)
    first = answer(engine, make_prompts())
    engine.sleep(1)
    engine.wake(["weights", "kv_cache"])
    assert answer(engine, make_prompts()) == first
    asleep = []
    for _ in range(5):
        engine.sleep(2)
        memory.hand_back(device)
        asleep.append(memory.held_GiB(device) - before)
        engine.wake(["weights"])
        give_weights(engine, scale=0.02)
        engine.wake(["kv_cache"])
        assert answer(engine, make_prompts()) == first
    if device == "cuda":
        assert sum(spec.nbytes for spec in engine.weight_specs()) / 2**30 == pytest.approx(weights_GiB)
        assert max(asleep) < RESIDUAL_GIB
        assert asleep[-1] - asleep[1] < 2**-10


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 9], ids=["whole", "window"])
@pytest.mark.parametrize("device", on_cpu_and_gpu())
def test_decode_graphs_write_what_eager_steps_write(
    tmp_path: Path, device: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that empty one by one, and twice more requests than slots; new weights, and a cache that moved. On the CPU
    the padded steps run without a graph."""
    shape = {"sliding_window": window} if window else {}
    folder = write_shape(tmp_path, "mistral" if window else "qwen2", **shape)
    steps: Counter[str] = Counter()

    class Watched(DecodeGraphs):
        def run(self, packed: NDArray[np.int64], staging: Staging) -> torch.Tensor | None:
            logits = super().run(packed, staging)
            steps["eager" if logits is None else "graph"] += 1
            return logits

    def graphs_of(engine: TorchRolloutEngine, cache: KvCache) -> DecodeGraphs | None:
        assert engine._forward is not None
        if engine.table.enforce_eager:
            return None
        return Watched(engine._forward, cache, VOCAB, captured=device == "cuda")

    monkeypatch.setattr(TorchRolloutEngine, "_graphs_of", graphs_of)
    engines = []
    for eager in (True, False):
        config = rollout_config(folder, max_sequences=11, enforce_eager=eager)
        model = config.model.model_copy(update={"device": device})
        engines.append(TorchRolloutEngine.build(config.model_copy(update={"model": model}), Rank()))
    for seed, level in enumerate((0, 0, 2)):
        found = []
        for engine in engines:
            if level:
                engine.sleep(level)
                engine.wake(["weights", "kv_cache"])
            give_weights(engine, seed)
            found.append(answer(engine, make_prompts(), Sampling(seed=seed, max_response_tokens=60)))
        for key, (tokens, logprobs, finished) in found[0].items():
            assert found[1][key][::2] == (tokens, finished)
            np.testing.assert_allclose(found[1][key][1], logprobs, atol=1e-4)
    assert steps["graph"] > 3 * steps["eager"] > 0


@pytest.mark.parametrize("lora", [None, Lora(rank=4, alpha=12.0)], ids=["whole", "adapters"])
@pytest.mark.parametrize("device", on_cpu_and_gpu())
def test_offload_offloads_everything_in_pinned_memory_neutral_to_the_bit(
    tmp_path: Path, device: str, lora: Lora | None
) -> None:
    """Two trainers learn alike, of which one is sent off the device between its steps."""
    folder = write_model(tmp_path, QWEN2)
    config = train_config(folder, lora=lora, model={"device": device})
    stays, moves = build_engine(config), build_engine(config)
    assert isinstance(stays, HfTrainEngine)
    assert isinstance(moves, HfTrainEngine)
    for step in range(3):
        assert learn(stays, 1, first=step) == learn(moves, 1, first=step)
        held = torch.cuda.memory_allocated() if device == "cuda" else 0
        moves.offload()
        if device == "cuda":
            offloaded = [piece for _, pieces, _ in moves.offloading._offloaded for piece in pieces or ()]
            assert offloaded
            assert all(host.is_pinned() for host in offloaded)
            assert held - torch.cuda.memory_allocated() >= sum(host.nbytes for host in offloaded)
        moves.onload()
    np.testing.assert_array_equal(stays.forward(make_batch()), moves.forward(make_batch()))


@pytest.mark.parametrize("device", on_cpu_and_gpu())
def test_products_are_added_up_in_fp32(device: str) -> None:
    """The gradient of a head in bf16 is made so, chunk by chunk; a sum that a chunk began with stays in it."""
    torch.manual_seed(0)
    chunks = [(torch.randn(96, 311).bfloat16(), torch.randn(96, 64).bfloat16()) for _ in range(3)]
    begun_VE = torch.randn(311, 64)
    want_VE = begun_VE.double() + sum(grad.double().T @ hidden.double() for grad, hidden in chunks)
    sum_VE = begun_VE.to(device)
    for grad_NV, hidden_NE in chunks:
        add_product(sum_VE, grad_NV.to(device), hidden_NE.to(device))
    gap = (sum_VE.cpu() - want_VE).abs().max() / want_VE.abs().max()
    assert gap < (1e-6 if device == "cuda" else 1e-2), "on the CPU each product is rounded to bf16 on its way"


@pytest.mark.parametrize("device", on_cpu_and_gpu())
def test_pairs_are_compared_on_the_device_as_on_the_cpu(tmp_path: Path, device: str) -> None:
    """In chunks of logits, twice to the bit."""
    folder, batch = write_model(tmp_path, QWEN2), make_units()
    given, found = objective("mixture", mixture=[{"kind": "dpo"}, {"kind": "nll"}]), []
    for where in ("cpu", device, device):
        engine = trainer_on(where, folder)
        engine.policy.head.chunk = 7
        sums = engine.forward_backward(batch, given, unit_scale(batch))
        found.append({name: sums[name] for name in given.summed()} | {"norm": engine.optim_step().grad_norm})
    assert found[1] == found[2]
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("device", "attention", "dtype", "close"),
    [
        ("cpu", "sdpa", "fp32", 1e-5),
        pytest.param("cuda", "sdpa", "fp32", 1e-4, marks=[pytest.mark.gpu, *needs(1)]),
        pytest.param("cuda", "flash_attention_2", "bf16", 3e-2, marks=[pytest.mark.gpu, *needs(1)]),
    ],
)
def test_a_packed_row_is_its_sequences_alone(
    tmp_path: Path, device: str, attention: str, dtype: str, close: float
) -> None:
    """Many sequences in one forward pass against one at a time, through the engine."""
    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn")
    folder = write_model(tmp_path, QWEN2)
    engine = trainer_on(device, folder, attn_implementation=attention, dtype=dtype)
    batch = make_batch(sequences=10)
    alone = [engine.forward(batch.select([index])) for index in range(len(batch))]
    packed_T = engine.forward(batch)
    np.testing.assert_allclose(packed_T, np.concatenate(alone), atol=close)
    assert packed_T[packed_T != 0].std() > 10 * close, "a flat model would hide a mixed row"
    assert engine.built().attn_implementation == attention

"""Engines on a simulated CUDA device: what they compute is what they compute on the CPU, to the last bit in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rollout_helpers
import sharded_worker
import torch
from families import FAMILIES
from outcomes import outcome
from simulated_device.child import on_simulated_device
from simulated_device.walk import walk
from train_helpers import (
    QWEN2,
    build_engine,
    grpo,
    largest_gap,
    learn,
    make_batch,
    make_units,
    objective,
    scale_of,
    train_config,
    unit_scale,
    weights_of,
    write_model,
)

from backends.protocol import Rank
from backends.torch_rollout.engine import TorchRolloutEngine
from rlctl.models.model_tensors import tensors_of_config
from specs.schema.engines.fsdp2_table import Fsdp2Table
from specs.schema.engines.held_model import HeldTrainer
from specs.schema.engines.zero_table import ZeroTable
from specs.schema.role_section import DType, Lora, Optimizer
from specs.wire.role_config import Sampling

TRAINERS: dict[str, dict[str, Any]] = {
    "actor": {},
    "recompute": {"gradient_checkpointing": True},
    "activations on the host": {"activation_offload": True},
    "one of both": {"gradient_checkpointing": 1, "activation_offload": True},
    "adapters": {"lora": Lora(rank=4, alpha=12.0)},
    "critic": {"role": "critic", "model": {"head": "value"}},
    "reference": {"role": "ref", "optimizer": None},
    "eager": {"model": {"attn_implementation": "eager"}},
}


@contextmanager
def in_the_gpus_order() -> Iterator[None]:
    """Where a trainer makes other sums on a GPU on purpose, the CPU makes the same: a stock RMSNorm; keys and values
    for each query head in fp32; longer pieces of a gradient's norm."""
    from backends.packed import layout
    from backends.train import adamw, rms_norm

    def each(device: object, dtype: Any, *, masked: bool) -> bool:
        return masked or "float32" in str(dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rms_norm, "_KNOWN", set())
        patch.setattr(adamw, "PIECE", adamw.GPU_PIECE)
        patch.setattr(layout, "wants_a_key_per_query_head", each)
        yield


def trained(folder: Path, saved: Path, device: str, **changes: Any) -> dict[str, Any]:
    """Return what a trainer says on its way: steps, off the device and back, a state that it saves and reads again."""
    model = {**changes.pop("model", {}), "device": device}
    config = train_config(folder, **changes, model=model)
    engine: Any = build_engine(config)
    if engine.policy.offload is not None:
        engine.policy.offload.smallest_bytes = 0
    if config.optimizer is None:
        told = engine.forward(make_batch()).tolist()
        engine.offload()
        engine.onload()
        return {"told": told, "again": engine.forward(make_batch()).tolist(), "built": engine.built().weights_checksum}
    found: dict[str, Any] = {"first": learn(engine, 2)}
    engine.offload()
    engine.onload()
    found["moved"] = learn(engine, 1, first=2)
    saved.mkdir()
    engine.save(saved)
    found["then"] = learn(engine, 2, first=3)
    engine.load(saved)
    found["again"] = learn(engine, 2, first=3)
    assert found["then"] == found["again"]
    if config.model.head == "value":
        found["told"] = [engine.values(make_batch()).tolist(), engine.scores(make_batch()).tolist()]
        sums = engine.forward_backward(make_units(), objective("bradley_terry"), unit_scale(make_units()))
    else:
        found["told"] = [engine.forward(make_batch()).tolist()]
        found["greedy"] = [written.tokens for written in engine.greedy([[1, 2, 3], [4]], 3)]
        sums = engine.forward_backward(make_units(), objective("dpo"), unit_scale(make_units()))
    found |= {"sums": dict(sums), "norm": engine.optim_step().grad_norm, "built": engine.built().weights_checksum}
    found["bf16"] = {name: value.tobytes() for name, value in weights_of(engine, "bf16").items()}
    found["weights"] = {name: value.tobytes() for name, value in weights_of(engine).items()}
    return found


@pytest.mark.parametrize("case", TRAINERS)
@on_simulated_device
def test_trainers(tmp_path: Path, case: str) -> None:
    folder = write_model(tmp_path / "model", QWEN2)
    with in_the_gpus_order():
        on_cpu = trained(folder, tmp_path / "cpu", "cpu", **TRAINERS[case])
    on_device = trained(folder, tmp_path / "cuda", "cuda", **TRAINERS[case])
    for part in on_cpu:
        assert on_cpu[part] == on_device[part], part


def sampled(folder: Path, device: str, *, eager: bool = True) -> list[Any]:
    """Return what a sampler says on its way: awake, and after each way to sleep, in several ways to sample."""
    config = rollout_helpers.rollout_config(folder, max_sequences=6, enforce_eager=eager)
    config = config.model_copy(update={"model": config.model.model_copy(update={"device": device})})
    engine = TorchRolloutEngine.build(config, Rank())
    rollout_helpers.give_weights(engine)
    ways = [
        Sampling(seed=3, max_response_tokens=12, **way) for way in ({}, {"top_p": 0.8, "top_k": 7}, {"greedy": True})
    ]
    found: list[Any] = [rollout_helpers.answer(engine, rollout_helpers.make_prompts(), way) for way in ways]
    engine.sleep(1)
    engine.wake(["weights", "kv_cache"])
    found.append(rollout_helpers.answer(engine, rollout_helpers.make_prompts()))
    engine.sleep(2)
    engine.wake(["weights"])
    rollout_helpers.give_weights(engine, seed=1)
    engine.wake(["kv_cache"])
    found += [
        rollout_helpers.answer(engine, rollout_helpers.make_prompts()),
        engine.score(make_batch(vocab=23), 0.7).tolist(),
    ]
    assert eager == (engine._graphs is None or not engine._graphs._graphs)
    engine.close()
    return found


@pytest.mark.parametrize("shape", [{}, {"model_type": "mistral", "sliding_window": 5}], ids=str)
@on_simulated_device
def test_the_sampler_writes_the_same_tokens(tmp_path: Path, shape: dict[str, Any]) -> None:
    """The CPU's norms and its attention of a decoded step add in another order: log-probs are equal to rounding."""
    folder = rollout_helpers.write_model(tmp_path, **shape)
    *on_cpu, scores = sampled(folder, "cpu")
    for eager in (True, False):  # and by graphs
        *on_device, own_scores = sampled(folder, "cuda", eager=eager)
        for ours, theirs in zip(on_device, on_cpu, strict=True):
            assert ours.keys() == theirs.keys()
            for name, (tokens, logprobs, finished) in theirs.items():
                assert ours[name] == (tokens, pytest.approx(logprobs, abs=2e-5), finished)
        np.testing.assert_allclose(own_scores, scores, atol=2e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "falcon_h1", "llama4_text"])
@on_simulated_device
def test_families(tmp_path: Path, family: str) -> None:
    """Experts, states, complex rotations: a step's numbers; and what the sampler proves of its cache."""
    folder, found = write_model(tmp_path, {**FAMILIES[family].config, "eos_token_id": 1}), []
    for device in ("cpu", "cuda"):
        found.append(learn(build_engine(train_config(folder, model={"device": device})), 2))
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    config = rollout_helpers.rollout_config(folder, enforce_eager=True)
    config = config.model_copy(update={"model": config.model.model_copy(update={"device": "cuda"})})
    rollout_helpers.give_weights(TorchRolloutEngine.build(config, Rank()), scale=0.05)


# How far from the CPU's. DeepSpeed, which knows one device in a process, and Megatron are held against `ddp`.
SHARDED = {
    "fsdp2": 0.0,
    "fsdp2 critic": 0.0,
    "fsdp2 recompute one, offload activations": 0.0,
    "fsdp2 bf16": 1e-2,  # the head's gradient is rounded to bf16 once, on the CPU for each chunk
    "zero2": 1e-5,
    "zero3": 1e-5,
    "data": 1e-5,
    # Other products than `ddp` has: rounding grows with each step, on a CPU with AVX2 alone to 8 %.
    "data bf16": 1e-1 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 2e-2,
}
WALKED = ("fsdp2", "zero3", "data")
MEGATRON_CORE = [*(Path(__file__).parents[2] / ".venv-megatron" / "lib").glob("python3.*/site-packages/megatron")]


def prepare_megatron(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Have Megatron-core from its environment, and nothing else that is there; its contract moves it off the device in
    a way of its own."""
    if not MEGATRON_CORE:
        pytest.skip("scripts/setup-engine megatron makes .venv-megatron")
    (folder / "megatron").symlink_to(MEGATRON_CORE[0])
    patch.syspath_prepend(folder)
    from megatron_worker import offload_and_back

    patch.setattr(sharded_worker, "offload_and_back", offload_and_back)


@pytest.mark.parametrize("case", SHARDED)
@on_simulated_device
def test_engines_of_several_ranks(tmp_path: Path, case: str) -> None:
    """All that their contract asks of one rank: steps, resume, objectives, export, greedy answers. One of each is
    followed too: nothing is used on the device before it is there."""
    cases, reference = sharded_worker.CASES | sharded_worker.MEGATRON, case
    if case not in cases:
        pytest.skip("DeepSpeed is not installed")
    if not isinstance(cases[case]["engine"], Fsdp2Table):
        reference = "ddp bf16" if "bf16" in case else "ddp"
    model, close = write_model(tmp_path / "model", QWEN2), SHARDED[case]
    with in_the_gpus_order(), pytest.MonkeyPatch.context() as patch:
        for device, engine in (("cpu", reference), ("cuda", case)):
            if engine in sharded_worker.MEGATRON:
                prepare_megatron(tmp_path, patch)
            job = {"case": engine, "out": str(tmp_path / device / "one"), "device": device, "offload": device == "cuda"}
            with walk() if device == "cuda" and case in WALKED else nullcontext() as found:
                sharded_worker.run(model, job, Rank()).close()
            assert found is None or not found.faults
    on_cpu, on_device = (outcome(tmp_path / device, "one") for device in ("cpu", "cuda"))
    assert on_device.losses() == pytest.approx(on_cpu.losses(), rel=close, abs=close)
    assert on_device.norms() == pytest.approx(on_cpu.norms(), rel=close, abs=close)
    assert largest_gap(on_device.weights, on_cpu.weights) <= close
    assert close or on_device.ranks == on_cpu.ranks


@on_simulated_device
def test_gradients_that_deepspeed_pins_stay_in_host_memory(tmp_path: Path) -> None:
    """Pinned memory has no other size. Where they would be let go of on the CPU, they are left where they are."""
    if "zero3 offload" not in sharded_worker.CASES:
        pytest.skip("DeepSpeed is not installed")
    job = {"case": "zero3 offload", "out": str(tmp_path / "one"), "device": "cuda"}
    engine: Any = sharded_worker.run(write_model(tmp_path / "model", QWEN2), job, Rank())
    (gradients,) = engine.parts.gradient_tensors()
    assert gradients.is_pinned()
    batch = make_batch(3)
    before_T = engine.forward(batch)
    for _ in range(2):
        engine.offload()
        engine.onload()
        assert engine.forward(batch).tolist() == before_T.tolist()
    engine.close()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@on_simulated_device
def test_gradients_of_an_offloaded_optimizer_lie_where_the_plan_has_them(tmp_path: Path, dtype: DType) -> None:
    """In bf16 DeepSpeed sums them in fp32 on the device, whatever takes the step on the host."""
    if "zero2" not in sharded_worker.CASES:
        pytest.skip("DeepSpeed is not installed")
    table, given = ZeroTable(stage=2, offload_optimizer=True), {"dtype": dtype, "device": "cuda"}
    config = train_config(write_model(tmp_path / "model", QWEN2), engine=table, model=given)
    engine: Any = build_engine(config)
    batch = make_batch(3)
    engine.forward_backward(batch, grpo(), scale_of(batch))
    held = sum(gradient.nbytes for gradient in engine.parts.gradient_tensors() if gradient.is_cuda)
    tensors = tensors_of_config(QWEN2)
    assert tensors is not None
    planned = list(table.memory(HeldTrainer(tensors, dtype, 1, "cuda", Optimizer())))
    assert held == sum(part.nbytes for part in planned if part.name == "gradients" and not part.host)
    engine.optim_step()
    engine.close()

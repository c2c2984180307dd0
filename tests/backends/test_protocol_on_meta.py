"""What an engine says it would build is what it builds: every field, for every engine that runs in this process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rollout_helpers import rollout_config
from torch import distributed as dist
from train_helpers import GEMMA3, GPT2, LLAMA, QWEN2, build_engine, train_config, write_model

from backends import memory
from backends.protocol import Rank
from backends.registry import rollout_engine, train_engine
from backends.train.role_group import leave_group
from specs.errors import ModelError
from specs.schema.role_section import Lora
from specs.wire.as_built import ModelBuilt

BF16 = {"model": {"dtype": "bf16"}}
FROZEN: dict[str, Any] = {"optimizer": None, "role": "ref"}
ADAPTERS: dict[str, Any] = {"lora": Lora(rank=2, targets=("q_proj", "down_proj")), "gradient_checkpointing": True}


@pytest.fixture(autouse=True)
def no_group():
    leave_group()
    yield
    leave_group()


def seen(model: ModelBuilt, not_seen: tuple[str, ...]) -> dict[str, Any]:
    return model.model_dump(exclude={*not_seen, "weights_checksum"})


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (QWEN2, {}),
        (LLAMA, FROZEN),
        (GPT2, BF16),
        (GEMMA3, {**BF16, **FROZEN}),
        (LLAMA, {**BF16, **ADAPTERS}),
        (QWEN2, {"model": {"attn_implementation": "eager"}}),
        (QWEN2, {"model": {"head": "value", "dtype": "bf16"}}),
    ],
    ids=["tied", "frozen", "bf16", "bf16 frozen", "adapters", "eager", "critic"],
)
def test_a_trainer(tmp_path: Path, kind: str, model: dict[str, Any], changes: dict[str, Any]) -> None:
    config = train_config(write_model(tmp_path, model), kind, **changes)
    said = train_engine(kind).on_meta(config, Rank())
    assert said is not None
    built = build_engine(config).built()
    assert seen(said.model, said.not_seen) == seen(built, said.not_seen)
    assert said.not_seen == (("new_head",) if "ForSequence" in built.model_class else ())


@pytest.mark.parametrize("head", ["lm", "value"])
def test_the_fake_one(tmp_path: Path, head: str) -> None:
    config = train_config(write_model(tmp_path, QWEN2), "fake", model={"head": head})
    said = train_engine("fake").on_meta(config, Rank())
    assert said is not None
    assert seen(said.model, said.not_seen) == seen(build_engine(config).built(), said.not_seen)


@pytest.mark.parametrize(("kind", "dtype"), [("torch", "fp32"), ("torch", "bf16"), ("fake", "fp32")])
def test_a_rollout(tmp_path: Path, kind: str, dtype: str) -> None:
    config = rollout_config(write_model(tmp_path, {**QWEN2, "eos_token_id": 1}), kind, dtype)
    said = rollout_engine(kind).on_meta(config, Rank())
    assert said is not None
    assert seen(said.model, ()) == seen(rollout_engine(kind).build(config, Rank()).built(), ())


@pytest.mark.parametrize(("kind", "cut"), [("ddp", {}), ("fsdp2", {"replicate": 1, "shard": 4})])
def test_ranks_that_share_samples(tmp_path: Path, kind: str, cut: dict[str, int]) -> None:
    config = train_config(write_model(tmp_path, QWEN2), kind, sequence_parallel=2)
    said = train_engine(kind).on_meta(config, Rank(0, 4, 0))
    assert said is not None
    assert said.model.mesh == {**cut, "sequence": 2}
    assert not dist.is_initialized()


def test_nothing_has_memory(tmp_path: Path) -> None:
    """Seventy billion parameters on this machine; the group of its ranks is gone afterwards."""
    large = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    folder = write_model(tmp_path, {**large, "num_attention_heads": 64, "num_key_value_heads": 8})
    config = train_config(folder, "fsdp2", **BF16)
    before = memory.held_GiB("cpu")
    said = train_engine("fsdp2").on_meta(config, Rank(0, 64, 0))
    assert said is not None
    assert said.model.parameters == 70_553_706_496
    assert said.model.mesh == {"replicate": 1, "shard": 64}
    assert memory.held_GiB("cpu") - before < 0.5
    assert not dist.is_initialized()


@pytest.mark.parametrize("role", ["actor", "rollout"])
def test_a_model_that_calls_attention_of_its_own(tmp_path: Path, role: str) -> None:
    """No build would run it on packed rows, where its sequences would see each other."""
    folder = write_model(tmp_path, {**LLAMA, "model_type": "falcon", "eos_token_id": 1})
    if role == "rollout":
        on_meta = partial(rollout_engine("torch").on_meta, rollout_config(folder, "torch", "fp32"))
    else:
        on_meta = partial(train_engine("fsdp2").on_meta, train_config(folder, "fsdp2"))
    with pytest.raises(ModelError, match="FalconForCausalLM does not call attention through transformers' Attention"):
        on_meta(Rank())


def test_a_model_that_keeps_states_of_its_own(tmp_path: Path) -> None:
    """MiniMax's lightning attention would carry them from one sequence of a row into the next."""
    layers = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "head_dim": 8}
    folder = write_model(tmp_path, {**LLAMA, "model_type": "minimax", **layers})
    with pytest.raises(ModelError, match="MiniMaxForCausalLM has layers that carry a state past transformers' cache"):
        train_engine("fsdp2").on_meta(train_config(folder, "fsdp2"), Rank())

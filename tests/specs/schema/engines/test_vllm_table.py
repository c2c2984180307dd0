"""What is said of a rollout by vLLM: adapters that it applies itself, and models that it cannot sync."""

from __future__ import annotations

from typing import Any

import pytest
from small_spec import problems_of, raw_spec

from rlctl.loop.residency import sleep_level
from specs.load.load import spec_from
from specs.model_facts import model_facts
from specs.schema.engines.vllm_table import lora_room
from specs.schema.spec import RolloutSection

MERGED, ADAPTERS = {"kind": "vllm"}, {"kind": "vllm", "lora": "adapters"}


def raw(rollout: dict[str, Any], lora: dict[str, Any] | None) -> dict[str, Any]:
    model = {"path": "some/model", "from_scratch": False}
    return raw_spec(model=model, actor={} if lora is None else {"lora": lora}, rollout=rollout)


@pytest.mark.parametrize(
    ("engine", "lora", "applies", "level"),
    [(ADAPTERS, {"rank": 8}, True, 1), (MERGED, {"rank": 8}, False, 2), (MERGED, None, False, 2)],
)
def test_a_sync_brings_back_what_a_sleep_drops(
    engine: dict[str, Any], lora: dict[str, Any] | None, applies: bool, level: int
) -> None:
    spec = spec_from(raw({"engine": engine}, lora))
    assert (spec.rollout_applies_adapters, sleep_level(spec)) == (applies, level)


@pytest.mark.parametrize(
    ("rollout", "lora", "key", "words"),
    [
        ({"engine": ADAPTERS}, None, "rollout.engine.lora", "the actor trains no adapters"),
        ({"engine": ADAPTERS}, {"rank": 513}, "actor.lora.rank", "up to 512"),
        ({"engine": ADAPTERS}, {"rank": 512}, "", ""),
        (
            {"engine": ADAPTERS, "devices": [0], "dtype": "fp32"},
            {"rank": 8},
            "rollout.engine.lora",
            'rollout.dtype = "bf16"',
        ),
        ({"engine": ADAPTERS, "devices": [0], "dtype": "bf16"}, {"rank": 8}, "", ""),
        ({"engine": {**MERGED, "gpu_memory_utilization": 0.9}}, None, "rollout.engine.gpu_memory_utilization", "CPU"),
        (
            {"engine": {**MERGED, "gpu_memory_utilization": 0.9, "kv_cache_GiB": 2.0}, "devices": [0]},
            None,
            "rollout.engine.gpu_memory_utilization",
            "kv_cache_GiB says how large",
        ),
    ],
)
def test_keys_without_effect_and_adapters_that_vllm_cannot_apply(
    rollout: dict[str, Any], lora: dict[str, Any] | None, key: str, words: str
) -> None:
    found = problems_of(raw(rollout, lora))
    assert [problem.key for problem in found] == ([key] if key else [])
    assert all(words in f"{problem.message} {problem.hint}" for problem in found)


def test_room_for_a_rank() -> None:
    assert [lora_room(rank) for rank in (1, 2, 8, 9, 257, 512)] == [1, 8, 8, 16, 320, 512]


@pytest.mark.parametrize(
    ("config", "kind", "devices", "words"),
    [
        ({"head_dim": 16}, "vllm", (), "the model's have 16"),
        ({"head_dim": 64}, "vllm", (), ""),
        ({"head_dim": 16}, "vllm", (0,), ""),
        ({"kv_lora_rank": 512}, "vllm", (0,), ""),
        ({"kv_lora_rank": 512}, "vllm", (), "computes latent attention otherwise"),
        ({"num_experts": 8}, "vllm", (), "packs the 8 experts"),
        ({"num_experts": 8}, "vllm", (0,), ""),
    ],
)
def test_models_that_vllm_has_no_kernel_for_or_computes_from_in_another_form(
    config: dict[str, int], kind: str, devices: tuple[int, ...], words: str
) -> None:
    facts = model_facts({"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, **config})
    assert facts is not None
    rollout = RolloutSection.model_validate({"engine": {"kind": kind}, "devices": devices})
    found = [problem.message for problem in rollout.engine.model_problems("rollout", rollout, facts)]
    assert len(found) == bool(words)
    assert all(words in message for message in found)

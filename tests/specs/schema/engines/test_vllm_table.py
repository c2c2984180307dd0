"""What check-config says about adapters that vLLM applies itself."""

from __future__ import annotations

from typing import Any

import pytest
from small_spec import only_problem, raw_spec

from rlctl.loop.residency import sleep_level
from specs.load.load import spec_from
from specs.model_facts import model_facts
from specs.schema.engines.vllm_table import LORA_ROOMS, lora_room
from specs.schema.spec import Spec

ADAPTERS = {"kind": "vllm", "lora": "adapters"}


def raw(rollout: dict[str, Any], lora: dict[str, Any] | None) -> dict[str, Any]:
    model = {"path": "some/model", "from_scratch": False}
    return raw_spec(model=model, actor={} if lora is None else {"lora": lora}, rollout=rollout)


def spec(rollout: dict[str, Any], lora: dict[str, Any] | None) -> Spec:
    return spec_from(raw(rollout, lora))


def test_who_applies_adapters() -> None:
    assert spec({"engine": ADAPTERS}, {"rank": 8}).rollout_applies_adapters
    assert not spec({"engine": {"kind": "vllm"}}, {"rank": 8}).rollout_applies_adapters
    assert not spec({"engine": {"kind": "torch"}}, {"rank": 8}).rollout_applies_adapters
    assert not spec({"engine": {"kind": "vllm"}}, None).rollout_applies_adapters


def test_how_deep_a_sampler_sleeps() -> None:
    """A sync must bring back what a sleep has dropped."""
    assert sleep_level(spec({"engine": ADAPTERS}, {"rank": 8})) == 1
    assert sleep_level(spec({"engine": {"kind": "vllm"}}, {"rank": 8})) == 2
    assert sleep_level(spec({"engine": {"kind": "vllm"}}, None)) == 2


@pytest.mark.parametrize("how", ["merged", "adapters"])
def test_without_adapters_the_key_has_no_effect(how: str) -> None:
    found = only_problem(raw({"engine": {"kind": "vllm", "lora": how}}, None))
    assert (found.key, found.value) == ("rollout.engine.lora", f'"{how}"')
    assert "the actor trains no adapters" in found.message


def test_a_rank_that_vllm_has_no_room_for() -> None:
    found = only_problem(raw({"engine": ADAPTERS}, {"rank": 513}))
    assert (found.key, found.value) == ("actor.lora.rank", "513")
    assert "up to 512" in found.message
    assert spec({"engine": ADAPTERS}, {"rank": 512})
    assert spec({"engine": {"kind": "vllm"}}, {"rank": 513}), "merged, any rank will do"


def test_on_a_gpu_adapters_compute_in_bf16() -> None:
    found = only_problem(raw({"engine": ADAPTERS, "devices": [0], "dtype": "fp32"}, {"rank": 8}))
    assert found.key == "rollout.engine.lora"
    assert 'rollout.dtype = "bf16"' in found.hint
    assert spec({"engine": ADAPTERS, "devices": [0], "dtype": "bf16"}, {"rank": 8})
    assert spec({"engine": ADAPTERS}, {"rank": 8}), "the CPU takes fp32"


def test_room_for_a_rank() -> None:
    assert [lora_room(rank) for rank in (1, 2, 8, 9, 257, 512)] == [1, 8, 8, 16, 320, 512]
    assert sorted(LORA_ROOMS) == list(LORA_ROOMS)


@pytest.mark.parametrize(
    ("head_dim", "engine", "devices", "fits"),
    [
        (16, "vllm", [], False),
        (48, "vllm", [], False),
        (64, "vllm", [], True),
        (16, "vllm", [0], True),
        (16, "torch", [], True),
    ],
)
def test_heads_that_vllm_has_no_kernel_for_on_the_cpu(
    head_dim: int, engine: str, devices: list[int], fits: bool
) -> None:
    config = {"model_type": "qwen2", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    facts = model_facts(config | {"head_dim": head_dim})
    assert facts is not None
    rollout = spec({"engine": {"kind": engine}, "devices": devices}, None).rollout
    found = [*rollout.engine.model_problems("rollout", rollout, facts)]
    assert [problem.key for problem in found] == ([] if fits else ["rollout.engine.kind"])


@pytest.mark.parametrize(
    ("more", "engine", "devices", "words"),
    [
        ({"kv_lora_rank": 512}, "vllm", [0], "derives matrices from kv_b_proj"),
        ({"kv_lora_rank": 512}, "vllm", [], "derives matrices from kv_b_proj"),
        ({"kv_lora_rank": 512}, "torch", [0], ""),
        ({"num_experts": 8}, "vllm", [], "packs the 8 experts"),
        ({"num_experts": 8}, "vllm", [0], ""),
        ({"num_experts": 8}, "torch", [], ""),
    ],
)
def test_weights_that_vllm_computes_from_in_another_form(
    more: dict[str, int], engine: str, devices: list[int], words: str
) -> None:
    config = {"model_type": "any", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    facts = model_facts(config | more)
    assert facts is not None
    rollout = spec({"engine": {"kind": engine}, "devices": devices}, None).rollout
    found = [problem.message for problem in rollout.engine.model_problems("rollout", rollout, facts)]
    assert len(found) == bool(words)
    assert all(words in message for message in found)

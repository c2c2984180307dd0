"""Rules of rollout engines that come from other projects: attention, and how a replica is cut."""

from __future__ import annotations

from typing import Any

from small_spec import raw_spec

from specs.load.load import spec_from
from specs.schema.rank_groups import built_mesh
from specs.schema.recipes import RlSpec

GPUS = {"kind": "vllm", "tensor_parallel": 2}


def raw(rollout: dict[str, Any]) -> dict[str, Any]:
    return raw_spec(rollout={"engine": {"kind": "vllm"}, **rollout})


def spec(rollout: dict[str, Any], *overrides: str) -> RlSpec:
    return spec_from(raw(rollout), list(overrides))


def test_the_attention_of_the_model_is_that_of_the_other_roles() -> None:
    checked = spec({}, "model.attn_implementation=eager")
    assert (checked.attention("actor"), checked.attention("rollout")) == ("eager", "auto")


def test_vllm_cuts_a_model_on_the_cpu_too() -> None:
    assert built_mesh(spec({"engine": GPUS, "processes": 2}).rollout) == {"tensor": 2}

"""Rules of rollout engines that come from other projects: attention, GPUs of a replica, launchers."""

from __future__ import annotations

from typing import Any

import pytest
from small_spec import only_problem, raw_spec

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


@pytest.mark.parametrize(
    ("devices", "hint"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], "set rollout.processes = 4, or change the list"),
        ([0, 1, 2], "name 4 GPUs, or change rollout.engine.tensor_parallel"),
    ],
)
def test_gpus_that_do_not_share_out(devices: list[int], hint: str) -> None:
    found = only_problem(raw({"engine": GPUS, "processes": 2, "devices": devices}))
    assert found.key == "rollout.devices"
    assert found.message == f"{len(devices)} GPUs for 2 processes; each process has 2 (tensor_parallel)"
    assert found.hint == hint


def test_vllm_cuts_a_model_on_the_cpu_too() -> None:
    assert built_mesh(spec({"engine": GPUS, "processes": 2}).rollout) == {"tensor": 2}

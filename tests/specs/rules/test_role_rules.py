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


def test_vllm_chooses_its_own_attention() -> None:
    found = only_problem(raw({"attn_implementation": "sdpa"}))
    assert (found.key, found.value) == ("rollout.attn_implementation", '"sdpa"')
    assert "vllm chooses its attention itself" in found.message


def test_the_attention_of_the_model_is_that_of_the_other_roles() -> None:
    checked = spec({}, "model.attn_implementation=eager")
    assert (checked.attention("actor"), checked.attention("rollout")) == ("eager", "auto")


@pytest.mark.parametrize("processes", [1, 4])
def test_a_replica_that_is_cut_has_several_gpus(processes: int) -> None:
    fine = spec({"engine": GPUS, "processes": processes, "devices": list(range(2 * processes))})
    assert len(fine.rollout.devices) == 2 * processes


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


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_replicas_need_no_launcher(launcher: str) -> None:
    assert only_problem(raw({"launcher": launcher})).key == "rollout.launcher"


@pytest.mark.parametrize(
    ("more", "why"),
    [({}, "runs on the CPU"), ({"devices": [0]}, "kv_cache_GiB says how large")],
)
def test_a_share_of_gpu_memory_needs_a_gpu_to_share(more: dict[str, Any], why: str) -> None:
    engine = {"kind": "vllm", "gpu_memory_utilization": 0.5, **({"kv_cache_GiB": 2.0} if more else {})}
    found = only_problem(raw({"engine": engine, **more}))
    assert found.key == "rollout.engine.gpu_memory_utilization"
    assert why in found.message
    assert spec({"engine": {"kind": "vllm", "gpu_memory_utilization": 0.5}, "devices": [0]})

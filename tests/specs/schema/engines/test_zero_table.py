"""DeepSpeed's configuration follows from the spec, and stages and offloads that cannot be are refused."""

from __future__ import annotations

from typing import Any

import pytest
from small_spec import problems_of, raw_spec

from specs.errors import Problem
from specs.schema.engines.zero_table import ZeroTable
from specs.schema.role_section import DType, Optimizer


def problems(engine: dict[str, Any], actor: dict[str, Any] | None = None, **changes: Any) -> list[Problem]:
    of_actor = {"launcher": "torchrun", "processes": 2, "engine": {"kind": "zero", **engine}, **(actor or {})}
    return problems_of(raw_spec(actor=of_actor, **changes))


def config(
    engine: dict[str, Any], dtype: DType = "fp32", device: str = "cpu", optimizer: Optimizer | None = None
) -> dict[str, Any]:
    return {**ZeroTable(**engine).library_config(dtype, optimizer, device)["deepspeed"]}


def test_the_spec_decides_stage_precision_clipping_and_offload() -> None:
    engine = {"stage": 3, "offload_optimizer": True, "offload_parameters": True}
    made = config(engine, "bf16", "cuda", Optimizer(max_grad_norm=0.5))
    zero = made["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert made["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert made["gradient_clipping"] == 0.5
    assert (made["train_micro_batch_size_per_gpu"], made["managed_gradient_accumulation"]) == (1, False)
    assert made["data_types"]["grad_accum_dtype"] == made["communication_data_type"] == "fp32"
    assert config({}, optimizer=Optimizer(max_grad_norm=0.0))["gradient_clipping"] == 1e38, "the norm is measured"
    frozen = config({"stage": 2, "offload_optimizer": True})
    assert not {"bf16", "gradient_clipping"} & frozen.keys(), "the role does not learn"
    assert not {"offload_optimizer", "offload_param"} & frozen["zero_optimization"].keys()


def test_own_keys_merge_at_every_depth_and_are_handed_on_as_they_are() -> None:
    own = {"steps_per_print": 10, "zero_optimization": {"reduce_scatter": False, "stage": 3}, "a_later_key": "x"}
    made = config({"deepspeed": own}, optimizer=Optimizer())
    assert (made["steps_per_print"], made["a_later_key"]) == (10, "x")
    assert made["zero_optimization"]["reduce_scatter"] is False
    assert made["zero_optimization"]["reduce_bucket_size"] == 50_000_000, "what is derived stays"


@pytest.mark.parametrize(
    ("engine", "actor", "key"),
    [
        ({"kind": "zero3", "stage": 1}, {}, "actor.engine.stage"),
        ({"stage": 2, "offload_parameters": True}, {"devices": [0, 1]}, "actor.engine.offload_parameters"),
        ({"offload_optimizer": True}, {}, "actor.engine.offload_optimizer"),
        ({"stage": 1}, {"dtype": "bf16"}, "actor.engine.stage"),
        ({"stage": 2, "offload_optimizer": True}, {"devices": [0, 1], "dtype": "bf16"}, ""),
    ],
)
def test_stage_and_offload_rules(engine: dict[str, Any], actor: dict[str, Any], key: str) -> None:
    assert [problem.key for problem in problems(engine, actor)] == ([key] if key else [])


def test_a_reference_has_nothing_to_shard_below_stage_3() -> None:
    changes = {"algorithm": {"kl_coef": 0.1}}
    ref = {"launcher": "torchrun", "processes": 2, "engine": {"kind": "zero", "stage": 2}}
    assert [problem.key for problem in problems({}, ref=ref, **changes)] == ["ref.engine.stage"]
    ref["engine"] = {"kind": "zero3", "offload_optimizer": False, "deepspeed": {"gradient_clipping": 1.0}}
    found = {problem.key: problem.message for problem in problems({}, ref=ref, **changes)}
    assert found.keys() == {"ref.engine.offload_optimizer", "ref.engine.deepspeed.gradient_clipping"}
    assert all("does not learn" in message for message in found.values())

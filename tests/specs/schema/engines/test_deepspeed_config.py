"""DeepSpeed's configuration follows from the spec, and extra keys add to it without contradicting it."""

from __future__ import annotations

import pytest
from small_spec import problems_of, raw_spec

from specs.errors import Problem
from specs.schema.engines.deepspeed_config import deepspeed_config, deepspeed_problems
from specs.schema.engines.zero_table import ZeroTable
from specs.schema.role_section import DType, Optimizer


def problems(engine: dict[str, object], **changes: object) -> list[Problem]:
    actor = {"launcher": "torchrun", "processes": 2, "engine": {"kind": "zero", **engine}}
    actor |= changes.pop("actor", {})  # type: ignore[arg-type, operator]
    return problems_of(raw_spec(actor=actor, **changes))


def config(engine: dict[str, object], dtype: DType = "fp32", device: str = "cpu", **optimizer: object) -> dict:
    return deepspeed_config(ZeroTable(**engine), dtype, Optimizer(**optimizer), device=device)


def test_the_spec_decides_stage_precision_clipping_and_offload() -> None:
    made = config(
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True}, "bf16", "cuda", max_grad_norm=0.5
    )
    zero = made["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert made["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert made["gradient_clipping"] == 0.5
    assert (made["train_micro_batch_size_per_gpu"], made["managed_gradient_accumulation"]) == (1, False)
    assert made["data_types"]["grad_accum_dtype"] == made["communication_data_type"] == "fp32"


def test_what_is_off_is_not_there() -> None:
    made = config({"stage": 2})
    assert "bf16" not in made
    assert not {"offload_optimizer", "offload_param", "stage3_param_persistence_threshold"} & {
        *made["zero_optimization"]
    }


def test_without_clipping_the_norm_is_still_measured() -> None:
    """DeepSpeed measures it at every stage only when it clips."""
    assert config({}, max_grad_norm=0.0)["gradient_clipping"] == 1e38


def test_a_role_that_does_not_learn_has_no_optimizer_keys() -> None:
    made = deepspeed_config(ZeroTable(offload_optimizer=True), "fp32", None)
    assert "gradient_clipping" not in made
    assert "offload_optimizer" not in made["zero_optimization"]


def test_extra_keys_merge_at_every_depth() -> None:
    extra = {"steps_per_print": 10, "zero_optimization": {"stage3_param_persistence_threshold": 0, "stage": 3}}
    made = config({"deepspeed": extra})
    assert made["steps_per_print"] == 10
    assert made["zero_optimization"]["stage3_param_persistence_threshold"] == 0
    assert made["zero_optimization"]["reduce_bucket_size"] == 50_000_000, "what is derived stays"


CONTRADICTIONS = [
    ({"gradient_clipping": 2.0}, "gradient_clipping", "2.0", "actor.optimizer.max_grad_norm", "1.0"),
    ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage", "2", "actor.engine.stage", "3"),
    ({"bf16": {"enabled": True}}, "bf16.enabled", "true", "actor.dtype", ""),
    ({"fp16": {"enabled": True}}, "fp16.enabled", "true", "actor.dtype", ""),
    ({"optimizer": {"type": "Lamb"}}, "optimizer.type", '"Lamb"', "actor.optimizer", ""),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler.type", '"WarmupLR"', "actor.optimizer.schedule", ""),
    (
        {"gradient_accumulation_steps": 4},
        "gradient_accumulation_steps",
        "4",
        "actor.micro_batch_tokens",
        "gradient_accumulation_steps = 1",
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
        "zero_optimization.offload_optimizer.device",
        '"nvme"',
        "actor.engine.offload_optimizer",
        "",
    ),
]


@pytest.mark.parametrize(("extra", "key", "value", "decider", "decided"), CONTRADICTIONS)
def test_a_contradiction_names_both_keys_and_both_values(
    extra: dict[str, object], key: str, value: str, decider: str, decided: str
) -> None:
    (problem,) = problems({"deepspeed": extra})
    assert (problem.key, problem.value) == (f"actor.engine.deepspeed.{key}", value)
    assert decider in problem.message
    assert decided in problem.message
    assert decider in problem.hint


def test_unknown_keys_are_refused_with_the_nearest() -> None:
    (problem,) = problems({"deepspeed": {"steps_per_prnt": 3}})
    assert problem.key == "actor.engine.deepspeed.steps_per_prnt"
    assert "steps_per_print" in problem.hint


@pytest.mark.parametrize("name", ["zero_hpz_partition_size", "zero_quantized_weights", "zenflow"])
def test_layouts_that_cannot_be_saved_are_refused(name: str) -> None:
    (problem,) = problems({"deepspeed": {"zero_optimization": {name: 2}}})
    assert problem.key.endswith(f"zero_optimization.{name}")
    assert "not supported" in problem.message


def test_a_value_where_a_table_belongs() -> None:
    (problem,) = problems({"deepspeed": {"zero_optimization": 3}})
    assert "table" in problem.message


RULES = [
    ({"kind": "zero3", "stage": 1}, {}, "actor.engine.stage"),
    ({"stage": 2, "offload_parameters": True}, {"devices": [0, 1]}, "actor.engine.offload_parameters"),
    ({"offload_optimizer": True}, {}, "actor.engine.offload_optimizer"),
    ({"stage": 1}, {"dtype": "bf16"}, "actor.engine.stage"),
]


@pytest.mark.parametrize(("engine", "actor", "key"), RULES)
def test_stage_and_offload_rules(engine: dict[str, object], actor: dict[str, object], key: str) -> None:
    assert [problem.key for problem in problems(engine, actor=actor)] == [key]


def test_what_fits_is_fine() -> None:
    assert problems({"kind": "zero3"}) == []
    assert problems({"stage": 1}) == []
    assert problems({"stage": 2, "offload_optimizer": True}, actor={"devices": [0, 1], "dtype": "bf16"}) == []


def test_a_reference_has_nothing_to_cut_below_stage_3() -> None:
    changes = {"algorithm": {"kl_coef": 0.1}}
    ref = {"launcher": "torchrun", "processes": 2, "engine": {"kind": "zero", "stage": 2}}
    assert [problem.key for problem in problems({}, ref=ref, **changes)] == ["ref.engine.stage"]
    ref["engine"] = {"kind": "zero3", "offload_optimizer": False, "deepspeed": {"gradient_clipping": 1.0}}
    found = problems({}, ref=ref, **changes)
    assert [problem.key for problem in found] == [
        "ref.engine.offload_optimizer",
        "ref.engine.deepspeed.gradient_clipping",
    ]
    assert all("does not learn" in problem.message for problem in found)


def test_a_reference_shaped_like_the_actor_takes_its_extra_keys() -> None:
    engine = ZeroTable(deepspeed={"gradient_clipping": 1.0})
    assert list(deepspeed_problems(engine, "fp32", Optimizer(), role="actor")) == []
    assert deepspeed_config(engine, "fp32", None)["zero_optimization"]["stage"] == 3

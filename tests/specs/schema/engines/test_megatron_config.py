"""Megatron-core's configuration follows from the spec, and extra options add to it without contradicting it."""

from __future__ import annotations

from typing import Any

import pytest
from small_spec import problems_of, raw_spec

from specs.errors import Problem
from specs.schema.engines import megatron_config as module
from specs.schema.engines.library_keys import Flag
from specs.schema.engines.megatron_config import OPTIONS, PASSED, megatron_config
from specs.schema.engines.megatron_options import DDP, OPTIMIZER, TRANSFORMER
from specs.schema.engines.megatron_table import MegatronTable
from specs.schema.role_section import Optimizer


def problems(options: dict[str, Any], **changes: Any) -> list[Problem]:
    engine = {"kind": "megatron", "tensor_parallel": 2, "megatron": options}
    actor = {"launcher": "torchrun", "processes": 2, "engine": engine}
    return problems_of(raw_spec(actor=actor, **changes))


def test_the_spec_decides_axes_precision_and_adam() -> None:
    engine, adam = MegatronTable(tensor_parallel=2, pipeline_parallel=4), Optimizer(lr=3e-5, betas=(0.8, 0.9))
    told = megatron_config(engine, "bf16", adam)
    assert (told["tensor_model_parallel_size"], told["pipeline_model_parallel_size"], told["bf16"]) == (2, 4, True)
    assert (told["lr"], told["adam_beta1"], told["adam_beta2"]) == (3e-5, 0.8, 0.9)
    assert "lr" not in megatron_config(engine, "bf16", None)


def test_what_is_added_is_told() -> None:
    told = megatron_config(MegatronTable(megatron={"bias_activation_fusion": True}), "fp32", None)
    assert told["bias_activation_fusion"] is True


@pytest.mark.parametrize(
    ("option", "value", "decider"),
    [
        ("tensor_model_parallel_size", 4, "actor.engine.tensor_parallel"),
        ("pipeline_model_parallel_size", 2, "actor.engine.pipeline_parallel"),
        ("params_dtype", "bf16", "actor.dtype"),
        ("bf16", True, "actor.dtype"),
        ("lr", 1.0, "actor.optimizer.lr"),
        ("adam_beta1", 0.5, "actor.optimizer.betas"),
        ("clip_grad", 0.5, "actor.optimizer.max_grad_norm"),
        ("recompute_granularity", "full", "actor.gradient_checkpointing"),
    ],
)
def test_a_contradiction_names_the_key_that_says_it(option: str, value: Any, decider: str) -> None:
    (problem,) = problems({option: value})
    assert problem.key == f"actor.engine.megatron.{option}"
    assert f"contradicts {decider}" in problem.message
    assert decider in problem.hint


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deallocate_pipeline_output": True}, "did you mean deallocate_pipeline_outputs"),
        ({"hidden_size": 64}, "config.json of the model says it"),
        ({"hidden_dropout": 0.1}, "log-probs would not be those"),
        ({"fp8": "hybrid"}, "fp32 and bf16"),
        ({"overlap_param_gather": True}, "a step old"),
        ({"use_distributed_optimizer": False}, "rlctl needs use_distributed_optimizer = true"),
        ({"init_method_std": 0.1}, "does not pass it on yet"),
        ({"bias_activation_fusion": 1}, "must be true or false"),
        ({"overlap_grad_reduce": True, "bucket_size": 0}, "must be a whole number at least 1"),
        ({"bucket_size": 1_000_000}, "has no effect without overlap_grad_reduce"),
    ],
)
def test_what_does_not_go_is_named_with_the_reason(options: dict[str, Any], words: str) -> None:
    (problem,) = problems(options)
    assert words in str(problem)
    assert problem.hint


def test_a_role_that_does_not_learn_sums_no_gradients() -> None:
    ref = {"launcher": "torchrun", "processes": 2}
    ref["engine"] = {"kind": "megatron", "megatron": {"overlap_grad_reduce": True, "bias_dropout_fusion": True}}
    (problem,) = problems({"overlap_grad_reduce": True}, ref=ref, algorithm={"kl_coef": 0.1})
    assert (problem.key, "does not learn" in problem.message) == ("ref.engine.megatron.overlap_grad_reduce", True)


def test_what_is_said_again_is_fine() -> None:
    assert problems({"tensor_model_parallel_size": 2, "use_distributed_optimizer": True, "batch_p2p_comm": False}) == []


def test_options_are_named_by_what_megatron_has() -> None:
    """Every name that is passed on, decided, needed or refused with a reason is an option, or the start of one."""
    assert PASSED.keys() | module._DECIDED_BY.keys() | module._NEEDS.keys() <= OPTIONS.keys()
    assert [start for start in module._WHY if not any(name.startswith(start) for name in OPTIONS)] == []
    assert not PASSED.keys() & module._DECIDED_BY.keys()
    assert TRANSFORMER["bf16"] == OPTIMIZER["bf16"] == DDP["overlap_grad_reduce"] == Flag()

"""Megatron-core's options follow from the spec, and the spec's own add to them without contradicting them."""

from __future__ import annotations

from typing import Any

import pytest
from small_spec import problems_of, raw_spec

from specs.errors import Problem
from specs.schema.engines.megatron_table import MegatronTable
from specs.schema.role_section import Optimizer


def problems(options: dict[str, Any]) -> list[Problem]:
    engine = {"kind": "megatron", "tensor_parallel": 2, "megatron": options}
    return problems_of(raw_spec(actor={"launcher": "torchrun", "processes": 2, "engine": engine}))


def test_the_spec_decides_axes_precision_and_adam() -> None:
    engine = MegatronTable(tensor_parallel=2, pipeline_parallel=4, megatron={"bias_activation_fusion": True})
    options = engine.library_config("bf16", Optimizer(lr=3e-5, betas=(0.8, 0.9)), "cuda")["megatron"]
    axes = (options["tensor_model_parallel_size"], options["pipeline_model_parallel_size"])
    assert (axes, options["bf16"], options["bias_activation_fusion"]) == ((2, 4), True, True)
    assert (options["lr"], options["adam_beta1"], options["adam_beta2"]) == (3e-5, 0.8, 0.9)
    assert "lr" not in engine.library_config("bf16", None, "cuda")["megatron"]


@pytest.mark.parametrize(
    ("option", "value", "decider"),
    [
        ("tensor_model_parallel_size", 4, "actor.engine.tensor_parallel"),
        ("params_dtype", "bf16", "actor.dtype"),
        ("bf16", True, "actor.dtype"),
        ("adam_beta1", 0.5, "actor.optimizer.betas"),
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
        ({"num_layers_in_last_pipeline_stage": 3}, "config.json of the model says it"),
        ({"fp8": "hybrid"}, "fp32 and bf16"),
        ({"overlap_param_gather": True}, "a step old"),
        ({"use_distributed_optimizer": False}, "rlctl sets use_distributed_optimizer = true"),
        ({"transformer_impl": "inference_optimized"}, '"local" or "transformer_engine"'),
    ],
)
def test_what_rlctl_cannot_train_with_is_refused(options: dict[str, Any], words: str) -> None:
    (problem,) = problems(options)
    assert words in problem.message
    assert problem.hint


def test_what_is_said_again_or_not_known_here_is_handed_on() -> None:
    assert problems({"tensor_model_parallel_size": 2, "use_distributed_optimizer": True, "a_later_option": 1}) == []

"""Keys of a library's own configuration add to what the spec decides, without contradicting it."""

from __future__ import annotations

from typing import Any

import pytest
from small_spec import problems_of, raw_spec

from specs.errors import Problem

ENGINES: dict[str, dict[str, Any]] = {
    "deepspeed": {"kind": "zero"},
    "megatron": {"kind": "megatron", "tensor_parallel": 2},
}


def problems(library: str, own: dict[str, Any]) -> list[Problem]:
    engine = {**ENGINES[library], library: own}
    return problems_of(raw_spec(actor={"launcher": "torchrun", "processes": 2, "engine": engine}))


@pytest.mark.parametrize(
    ("library", "own", "path", "value", "decider"),
    [
        ("deepspeed", {"fp16": {"enabled": True}}, "fp16.enabled", "true", "dtype"),
        ("deepspeed", {"optimizer": {"type": "Lamb"}}, "optimizer.type", '"Lamb"', "optimizer"),
        ("deepspeed", {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps", "4", "micro_batch_tokens"),
        ("megatron", {"params_dtype": "bf16"}, "params_dtype", '"bf16"', "dtype"),
        ("megatron", {"adam_beta1": 0.5}, "adam_beta1", "0.5", "optimizer.betas"),
        ("megatron", {"recompute_granularity": "full"}, "recompute_granularity", '"full"', "gradient_checkpointing"),
    ],
)
def test_a_contradiction_names_both_keys(
    library: str, own: dict[str, Any], path: str, value: str, decider: str
) -> None:
    (problem,) = problems(library, own)
    assert (problem.key, problem.value) == (f"actor.engine.{library}.{path}", value)
    assert f"contradicts actor.{decider}" in problem.message
    assert f"actor.{decider}" in problem.hint


@pytest.mark.parametrize(
    ("library", "own", "words"),
    [
        ("deepspeed", {"zero_optimization": 3}, "is a table"),
        ("deepspeed", {"zero_allow_untested_optimizer": False}, "rlctl sets zero_allow_untested_optimizer = true"),
        ("megatron", {"num_layers_in_last_pipeline_stage": 3}, "config.json of the model says it"),
        ("megatron", {"use_distributed_optimizer": False}, "rlctl sets use_distributed_optimizer = true"),
        ("megatron", {"transformer_impl": "inference_optimized"}, '"local" or "transformer_engine"'),
    ],
)
def test_what_rlctl_cannot_train_with_is_refused(library: str, own: dict[str, Any], words: str) -> None:
    (problem,) = problems(library, own)
    assert words in problem.message
    assert problem.hint


@pytest.mark.parametrize(
    ("library", "own"),
    [
        ("deepspeed", {"steps_per_print": 10, "zero_optimization": {"stage": 3}, "a_later_key": "x"}),
        ("megatron", {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True, "a_later_option": 1}),
    ],
)
def test_what_agrees_or_is_not_known_here_is_handed_on(library: str, own: dict[str, Any]) -> None:
    assert problems(library, own) == []

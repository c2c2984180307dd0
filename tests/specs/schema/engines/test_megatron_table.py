"""What the engine `megatron` says of a model by its config alone, and what it plans."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from families import FAMILIES
from small_spec import raw_spec

from specs.errors import Problem
from specs.model_facts import model_facts
from specs.rules.role_rules import engine_context
from specs.schema.engines.megatron_table import MegatronTable
from specs.schema.recipes import RlSpec
from specs.schema.role_section import DType, Lora, Optimizer
from specs.schema.spec import ActorSection

MODEL = {**FAMILIES["qwen2"].config, "num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 6}
MOE = FAMILIES["qwen3_moe"].config


def said(section: ActorSection) -> list[Problem]:
    """Return what the engine says of an actor."""
    return [*section.engine.problems(engine_context(RlSpec.model_validate(raw_spec()), "actor", section))]


@pytest.mark.parametrize(
    ("config", "axes", "key", "words", "hint"),
    [
        (MOE, {"expert_parallel": 3}, "expert_parallel", "divide the model's 4 experts", "use 1, 2 or 4"),
        (MOE, {"expert_tensor_parallel": 5}, "expert_tensor_parallel", "the 24 rows of an expert", "use 1, 2, 3, 4"),
        (MOE, {"tensor_parallel": 2}, "tensor_sequence_parallel", "split across them", "true"),
        ({**MODEL, "use_sliding_window": True, "sliding_window": 8}, {}, "kind", "window, and the model's is of 8", ""),
        (
            MODEL,
            {"tensor_parallel": 2, "context_parallel": 4},
            "context_parallel",
            "6 attention heads and 3 key and value heads of a tensor rank",
            "use 1, 3 or 6",
        ),
        (
            MODEL,
            {"pipeline_parallel": 2, "virtual_pipeline": 2},
            "virtual_pipeline",
            "divide the 3 layers of a stage",
            "use 1 or 3",
        ),
        (MODEL, {"pipeline_parallel": 4}, "pipeline_parallel", "divide the model's 6 layers", "use 1, 2, 3 or 6"),
    ],
)
def test_what_does_not_fit_is_named_with_what_would(
    config: dict[str, Any], axes: dict[str, int], key: str, words: str, hint: str
) -> None:
    engine, facts = MegatronTable(**axes), model_facts(config)
    assert facts is not None
    (found,) = engine.model_problems("critic", ActorSection(engine=engine), facts)
    assert (found.key, found.value.strip('"')) == (f"critic.engine.{key}", str(getattr(engine, key)).lower())
    assert words in found.message
    assert hint in found.hint


def test_a_group_holds_the_model_and_the_rest_are_replicas() -> None:
    engine = MegatronTable(tensor_parallel=2, pipeline_parallel=2)
    mesh = engine.mesh(8)
    assert (mesh.replicate, mesh.shard) == (2, 4)
    assert engine.mesh(8).axes == {"data": 2, "pipeline": 2, "tensor": 2}
    cut = MegatronTable(tensor_parallel=2, context_parallel=2)
    assert (cut.mesh(8).replicate, cut.mesh(8).shard) == (2, 4)
    assert cut.mesh(8).axes == {"data": 2, "pipeline": 1, "tensor": 2, "context": 2}


def test_what_other_engines_do_is_refused() -> None:
    section = ActorSection(engine=MegatronTable(), devices=(0,), activation_offload=True, lora=Lora())
    found = {problem.key: problem for problem in said(section)}
    assert found.keys() == {"actor.activation_offload", "actor.lora"}
    assert "keeps activations on the device" in found["actor.activation_offload"].message
    (instead,) = re.findall(r"set (actor.engine = \{.*\}): it trains adapters", found["actor.lora"].hint)
    engine_instead = tomllib.loads(instead)["actor"]["engine"]
    assert said(ActorSection.model_validate({"engine": engine_instead, "lora": {}})) == []


def test_transformer_engines_layers_are_refused_where_they_cannot_be() -> None:
    """They compute neither on the CPU nor in fp32; their dtype is the role's."""
    engine = MegatronTable(megatron={"transformer_impl": "transformer_engine"})
    key = "actor.engine.megatron.transformer_impl"

    def words(dtype: DType, devices: tuple[int, ...]) -> list[str]:
        section = ActorSection(dtype=dtype, engine=engine, devices=devices)
        return [f"{problem.key}: {problem.message}" for problem in said(section)]

    (cpu,), (fp32,) = words("bf16", ()), words("fp32", (0,))
    assert cpu.startswith(f"{key}: TransformerEngine computes on GPUs alone")
    assert fp32.startswith(f"{key}: TransformerEngine multiplies fp32 in TF32")
    assert words("bf16", (0,)) == []


def test_whose_layers_is_told_where_it_is_decided() -> None:
    """Whoever builds them in bf16 on a GPU sees what is there."""
    cases = {("fp32", "cuda"): "local", ("bf16", "cpu"): "local", ("bf16", "cuda"): None}
    for (dtype, device), expected in cases.items():
        told = MegatronTable().library_config(dtype, None, device)["megatron"]  # type: ignore[arg-type]
        assert told.get("transformer_impl") == expected
    asked = MegatronTable(megatron={"transformer_impl": "local"})
    assert asked.library_config("bf16", None, "cuda")["megatron"]["transformer_impl"] == "local"


def test_the_spec_decides_axes_precision_and_adam() -> None:
    engine = MegatronTable(tensor_parallel=2, pipeline_parallel=4, megatron={"bias_activation_fusion": True})
    options = engine.library_config("bf16", Optimizer(lr=3e-5, betas=(0.8, 0.9)), "cuda")["megatron"]
    axes = (options["tensor_model_parallel_size"], options["pipeline_model_parallel_size"])
    assert (axes, options["bf16"], options["bias_activation_fusion"]) == ((2, 4), True, True)
    assert (options["lr"], options["adam_beta1"], options["adam_beta2"]) == (3e-5, 0.8, 0.9)
    assert "lr" not in engine.library_config("bf16", None, "cuda")["megatron"]

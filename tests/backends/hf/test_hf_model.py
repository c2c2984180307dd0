"""Building models: the same everywhere, as asked or refused."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import COMPOSITES, FAMILIES, LONGCAT
from safetensors.torch import load_file, save_file
from train_helpers import GPT2, QWEN2, build_engine, model_config, train_config, write_model
from transformers import CONFIG_MAPPING, Mistral3Config, Mistral3ForConditionalGeneration, PreTrainedModel

from backends.hf.attention_choice import choose, refuse_a_swap
from backends.hf.hf_model import build_model, build_without_memory, describe, named_weights
from backends.hf.language_model import language_model_config
from backends.hf.model_shape import model_shape
from backends.hf.recompute import decoder_layers, recompute_activations, recomputed_layers
from specs.errors import ModelError
from specs.model_facts import model_facts


def test_loading_gives_the_saved_weights_and_description(tmp_path: Path) -> None:
    model = build_model(model_config(write_model(tmp_path / "a", QWEN2)), load_weights=True)
    model.save_pretrained(tmp_path / "b")
    config = model_config(tmp_path / "b", from_scratch=False)
    loaded = build_model(config, load_weights=True)
    built = describe(loaded, config, checksum=True)
    assert built.weights_checksum == describe(model, config, checksum=True).weights_checksum
    assert built.path == str(tmp_path / "b")
    assert built.model_class == "Qwen2ForCausalLM"
    assert built.tied_embeddings
    assert "lm_head.weight" not in named_weights(loaded)
    assert built.parameters == sum(tensor.numel() for tensor in named_weights(loaded).values())
    assert (built.attn_implementation, built.attn_function) == (
        "sdpa",
        "backends.packed.packed_attention.sdpa_by_layout",
    )


def test_what_a_class_never_trains_is_a_buffer_however_it_is_built(tmp_path: Path) -> None:
    """Ernie's routers choose experts by a bias, which transformers reads from files as a parameter that learns: weight
    decay would shrink it, and where it is not read, not all parameters would learn."""
    moe = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 0, "pad_token_id": 0}
    config = model_config(write_model(tmp_path / "a", {**QWEN2, "model_type": "ernie4_5_moe", **moe}))
    drawn = build_model(config, load_weights=True)
    bias = "model.layers.0.mlp.gate.moe_statics.e_score_correction_bias"
    drawn.get_buffer(bias).fill_(0.5)
    drawn.save_pretrained(tmp_path / "b")
    config = model_config(tmp_path / "b", from_scratch=False)
    read = build_model(config, load_weights=True)
    assert read.get_buffer(bias).eq(0.5).all()
    names = [name for name, _ in read.named_parameters()]
    for model in (drawn, build_model(config, load_weights=False), build_without_memory(config)):
        assert [name for name, _ in model.named_parameters()] == names
        assert all(parameter.requires_grad for parameter in model.parameters())
    assert not build_without_memory(config).get_buffer(bias).is_meta
    assert model_shape(config).about.parameters == sum(parameter.numel() for parameter in read.parameters())
    assert [*model_shape(config).weights] == [*named_weights(read)]


@pytest.mark.parametrize("family", ["apertus", "afmoe"])
def test_what_does_not_learn_is_read_in_the_precision_that_samplers_hold(tmp_path: Path, family: str) -> None:
    """Else a sync from a model that was read in bf16 is refused, and a router's biases choose other experts."""
    drawn = build_model(model_config(write_model(tmp_path / "a", {**QWEN2, "model_type": family})), load_weights=True)
    drawn.save_pretrained(tmp_path / "b")
    config = model_config(tmp_path / "b", from_scratch=False, dtype="bf16")
    read, held = (named_weights(build_model(config, load_weights=each)) for each in (True, False))
    assert {name: weight.dtype for name, weight in read.items()} == {name: held[name].dtype for name in held}


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    build_model(model_config(write_model(tmp_path, QWEN2)), load_weights=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj"):
        build_model(model_config(tmp_path, from_scratch=False), load_weights=True)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_tied_weights_that_differ_on_disk_are_refused(tmp_path: Path, engine: str) -> None:
    """transformers unties them, and the run's export would fit no model."""
    build_model(model_config(write_model(tmp_path, QWEN2)), load_weights=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"embed_tokens\.weight and lm_head\.weight are tied .* but differ on disk"):
        build_engine(train_config(tmp_path, engine, model={"from_scratch": False}))


@pytest.mark.parametrize("build", [build_without_memory, model_shape])
def test_a_model_with_code_of_its_own_names_the_key_that_lets_it_run(tmp_path: Path, build: Any) -> None:
    own = {**QWEN2, "model_type": "of_its_own", "auto_map": {"AutoConfig": "configuration.OwnConfig"}}
    with pytest.raises(ModelError, match="contains custom code") as error:
        build(model_config(write_model(tmp_path, own)))
    assert "model.trust_remote_code = true" in error.value.hint


def test_sequences_longer_than_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="at most 128 tokens, but a sequence may have 129"):
        build_model(model_config(write_model(tmp_path, QWEN2), max_sequence_tokens=129), load_weights=True)


def test_yarn_stretches_what_every_engine_takes(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    folder = write_model(tmp_path, {**QWEN2, "max_position_embeddings": 64, "rope_scaling": yarn})
    builds: list[Any] = [build_without_memory, model_shape]
    for build in builds:
        build(model_config(folder, max_sequence_tokens=256))
        with pytest.raises(ModelError, match="at most 256 tokens"):
            build(model_config(folder, max_sequence_tokens=257))


def test_sequences_that_two_sets_of_rotary_frequencies_share_are_refused(tmp_path: Path) -> None:
    """LongRoPE: transformers gives a short sequence other logits as soon as a long one is in the same call."""
    folder = write_model(tmp_path, FAMILIES["phi3"].config)
    model = build_model(model_config(folder, max_sequence_tokens=100, attn_implementation="eager"), load_weights=True)
    tokens, one = torch.arange(106)[None] % 23, torch.arange(5)[None]
    both = torch.cat([one, torch.arange(101)[None]], 1)
    alone, fits, beside = (
        model(input_ids=tokens[:, :n], position_ids=at[:, :n], use_cache=False).logits[0, :5]
        for n, at in ((5, one), (105, both), (106, both))
    )
    torch.testing.assert_close(fits, alone)
    assert (beside - alone).abs().max() > 0.1
    with pytest.raises(ModelError, match="otherwise beyond 100 tokens"):
        build_model(model_config(folder, max_sequence_tokens=101), load_weights=True)


def test_dropout_is_off(tmp_path: Path) -> None:
    config = {**GPT2, "attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
    model = build_model(model_config(write_model(tmp_path, config)), load_weights=True).train()
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens).logits, model(tokens).logits)


NOISY = {**FAMILIES["mixtral"].config, "router_jitter_noise": 0.1}
DROPS_LAYERS = {"model_type": "opt", "vocab_size": 23, "hidden_size": 32, "num_hidden_layers": 2, "layerdrop": 0.9}
DROPS_LAYERS |= {"ffn_dim": 48, "num_attention_heads": 4, "max_position_embeddings": 128, "word_embed_proj_dim": 32}


@pytest.mark.parametrize(("config", "layers"), [(NOISY, 1), (NOISY, True), (DROPS_LAYERS, True), (LONGCAT, True)])
def test_nothing_is_random_where_layers_are_recomputed(
    tmp_path: Path, config: dict[str, Any], layers: bool | int
) -> None:
    """In train mode, which recomputation needs, routers draw noise and layers are left out: log-probs were random, in
    bf16 unseen by any check."""
    folder = write_model(tmp_path, config)
    model = build_model(model_config(folder), load_weights=True)
    tokens = torch.arange(8)[None]
    expected = model(tokens, use_cache=False).logits
    recompute_activations(model, layers)
    assert recomputed_layers(model) == (2 if layers is True else layers)
    facts = model_facts(config)
    assert facts is not None
    assert facts.layers == describe(model, model_config(folder), checksum=False).layers
    assert decoder_layers(model, needed="", hint="")
    for _ in range(2):
        torch.testing.assert_close(model(tokens, use_cache=False).logits, expected, rtol=0, atol=0)


def test_a_model_that_does_not_recompute_is_refused_where_it_should(tmp_path: Path) -> None:
    config = {**QWEN2, "model_type": "jetmoe", "kv_channels": 8, "num_local_experts": 2, "num_experts_per_tok": 2}
    model = build_without_memory(model_config(write_model(tmp_path, config)))
    with pytest.raises(ModelError, match="JetMoeForCausalLM does not recompute activations"):
        recompute_activations(model, True)


def test_a_swap_that_nobody_asked_for_is_refused(tmp_path: Path) -> None:
    """Transformers swaps flash_attention_2 where only the package `kernels` is there, in any layer."""
    config = model_config(write_model(tmp_path, QWEN2))
    model = build_model(config, load_weights=True)
    decision = choose(config, model.config)
    refuse_a_swap(model, decision)
    model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
    model.model.layers[1].self_attn.config._attn_implementation = "kernels-community/flash-attn2"
    with pytest.raises(ModelError, match="transformers built kernels-community/flash-attn2, sdpa"):
        refuse_a_swap(model, decision)


@pytest.mark.parametrize("how", ["from disk", "drawn", "without weights", "on meta"])
def test_every_way_of_building_refuses_a_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Where transformers decides it, and with no more than a warning."""
    build_model(model_config(write_model(tmp_path / "a", QWEN2)), load_weights=True).save_pretrained(tmp_path / "b")
    config = model_config(tmp_path / "b", from_scratch=how == "drawn")
    monkeypatch.setattr(PreTrainedModel, "_check_and_adjust_attn_implementation", lambda *args, **kwargs: "eager")
    build = partial(build_model, load_weights=how != "without weights") if how != "on meta" else build_without_memory
    with pytest.raises(ModelError, match="to be built with sdpa attention, but transformers built eager"):
        build(config)


def test_the_function_really_called_is_read_from_every_layer(tmp_path: Path) -> None:
    config = model_config(write_model(tmp_path, QWEN2))
    model = build_model(config, load_weights=True)
    model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
    model.model.layers[1].self_attn.config._attn_implementation = "eager"
    built = describe(model, config, checksum=False)
    assert built.attn_implementation == "eager,sdpa"
    eager = "transformers.models.qwen2.modeling_qwen2.eager_attention_forward"
    assert built.attn_function == f"backends.packed.packed_attention.sdpa_by_layout,{eager}"


def test_a_family_whose_language_model_has_no_class_is_refused() -> None:
    with pytest.raises(ModelError, match="no class for the language model alone"):
        language_model_config(CONFIG_MAPPING["qwen2_vl"](), "qwen2_vl")


@pytest.mark.parametrize("build", [build_without_memory, partial(build_model, load_weights=True)])
def test_a_model_of_another_kind_is_refused_as_one(tmp_path: Path, build: Any) -> None:
    """And not as a folder that is not there."""
    with pytest.raises(ModelError, match="has no causal-language-model class for vit models") as error:
        build(model_config(write_model(tmp_path, {"model_type": "vit"})))
    assert error.value.hint.startswith("give the role a model of another family")


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    """PaliGemma's language model does: its config says so where a folder does not."""
    paligemma = {"model_type": "paligemma", "text_config": FAMILIES["gemma2"].config, "vision_config": {}}
    with pytest.raises(ModelError, match="layers of kind bidirectional_attention are not supported"):
        build_without_memory(model_config(write_model(tmp_path, paligemma)))


def test_a_folder_that_says_nothing_of_ties_has_those_of_its_language_model(tmp_path: Path) -> None:
    """Mistral Small 3.1 is published so; transformers' class of the whole ties where nothing is said."""
    whole = Mistral3Config(**{**COMPOSITES["mistral3"], "tie_word_embeddings": False})
    Mistral3ForConditionalGeneration(whole).save_pretrained(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    for part in (given, given["text_config"]):
        part.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(given))
    engine = build_engine(train_config(tmp_path, "fsdp2", model={"from_scratch": False}))
    assert not engine.built().tied_embeddings

"""Building models: the same everywhere, as asked or refused."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from safetensors.torch import load_file, save_file
from train_helpers import GEMMA2, GEMMA3, GPT2, QWEN2, model_config, write_model
from transformers import PreTrainedModel

from backends.hf.attention_choice import choose, refuse_a_swap
from backends.hf.hf_model import build_model, build_without_memory, describe, named_weights, read_config
from specs.errors import ModelError


def test_from_scratch_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    write_model(tmp_path, QWEN2)
    state = torch.get_rng_state()
    first, again, other = (build_model(model_config(tmp_path, seed=s), load_weights=True) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)  # drawing weights does not disturb the process
    config = model_config(tmp_path)
    digests = [describe(model, config, checksum=True).weights_checksum for model in (first, again, other)]
    assert digests[0] == digests[1] != digests[2]


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


def test_without_weights_it_has_the_same_shapes(tmp_path: Path) -> None:
    config = model_config(write_model(tmp_path, GEMMA3), dtype="bf16")
    empty, full = (build_model(config, load_weights=load) for load in (False, True))
    shapes = [{name: (t.shape, t.dtype) for name, t in named_weights(model).items()} for model in (empty, full)]
    assert shapes[0] == shapes[1]
    assert describe(empty, config, checksum=False).tied_embeddings
    assert describe(empty, config, checksum=False).dtype == "bf16"
    for name, buffer in full.named_buffers():
        assert torch.equal(buffer, empty.get_buffer(name))


def test_rotary_frequencies_stay_fp32(tmp_path: Path) -> None:
    model = build_model(model_config(write_model(tmp_path, QWEN2), dtype="bf16"), load_weights=True)
    assert model.get_parameter("model.norm.weight").dtype == torch.bfloat16
    assert model.get_buffer("model.rotary_emb.inv_freq").dtype == torch.float32


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    build_model(model_config(write_model(tmp_path, QWEN2)), load_weights=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj"):
        build_model(model_config(tmp_path, from_scratch=False), load_weights=True)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere") as caught:
        build_model(model_config(tmp_path / "nowhere"), load_weights=True)
    assert "does not exist" in caught.value.hint


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        build_model(model_config(write_model(tmp_path, QWEN2), from_scratch=False), load_weights=True)


def test_sequences_longer_than_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="at most 128 tokens, but a sequence may have 129"):
        build_model(model_config(write_model(tmp_path, QWEN2), max_sequence_tokens=129), load_weights=True)


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


def test_eager_is_read_back(tmp_path: Path) -> None:
    config = model_config(write_model(tmp_path, QWEN2), attn_implementation="eager")
    built = describe(build_model(config, load_weights=True), config, checksum=False)
    assert built.attn_implementation == "eager"
    assert built.attn_function == "transformers.models.qwen2.modeling_qwen2.eager_attention_forward"
    assert built.weights_checksum == ""


def test_a_model_without_sdpa_says_what_to_ask_for(tmp_path: Path) -> None:
    config = model_config(write_model(tmp_path, GEMMA2))
    with pytest.raises(ModelError, match="sdpa: does not compute softcap") as caught:
        build_model(config.model_copy(update={"attn_implementation": "sdpa"}), load_weights=True)
    assert "eager" in caught.value.hint
    assert choose(config, read_config(config)).implementation == "eager"


def test_what_a_class_does_not_offer_is_refused_or_passed_over(tmp_path: Path) -> None:
    """No flex_attention for GPT-2, no sdpa for Bloom: their classes say so, no config does."""
    gpt2 = model_config(write_model(tmp_path / "gpt2", GPT2), attn_implementation="flex_attention")
    with pytest.raises(ModelError, match="flex_attention: is not offered by this model's class"):
        build_model(gpt2, load_weights=True)
    bloom = {"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 23}
    config = model_config(write_model(tmp_path / "bloom", bloom), max_sequence_tokens=16)
    assert choose(config, read_config(config)).implementation == "eager"


def test_the_precision_that_counts_is_that_of_the_forward_pass(tmp_path: Path) -> None:
    """A trainer holds weights in fp32 and computes in bf16: its attention is that of a reference in bf16."""
    path = write_model(tmp_path, QWEN2)
    held = model_config(path, device="cuda", attn_implementation="flash_attention_2", computes_in="bf16")
    for config, complaint in ((held, "needs the package flash-attn"), (model_config(path), "needs a GPU")):
        asked = config.model_copy(update={"attn_implementation": "flash_attention_2"})
        with pytest.raises(ModelError, match=complaint):
            choose(asked, read_config(asked))


def test_a_swap_that_nobody_asked_for_is_refused(tmp_path: Path) -> None:
    """As transformers does with flash_attention_2 where only the package `kernels` is there, in any layer."""
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

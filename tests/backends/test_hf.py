"""Building models: the same everywhere, as asked or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_helpers import GEMMA2, GEMMA3, GPT2, QWEN2, model_config, write_model

from backends.hf import build_model, describe, named_weights, resolve_attention
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
    assert (built.attn_implementation, built.attn_function) == ("sdpa", "backends.attention.sdpa_by_layout")


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


def test_dropout_is_off(tmp_path: Path) -> None:
    config = {**GPT2, "attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
    model = build_model(model_config(write_model(tmp_path, config)), load_weights=True).train()
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens).logits, model(tokens).logits)


def test_attention_as_asked_or_refused() -> None:
    assert resolve_attention("auto", "cpu", "fp32") == ("sdpa", "the device is cpu")
    assert resolve_attention("eager", "cpu", "fp32")[0] == "eager"
    with pytest.raises(ModelError, match="flash_attention_2 cannot be used: the device is cpu"):
        resolve_attention("flash_attention_2", "cpu", "bf16")
    with pytest.raises(ModelError, match="does not compute in fp32"):
        resolve_attention("flash_attention_2", "cuda", "fp32")


def test_eager_is_read_back(tmp_path: Path) -> None:
    config = model_config(write_model(tmp_path, QWEN2), attn_implementation="eager")
    built = describe(build_model(config, load_weights=True), config, checksum=False)
    assert built.attn_implementation == "eager"
    assert built.weights_checksum == ""


def test_a_model_without_sdpa_says_what_to_ask_for(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        build_model(model_config(write_model(tmp_path, GEMMA2)), load_weights=True)
    assert "eager" in caught.value.hint

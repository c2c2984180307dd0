"""FLOPs of a decoder are those of the operations that torch runs, and of what a token can see."""

from __future__ import annotations

import pytest
from families import FAMILIES
from train_helpers import GPT2

from specs.wire.model_flops import DecoderSize

ONE = DecoderSize(layers=1, heads=1, head_size=1, layer_weights=0, head_weights=0)


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gemma3_text"])
def test_the_count_is_that_of_the_operations_that_torch_runs(name: str) -> None:
    """Forward, where every operation is counted; torch counts attention without a mask."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    config = GPT2 if name == "gpt2" else FAMILIES[name].config
    filled = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(filled, attn_implementation="eager").eval()
    length = 24
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None] % 8, use_cache=False)
    size = DecoderSize.of(config)
    assert size is not None
    assert size == DecoderSize.of(filled.to_dict()), "what a class of transformers fills in changes nothing"
    weights = 2.0 * (size.layer_weights + size.head_weights) * length
    pairs = 4.0 * (size.layers + size.window_layers) * size.heads * size.head_size * length**2
    assert counter.get_total_flops() == weights + pairs


def test_a_token_sees_those_before_it_and_in_a_window_the_last_ones() -> None:
    assert ONE.sequence_flops([0, 1, 3]).tolist() == [0.0, 12.0, 72.0], "12 · (1 + 2 + 3)"
    window = DecoderSize(0, 1, 1, 0, 0, window_layers=1, window=2)
    assert window.sequence_flops([1, 2, 4]).tolist() == [12.0, 36.0, 84.0], "12 · (1 + 2 + 2 + 2)"
    both = DecoderSize(1, 1, 1, 0, 0, window_layers=1, window=2)
    assert both.sequence_flops(4) == ONE.sequence_flops(4) + window.sequence_flops(4)


def test_kinds_of_layers_are_told_by_the_config() -> None:
    base = {**FAMILIES["qwen2"].config, "num_hidden_layers": 4}

    def layers(**changes: object) -> tuple[int, int]:
        size = DecoderSize.of({**base, **changes})
        assert size is not None
        return size.layers, size.window_layers

    assert layers() == (4, 0)
    assert layers(use_sliding_window=True, sliding_window=8, max_window_layers=1) == (1, 3)
    assert layers(model_type="mistral", sliding_window=8) == (0, 4)
    assert layers(layer_types=["linear_attention"] * 3 + ["full_attention"]) == (1, 0), "weights alone"
    assert layers(model_type="gemma2", sliding_window=8) == (2, 2)
    mixed = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    assert layers(model_type="gemma3_text", sliding_window=8, layer_types=mixed) == (1, 3)
    assert DecoderSize.of({"vocab_size": 7}) is None


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "deepseek_v3", "nemotron_h", "qwen3_moe"])
def test_weights_of_layers_are_those_of_the_models_own_linear_layers(name: str) -> None:
    """As a build counts them: configs of hybrids and latent attention do not say it in one way."""
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    from backends.hf.hf_model import decoder_size

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES[name].config))
    size = decoder_size(model)
    assert size is not None
    linear = sum(each.weight.numel() for each in model.model.modules() if isinstance(each, nn.Linear))
    experts = [each for each in model.model.modules() if type(each).__name__.endswith("Experts")]
    stacked = [weight for each in experts for weight in each.parameters() if weight.dim() == 3]
    visited = sum(weight[0].numel() * model.config.num_experts_per_tok for weight in stacked)
    routers = [each for name, each in model.model.named_parameters() if name.endswith("gate.weight")]
    assert 0 <= size.layer_weights - linear - visited <= sum(each.numel() for each in routers)


def test_of_experts_those_count_that_a_token_visits() -> None:
    config = {**FAMILIES["qwen3_moe"].config, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    once, thrice = DecoderSize.of(config), DecoderSize.of({**config, "num_experts_per_tok": 6})
    assert once is not None
    assert thrice is not None
    assert thrice.layer_weights - once.layer_weights == 4 * config["num_hidden_layers"] * 3 * config["hidden_size"] * 24

"""How much arithmetic a training step of a dense decoder is, and what a GPU could do meanwhile. No torch.

MFU (model FLOPs utilisation, Chowdhery et al. 2022, appendix B) counts what the model needs: three times the forward
pass, recomputed activations not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FORMULA = (
    "FLOPs = 6 · (tokens · layer weights + loss tokens · head weights) "
    "+ 6 · layers · heads · head size · Σ length · (length + 1)"
)

# TFLOP/s in dense bf16 with fp32 sums, as the data sheets say, by a part of the device's name.
PEAK_TFLOPS: Mapping[str, float] = {
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "B200": 2250.0,
}


@dataclass(frozen=True)
class DecoderSize:
    """Weights that a token is multiplied with: a lookup in the embedding is no multiplication."""

    layers: int
    heads: int
    head_size: int
    layer_weights: int  # of all layers
    head_weights: int  # of the language-model head, tied or not

    @staticmethod
    def of(config: Mapping[str, Any]) -> DecoderSize:
        """From the keys of a Llama-like `config.json`: gated MLP, grouped queries. Biases and norms are left out."""
        hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        head_size = config.get("head_dim") or hidden // heads
        attention = 2 * hidden * heads * head_size + 2 * hidden * config["num_key_value_heads"] * head_size
        mlp = 3 * hidden * config["intermediate_size"]
        return DecoderSize(layers, heads, head_size, layers * (attention + mlp), hidden * config["vocab_size"])


def train_flops(size: DecoderSize, lengths: Sequence[int], loss_tokens: int) -> float:
    """Of a forward and a backward pass over sequences of these lengths under a causal mask.

    A weight takes a multiplication and an addition per token forward, and twice that backward: 6. In attention a token
    at position i meets i + 1 keys, in two products (scores, values): 2 · 2 · (i + 1) · heads · head size forward, three
    times that in all; Σ (i + 1) = length · (length + 1) / 2.
    """
    weights = 6.0 * (sum(lengths) * size.layer_weights + loss_tokens * size.head_weights)
    pairs = sum(length * (length + 1) for length in lengths)
    return weights + 6.0 * size.layers * size.heads * size.head_size * pairs


def peak_tflops(device: str) -> float | None:
    """What the data sheet says, None for a device that is not in the table."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device), None)


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Share of `peak` (TFLOP/s) that `flops` in `seconds` are."""
    return flops / seconds / (peak * 1e12)

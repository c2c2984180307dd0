"""How much arithmetic a pass of a decoder over sequences is, by its shape alone.

Counted is what the model needs (Chowdhery et al. 2022, appendix B): matrix products and attention under a causal mask,
the backward pass twice the forward pass, recomputed activations not counted. Biases, norms and lookups in the embedding
are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specs.model_facts import ModelFacts, layer_kinds, merged_config, mlp_width, model_facts

_WHOLE, _WINDOWS = ("full_attention", "attention", "hybrid"), ("sliding_attention", "chunked_attention")
# One layer in so many sees everything, where the config does not say which do.
_WHOLE_EVERY = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
_UNGATED = ("gpt2", "gpt_neox", "gptj", "opt", "phi", "starcoder2", "falcon", "bloom", "mpt")


@dataclass(frozen=True)
class DecoderSize:
    """Weights that a token is multiplied with, and what attention sees. A layer without softmax attention has weights
    alone."""

    layers: int  # where a token sees all tokens before it
    heads: int
    head_size: int
    layer_weights: int  # of all layers; of experts those that a token visits
    head_weights: int  # of the language-model head, tied or not
    window_layers: int = 0  # where it sees `window` tokens, itself included
    window: int = 0

    @staticmethod
    def of(config: Mapping[str, Any]) -> DecoderSize | None:
        """Return the size of a model from its parsed `config.json`, or from one that a class of transformers has filled
        in; None where it does not name what this needs."""
        facts = model_facts(config)
        if facts is None:
            return None
        merged = merged_config(config)
        hidden, width = facts.hidden_size, facts.heads * facts.head_dim
        attention = 2 * hidden * width + 2 * hidden * facts.kv_heads * facts.head_dim
        matrices = 2 if facts.model_type in _UNGATED else 3
        whole, windows = _layers(facts, merged)
        return DecoderSize(
            layers=whole,
            heads=facts.heads,
            head_size=facts.head_dim,
            layer_weights=facts.layers * (attention + matrices * hidden * mlp_width(facts, merged)),
            head_weights=hidden * facts.vocab_size,
            window_layers=windows,
            window=(facts.sliding_window or facts.attention_chunk) if windows else 0,
        )

    def sequence_flops(self, length: ArrayLike) -> NDArray[np.float64]:
        """Count the FLOPs of training on the first `length` tokens of a sequence, the head aside: 2 forward, and twice
        that backward, for each weight and token, and in the two products of attention for each pair of tokens and
        number of a head. What a sequence that continues from there adds is the difference of two."""
        n = np.asarray(length, dtype=np.float64)
        seen = self.layers * n * (n + 1) / 2
        if self.window_layers:
            inside = np.minimum(n, self.window)
            seen = seen + self.window_layers * (inside * (inside + 1) / 2 + (n - inside) * self.window)
        return 6.0 * self.layer_weights * n + 12.0 * self.heads * self.head_size * seen

    def head_flops(self, loss_tokens: ArrayLike) -> NDArray[np.float64]:
        """Count the FLOPs of the language-model head, which is computed where a loss token is predicted."""
        return 6.0 * self.head_weights * np.asarray(loss_tokens, dtype=np.float64)


def _layers(facts: ModelFacts, config: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many layers see everything, and how many a window."""
    if kinds := layer_kinds(config):
        windows = sum(kind in _WINDOWS for kind in kinds) if facts.sliding_window or facts.attention_chunk else 0
        seeing = sum(kind in (*_WHOLE, *_WINDOWS) for kind in kinds)
        return seeing - windows, windows
    if not facts.sliding_window:
        return facts.layers, 0
    if facts.model_type.startswith("qwen"):  # the first ones see everything
        whole = min(facts.layers, int(config.get("max_window_layers") or facts.layers))
        return whole, facts.layers - whole
    every = config.get("sliding_window_pattern") or _WHOLE_EVERY.get(facts.model_type)
    whole = facts.layers // every if isinstance(every, int) else 0
    return whole, facts.layers - whole

"""Reads a model's shape from its `config.json`: heads, layers, widths, vocabulary, experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

# What a config leaves out where it is the usual value of its family.
_HEAD_DIM = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "qwen3": 128}
_TIED = ("gpt2", "gemma", "gemma2", "gemma3_text", "smollm3", "cohere", "cohere2", "starcoder2")
# Kinds of layers, by transformers' names, that carry a state; and all that rlctl computes on packed rows.
STATE_KINDS = frozenset({"linear_attention", "mamba", "conv", "hybrid"})
LAYER_KINDS = (
    frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention", "moe", "mlp"}) | STATE_KINDS
)
_WITHOUT_CACHE = STATE_KINDS - {"hybrid"} | {"mlp", "moe"}
_OF_NEMOTRON = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
# What published configs of a language model that is a part leave out: Gemma 3 4B all of this, 27B two of them.
_OF_A_PART = {
    "gemma3_text": {
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208, "max_position_embeddings": 131072}
    }
}
_STATE_KEYS = ("mamba_", "ssm_", "linear_conv_")  # of configs that list no kinds of layers


def merged_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a parsed `config.json` with what it says of a language model that is one part of it."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}  # the whole made the files
    return {**_OF_A_PART.get(str(text.get("model_type")), {}), **config, **text, **tied}


def tokens_of_one_rope(config: Mapping[str, Any]) -> int:
    """Return the number of tokens up to which positions are rotated in one way; 0: any number.

    LongRoPE has two sets of frequencies, and transformers takes the long one for a whole call as soon as one of its
    sequences is longer than this. Log-probs then depend on what else is in the call."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    name, shorts = "original_max_position_embeddings", []
    for each in (rope, *rope.values()) if isinstance(rope, Mapping) else ():  # one for each kind of layer: Gemma 3's
        if isinstance(each, Mapping) and each.get("rope_type", each.get("type")) in ("longrope", "su"):
            shorts.append(each.get(name) or config.get(name))
    return min((short for short in shorts if isinstance(short, int)), default=0)


@dataclass(frozen=True)
class StateShape:
    """The shape of a layer that carries a state: a gated delta net, Mamba 2, or a convolution alone (no heads)."""

    heads: int
    key: int  # width of a head's keys, Mamba's state
    value: int  # width of a head's values; of a convolution its own
    keys: int  # width of all keys, before heads share them
    kernel: int  # tokens that the convolution sees
    chunk: int = 1  # tokens that are computed at once
    mamba: bool = False
    norms: bool = True  # what comes out

    @property
    def size(self) -> int:
        """Elements of a recurrent state and of what a convolution still sees."""
        width = 2 * self.keys + (self.heads or 1) * self.value
        return self.heads * self.key * self.value + width * self.kernel

    @property
    def kept(self) -> tuple[int, int]:
        """Elements that autograd keeps for each token, in the model's dtype and in fp32, where transformers' torch
        formulas compute, as measured; kernels keep less. Chunks are filled up."""
        heads, keys, values, shared = self.heads, self.heads * self.key, self.heads * self.value, self.keys
        if not heads:
            return 6 * self.value, 0
        states = keys * self.value // self.chunk
        if self.mamba:
            norm = 4 * values if self.norms else 0
            return 4 * shared + 5 * values, 3 * heads * self.chunk + 5 * keys + 6 * values + norm + 2 * states
        return 4 * shared + 5 * values, 5 * heads * (self.chunk + 2) + 8 * keys + 6 * values + states


@dataclass(frozen=True)
class ModelFacts:
    """The shape of a decoder. Numbers that the config does not give, and that have no usual default, are 0."""

    model_type: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int  # heads where the config names none
    head_dim: int  # of latent attention the mean of keys' and values'
    intermediate_size: int
    vocab_size: int
    experts: int  # 0: a dense model
    experts_per_token: int
    expert_size: int  # rows of the gate of each expert
    latent_attention: bool  # MLA: keys and values are kept compressed
    sliding_window: int  # 0: none is in effect
    tied_embeddings: bool
    dtype: str  # of the stored weights as the config has it: "bfloat16", "float32", ...; "" where it does not say
    composite: bool  # a language model among others
    attention_chunk: int  # tokens of a chunk, beyond which some layers do not see; 0: none
    state_layers: int  # that carry a state from token to token; 0: none
    state: StateShape  # of each of them
    cached_layers: int  # that keep keys and values


def layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer, as a merged config lists them or as those of Nemotron-H, Qwen3-Next, LFM2 and
    Bamba are published; empty where nothing says it."""
    if listed := config.get("layer_types") or config.get("layers_block_type"):
        return [*map(str, listed)]
    if isinstance(pattern := config.get("hybrid_override_pattern"), str):
        return [_OF_NEMOTRON.get(one, one) for one in pattern]
    count = config.get("num_hidden_layers")
    layers = range(count if isinstance(count, int) else 0)
    if every := config.get("full_attention_interval"):
        return ["linear_attention" if (number + 1) % every else "full_attention" for number in layers]
    if (whole := config.get("full_attn_idxs")) is not None:
        return ["full_attention" if number in whole else "conv" for number in layers]
    if (whole := config.get("attn_layer_indices")) is not None:
        return ["full_attention" if number in whole else "mamba" for number in layers]
    return []


def model_facts(config: Mapping[str, Any]) -> ModelFacts | None:
    """Return the facts of a parsed `config.json` (of a multimodal model: of its text part). None where it names no
    heads, layers or width as Hugging Face decoders do."""
    merged = merged_config(config)

    def number(*names: str) -> int:
        given = (merged.get(name) for name in names)
        given = (one[0] if isinstance(one, list) and one else one for one in given)  # each layer's own: Hunyuan
        return next((int(one) for one in given if isinstance(one, int)), 0)

    kinds = layer_kinds(merged)
    layers = number("num_hidden_layers", "n_layer", "num_layers") or len(kinds)
    if merged.get("model_type") == "longcat_flash":
        layers *= 2  # in each of its blocks
    hidden = number("hidden_size", "n_embd", "d_model")
    heads = number("num_attention_heads", "n_head", "num_heads")
    if not (hidden and layers and heads):
        return None
    window, kind = number("sliding_window"), str(merged.get("model_type", ""))
    with_state = sum(one in STATE_KINDS for one in kinds)
    if not kinds and any(key.startswith(_STATE_KEYS) for key in merged):
        with_state = layers
    latent = number("qk_nope_head_dim") + number("qk_rope_head_dim") + number("v_head_dim")
    tied = merged.get("tie_word_embeddings", kind in _TIED)
    return ModelFacts(
        model_type=kind,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=number("num_key_value_heads") or heads,
        head_dim=latent // 2 or number("head_dim") or _HEAD_DIM.get(kind) or hidden // heads,
        intermediate_size=number("intermediate_size", "n_inner"),
        vocab_size=number("vocab_size"),
        experts=number("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        experts_per_token=number("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"),
        expert_size=number("moe_intermediate_size", "intermediate_size"),
        latent_attention=number("kv_lora_rank") > 0,
        sliding_window=window if merged.get("use_sliding_window", True) else 0,
        tied_embeddings=bool(tied),
        dtype=str(merged.get("dtype") or merged.get("torch_dtype") or ""),
        composite=isinstance(config.get("text_config"), Mapping),
        attention_chunk=number("attention_chunk_size"),
        state_layers=with_state,
        state=_state_shape(merged, number),
        cached_layers=layers - sum(kind in _WITHOUT_CACHE for kind in kinds),
    )


def _state_shape(config: Mapping[str, Any], number: Callable[..., int]) -> StateShape:
    if heads := number("linear_num_value_heads"):
        key, value = number("linear_key_head_dim"), number("linear_value_head_dim")
        return StateShape(heads, key, value, number("linear_num_key_heads") * key, number("linear_conv_kernel_dim"), 64)
    if heads := number("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"):
        key, kernel = number("mamba_d_state", "ssm_state_size"), number("mamba_d_conv", "conv_kernel")
        keys = key * max(1, number("mamba_n_groups", "n_groups", "mamba_ngroups"))
        chunk = number("mamba_chunk_size", "chunk_size") or 256
        norms = config.get("mamba_rms_norm", True) is not False
        value = number("mamba_d_head", "mamba_head_dim", "mamba_headdim")
        return StateShape(heads, key, value, keys, kernel, chunk, True, norms)
    return StateShape(0, 0, number("hidden_size"), 0, number("conv_L_cache"))


def shares_out(heads: int, kv_heads: int, parts: int) -> bool:
    """Return whether `parts` processes can have equal shares of the query heads, with the key-value heads that these
    use: key-value heads are sharded too, or, where there are more processes, repeated."""
    return heads % parts == 0 and (kv_heads % parts == 0 or parts % kv_heads == 0)


def sharing_degrees(heads: int, kv_heads: int) -> list[int]:
    """Return the numbers of processes for which `shares_out` holds."""
    return [parts for parts in range(1, heads + 1) if shares_out(heads, kv_heads, parts)]


def mlp_width(facts: ModelFacts, config: Mapping[str, Any]) -> int:
    """Return the width of the MLP that a token meets in a layer; in a mixture, of all experts that it visits."""
    if not facts.experts:
        return facts.intermediate_size or 4 * facts.hidden_size
    return facts.expert_size * (facts.experts_per_token or 2) + int(config.get("shared_expert_intermediate_size") or 0)


def positions_of(config: Mapping[str, Any]) -> int:
    """Return how many positions a sequence may have by a `config.json`, or by one that transformers has filled in; 0:
    no limit is given. YaRN and linear scaling stretch them, whether or not `max_position_embeddings` was raised, which
    that of Gemma 3 always is. Dynamic scaling does not count: beyond them it depends on the longest sequence of a
    batch."""
    merged = merged_config(config)
    given = merged.get("max_position_embeddings", merged.get("n_positions"))
    positions = given if type(given) is int and given > 0 else 0
    rope = merged.get("rope_parameters") or merged.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return positions
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    raised = merged.get("model_type") == "gemma3_text"
    if raised or kind not in ("yarn", "linear") or not isinstance(factor, int | float) or not isfinite(factor):
        return positions
    before = rope.get("original_max_position_embeddings") if kind == "yarn" else None
    return max(positions, int(factor * (before if isinstance(before, int) else positions)))

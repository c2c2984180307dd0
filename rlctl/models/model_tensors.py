"""Names and shapes of a model's parameters, computed from `config.json` before the model is built.

The names are those of transformers 5, where the experts of a layer lie in two tensors. A test builds every family on
the meta device and compares. A model of another family is read from the headers of its safetensors files.

E: hidden size, V: vocabulary, I: width of the MLP, D: head size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specs.model_facts import ModelFacts, merged_config, model_facts
from specs.model_shapes import ModelTensors, ParameterShape, Shape, built_names
from specs.safetensors_header import read_header


@dataclass(frozen=True)
class _Family:
    """Hold what a family of Llama-like decoders has unlike Llama. A string names the config's key that decides."""

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    head_norms: str = ""  # "head": one of D for queries and for keys; "all": of all heads' widths
    fused: bool = False  # queries, keys and values in one matrix, and so gate and up


_SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_BIASED: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
_FAMILIES = {
    "llama": _Family(**_BIASED, mlp_bias="mlp_bias"),
    "granite": _Family(**_BIASED, mlp_bias="mlp_bias"),
    "smollm3": _Family(**_BIASED, mlp_bias="mlp_bias"),
    "mistral": _Family(),
    "mixtral": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen2_moe": _Family(qkv_bias="qkv_bias"),
    "qwen3": _Family(**_BIASED, head_norms="head"),
    "qwen3_moe": _Family(**_BIASED, head_norms="head"),
    "gemma": _Family(**_BIASED),
    "gemma2": _Family(**_BIASED, norms=_SANDWICH),
    "gemma3_text": _Family(**_BIASED, norms=_SANDWICH, head_norms="head"),
    "olmo2": _Family(**_BIASED, norms=("post_attention_layernorm", "post_feedforward_layernorm"), head_norms="all"),
    "phi3": _Family(fused=True),
}
KNOWN_FAMILIES = tuple(_FAMILIES)
_NOT_LINEAR = re.compile(r"(?<!un)emb|\bw[tp]e\b|head\.|score\.|\.(gate|router)\.weight$")


def tensors_of_config(config: Mapping[str, Any]) -> ModelTensors | None:
    """Return the parameters of the causal language model of a parsed `config.json`; None for an unknown family."""
    facts = model_facts(config)
    config = merged_config(config)
    if facts is None or not facts.vocab_size or facts.model_type not in _FAMILIES:
        return None
    return ModelTensors(tuple(_decoder(_FAMILIES[facts.model_type], facts, config)), "config.json")


def _decoder(family: _Family, facts: ModelFacts, config: Mapping[str, Any]) -> Iterator[ParameterShape]:
    width, vocabulary = facts.hidden_size, facts.vocab_size
    yield ParameterShape("model.embed_tokens.weight", (vocabulary, width))
    for number in range(facts.layers):
        at = f"model.layers.{number}."
        for name, shape in (*_attention(family, facts, config), *_mlp(family, facts, config, number)):
            router = name == "mlp.gate.weight"  # a module of its own kind
            yield ParameterShape(f"{at}{name}", shape, number, linear=len(shape) == 2 and not router)
        for name in family.norms:
            yield ParameterShape(f"{at}{name}.weight", (width,), number)
    yield ParameterShape("model.norm.weight", (width,))
    if not facts.tied_embeddings:
        yield ParameterShape("lm_head.weight", (vocabulary, width))


def _linear(config: Mapping[str, Any], name: str, out: int, into: int, bias: bool | str) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out, into)
    if config.get(bias, bias == "qkv_bias") if isinstance(bias, str) else bias:
        yield f"{name}.bias", (out,)


def _attention(family: _Family, facts: ModelFacts, config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    width, dim = facts.hidden_size, facts.head_dim
    query, key = facts.heads * dim, facts.kv_heads * dim
    if family.fused:
        yield "self_attn.qkv_proj.weight", (query + 2 * key, width)
    else:
        for name, out in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            yield from _linear(config, f"self_attn.{name}", out, width, family.qkv_bias)
    yield from _linear(config, "self_attn.o_proj", width, query, family.out_bias)
    if family.head_norms:
        whole = family.head_norms == "all"
        yield "self_attn.q_norm.weight", (query if whole else dim,)
        yield "self_attn.k_norm.weight", (key if whole else dim,)


def _mlp(family: _Family, facts: ModelFacts, config: Mapping[str, Any], layer: int) -> Iterator[tuple[str, Shape]]:
    width, inner = facts.hidden_size, facts.intermediate_size
    if family.fused:
        yield "mlp.gate_up_proj.weight", (2 * inner, width)
        yield "mlp.down_proj.weight", (width, inner)
    elif _is_sparse(facts, config, layer):
        yield from _experts(facts, config)
    else:
        yield from _gated(config, "mlp", width, inner, family.mlp_bias)


def _gated(config: Mapping[str, Any], at: str, width: int, inner: int, bias: bool | str) -> Iterator[tuple[str, Shape]]:
    yield from _linear(config, f"{at}.gate_proj", inner, width, bias)
    yield from _linear(config, f"{at}.up_proj", inner, width, bias)
    yield from _linear(config, f"{at}.down_proj", width, inner, bias)


def _is_sparse(facts: ModelFacts, config: Mapping[str, Any], layer: int) -> bool:
    if facts.model_type == "mixtral":
        return True
    if not facts.experts or layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % max(1, int(config.get("decoder_sparse_step", 1))) == 0


def _experts(facts: ModelFacts, config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    width, count = facts.hidden_size, facts.experts
    inner = int(config.get("moe_intermediate_size") or facts.intermediate_size)
    yield "mlp.gate.weight", (count, width)
    yield "mlp.experts.gate_up_proj", (count, 2 * inner, width)
    yield "mlp.experts.down_proj", (count, width, inner)
    if shared := config.get("shared_expert_intermediate_size"):
        yield from _gated(config, "mlp.shared_expert", width, int(shared), bias=False)
        yield "mlp.shared_expert_gate.weight", (1, width)


# ── from the files ────────────────────────────────────────────────────────────────────────────────


def built_shapes(shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the language model's stored shapes by its own names, without layers that draft tokens (multi-token
    prediction): these come after its own, or under `mtp`, and transformers does not build them."""
    facts, drafting = model_facts(config), config.get("num_nextn_predict_layers")
    numbers = range(facts.layers, facts.layers + drafting) if facts and isinstance(drafting, int) else ()
    left_out = re.compile(rf"^(?:model\.)?(?:mtp|layers\.(?:{'|'.join(map(str, numbers))}))\.")
    return {own: shapes[name] for name, own in built_names(shapes).items() if not left_out.match(own)}


def tensors_on_disk(folder: Path, config: Mapping[str, Any]) -> ModelTensors | None:
    """Return what the headers of the folder's weight files hold; None where there is none, or one cannot be read. A
    tied head that is stored all the same is not counted, for it is the embedding."""
    try:
        headers = [read_header(file) for file in sorted(folder.glob("model*.safetensors"))]
    except (OSError, ValueError):
        return None
    shapes = {name: entry.shape for header in headers for name, entry in header.entries.items()}
    shapes = built_shapes(shapes, config)
    if (facts := model_facts(config)) is not None and facts.tied_embeddings:
        shapes.pop("lm_head.weight", None)
    parameters = tuple(_stored(name, shape) for name, shape in shapes.items())
    return ModelTensors(parameters, "headers of the weight files") if parameters else None


def _stored(name: str, shape: Shape) -> ParameterShape:
    """Return a parameter of which only name and shape are known: these tell its layer, and whether that is linear: not
    an embedding, a head or a router."""
    found = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)
    layer = int(found[1]) if found else None
    other = _NOT_LINEAR.search(name) is not None
    return ParameterShape(name, shape, layer, linear=len(shape) == 2 and name.endswith(".weight") and not other)

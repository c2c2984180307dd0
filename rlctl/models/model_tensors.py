"""Names and shapes of a model's parameters, computed from `config.json` before the model is built.

The names are those of transformers 5, where the experts of a layer lie in two tensors. A test builds every family on
the meta device and compares. A model of another family is read from the headers of its safetensors files.

E: hidden size, V: vocabulary, I: width of the MLP, D: head size.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specs.model_facts import ModelFacts, model_facts
from specs.model_shapes import ModelTensors, ParameterShape, Shape

_MAX_HEADER_BYTES = 100 * 2**20  # what safetensors itself allows


@dataclass(frozen=True)
class _Family:
    """How a family of Llama-like decoders departs from Llama. A string names the config's key that decides."""

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
    "qwen2_moe": _Family(qkv_bias=True),
    "qwen3": _Family(**_BIASED, head_norms="head"),
    "qwen3_moe": _Family(**_BIASED, head_norms="head"),
    "gemma": _Family(**_BIASED),
    "gemma2": _Family(**_BIASED, norms=_SANDWICH),
    "gemma3_text": _Family(**_BIASED, norms=_SANDWICH, head_norms="head"),
    "olmo2": _Family(**_BIASED, norms=("post_attention_layernorm", "post_feedforward_layernorm"), head_norms="all"),
    "phi3": _Family(fused=True),
}
KNOWN_FAMILIES = (*_FAMILIES, "gpt2")


def tensors_of_config(config: Mapping[str, Any]) -> ModelTensors | None:
    """Parameters of the causal language model of a parsed `config.json`; None for a family that is not known here."""
    facts = model_facts(config)
    if facts is None or not facts.vocab_size or "text_config" in config:
        return None
    if facts.model_type == "gpt2":
        parameters = tuple(_gpt2(facts))
    elif facts.model_type in _FAMILIES:
        parameters = tuple(_decoder(_FAMILIES[facts.model_type], facts, config))
    else:
        return None
    return ModelTensors(parameters, "config.json")


# ── Llama-like decoders ───────────────────────────────────────────────────────────────────────────


def _decoder(family: _Family, facts: ModelFacts, config: Mapping[str, Any]) -> Iterator[ParameterShape]:
    width, vocabulary = facts.hidden_size, facts.vocab_size
    yield ParameterShape("model.embed_tokens.weight", (vocabulary, width))
    for number in range(facts.layers):
        at = f"model.layers.{number}."
        for name, shape in _attention(family, facts, config):
            yield _in_layer(number, f"{at}self_attn.{name}", shape)
        for name, shape in _mlp(family, facts, config, number):
            yield _in_layer(number, f"{at}mlp.{name}", shape)
        for name in family.norms:
            yield _in_layer(number, f"{at}{name}.weight", (width,))
    yield ParameterShape("model.norm.weight", (width,))
    if not facts.tied_embeddings:
        yield ParameterShape("lm_head.weight", (vocabulary, width))


def _in_layer(number: int, name: str, shape: Shape) -> ParameterShape:
    router = name.endswith(".mlp.gate.weight")  # a module of its own kind
    return ParameterShape(name, shape, number, linear=len(shape) == 2 and not router)


def _asked(choice: bool | str, config: Mapping[str, Any]) -> bool:
    return bool(config.get(choice, False)) if isinstance(choice, str) else choice


def _linear(name: str, out: int, into: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out, into)
    if bias:
        yield f"{name}.bias", (out,)


def _attention(family: _Family, facts: ModelFacts, config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    width, dim = facts.hidden_size, facts.head_dim
    query, key = facts.heads * dim, facts.kv_heads * dim
    qkv_bias = bool(config.get("qkv_bias", True)) if facts.model_type == "qwen2_moe" else family.qkv_bias
    if family.fused:
        yield "qkv_proj.weight", (query + 2 * key, width)
    else:
        for name, out in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            yield from _linear(name, out, width, _asked(qkv_bias, config))
    yield from _linear("o_proj", width, query, _asked(family.out_bias, config))
    if family.head_norms:
        whole = family.head_norms == "all"
        yield "q_norm.weight", (query if whole else dim,)
        yield "k_norm.weight", (key if whole else dim,)


def _mlp(family: _Family, facts: ModelFacts, config: Mapping[str, Any], layer: int) -> Iterator[tuple[str, Shape]]:
    width, inner = facts.hidden_size, facts.intermediate_size
    if family.fused:
        yield "gate_up_proj.weight", (2 * inner, width)
        yield "down_proj.weight", (width, inner)
    elif _is_sparse(facts, config, layer):
        yield from _experts(facts, config)
    else:
        yield from _gated("", width, inner, _asked(family.mlp_bias, config))


def _gated(prefix: str, width: int, inner: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield from _linear(f"{prefix}gate_proj", inner, width, bias)
    yield from _linear(f"{prefix}up_proj", inner, width, bias)
    yield from _linear(f"{prefix}down_proj", width, inner, bias)


def _is_sparse(facts: ModelFacts, config: Mapping[str, Any], layer: int) -> bool:
    if facts.model_type == "mixtral":
        return True
    if not facts.experts or layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % max(1, int(config.get("decoder_sparse_step", 1))) == 0


def _experts(facts: ModelFacts, config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    width, count = facts.hidden_size, facts.experts
    inner = int(config.get("moe_intermediate_size") or facts.intermediate_size)
    yield "gate.weight", (count, width)
    yield "experts.gate_up_proj", (count, 2 * inner, width)
    yield "experts.down_proj", (count, width, inner)
    if shared := config.get("shared_expert_intermediate_size"):
        yield from _gated("shared_expert.", width, int(shared), bias=False)
        yield "shared_expert_gate.weight", (1, width)


# ── GPT-2 ─────────────────────────────────────────────────────────────────────────────────────────


def _gpt2(facts: ModelFacts) -> Iterator[ParameterShape]:
    width, inner = facts.hidden_size, facts.intermediate_size or 4 * facts.hidden_size
    yield ParameterShape("transformer.wte.weight", (facts.vocab_size, width))
    yield ParameterShape("transformer.wpe.weight", (facts.max_positions, width))
    matrices = [("attn.c_attn", width, 3 * width), ("attn.c_proj", width, width)]
    matrices += [("mlp.c_fc", width, inner), ("mlp.c_proj", inner, width)]
    for number in range(facts.layers):
        at = f"transformer.h.{number}."
        for name, into, out in matrices:
            yield ParameterShape(f"{at}{name}.weight", (into, out), number, linear=True)
            yield ParameterShape(f"{at}{name}.bias", (out,), number)
        for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
            yield ParameterShape(f"{at}{name}", (width,), number)
    yield ParameterShape("transformer.ln_f.weight", (width,))
    yield ParameterShape("transformer.ln_f.bias", (width,))
    if not facts.tied_embeddings:
        yield ParameterShape("lm_head.weight", (facts.vocab_size, width))


# ── from the files ────────────────────────────────────────────────────────────────────────────────


def tensors_on_disk(folder: Path, *, tied: bool) -> ModelTensors | None:
    """What the headers of the folder's `*.safetensors` say; None where there is none, or one cannot be read. `tied`:
    a head that is stored all the same is not counted, for it is the embedding."""
    shapes: dict[str, Shape] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            shapes |= {name: tuple(entry["shape"]) for name, entry in _header(file).items() if name != "__metadata__"}
        except (OSError, ValueError, KeyError, TypeError, struct.error):
            return None
    if tied:
        shapes.pop("lm_head.weight", None)
    return tensors_of_shapes(shapes, "headers of the weight files") if shapes else None


def tensors_of_shapes(shapes: Mapping[str, Shape], source: str) -> ModelTensors:
    """From names and shapes alone: layers and linear layers are told by name and form."""
    return ModelTensors(tuple(_stored(name, shape) for name, shape in shapes.items()), source)


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _MAX_HEADER_BYTES:
            raise ValueError("header too long")
        content: dict[str, Any] = json.loads(stream.read(length))
    return content


def _stored(name: str, shape: Shape) -> ParameterShape:
    found = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)
    layer = int(found[1]) if found else None
    return ParameterShape(name, shape, layer, linear=layer is not None and len(shape) == 2)

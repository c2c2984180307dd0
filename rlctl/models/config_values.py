"""Whether the values of a `config.json` can be used: their types, ranges, rotary positions, activations, tokens.

What the installed transformers says of the family decides (`rlctl/models/config_class.py`); of a family that is not
known to it, only what is the same in all is checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlctl.models.config_class import ConfigClass, ConfigField, activations, config_class, rope_types
from specs.model_facts import model_facts
from specs.text import show

AGAIN = "copy config.json again"
Wrong = tuple[str, str]  # what is wrong, and a hint

_ABOVE_ZERO = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "head_dim"),
    *("intermediate_size", "moe_intermediate_size", "max_position_embeddings", "sliding_window", "decoder_sparse_step"),
    *("num_experts_per_tok", "n_embd", "n_head", "n_layer", "n_positions", "d_model", "ffn_dim", "n_inner"),
    "word_embed_proj_dim",
)
_NOT_BELOW_ZERO = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "initializer_range")
_SHARES = ("partial_rotary_factor", "rotary_pct")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_DTYPE = re.compile(r"float(16|32|64)?|bfloat16|half|double|float8_\w+")


def value_problems(config: Mapping[str, Any]) -> Iterator[Wrong]:
    """Everything that is wrong with single keys. `config`: with what `text_config` says of the language model."""
    family = config_class(str(config.get("model_type", ""))) or ConfigClass()
    slides = _slides(config)
    found = ((name, _type_problem(family, name, value, slides=slides)) for name, value in config.items())
    wrong_types = {name: wrong for name, wrong in found if wrong}
    yield from wrong_types.values()
    rest = {name: value for name, value in config.items() if name not in wrong_types}
    for checks in (_ranges, _dtype, _names_of_functions, _pad_token, _experts, _rope):
        yield from checks(rest, family)


def _in(name: str) -> str:
    return f"{name} in config.json"


# ── types and ranges ──────────────────────────────────────────────────────────────────────────────


def _type_problem(family: ConfigClass, name: str, value: Any, *, slides: bool) -> Wrong | None:
    known = family.fields.get(name)
    if isinstance(value, float) and not math.isfinite(value):
        return f"{_in(name)} is {value}", AGAIN
    if name in _ABOVE_ZERO and (slides or name != "sliding_window") and not _is_size(value, known):
        return f"{_in(name)} must be a whole number above 0, not {value!r}", AGAIN
    if known is None or known.takes(value):
        return None
    if name in ("rope_parameters", "rope_scaling", "eos_token_id"):
        return None  # said elsewhere, in words of their own
    hint = f"write {float(value)} there" if type(value) is int and float in known.types else AGAIN
    return f"{_in(name)} must be {known.words}, not {_json(value)}", hint


def _is_size(value: Any, known: ConfigField | None) -> bool:
    """Whether it counts something. Some families have a list with a number for each layer, or null for a default."""
    if isinstance(value, list) or value is None:
        return known is None or known.takes(value)
    return type(value) is int and value > 0


def _slides(config: Mapping[str, Any]) -> bool:
    """Whether a window is in effect; of one that is not, configs may say anything."""
    return bool(config.get("use_sliding_window", True))


def _json(value: Any) -> str:
    return "null" if value is None else show(value) or "an object"


def _ranges(config: Mapping[str, Any], family: ConfigClass) -> Iterator[Wrong]:
    for name in _NOT_BELOW_ZERO:
        value = config.get(name)
        if isinstance(value, int | float) and value < 0:
            yield f"{_in(name)} must be at least 0, not {value}", AGAIN
    for name in family.fields:
        value = config.get(name)
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, int | float) and not 0 <= value <= 1:
            yield f"{_in(name)} must be between 0 and 1, not {value}", "write 0.0 there: rlctl trains without dropout"
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if isinstance(kinds, list) and isinstance(layers, int) and len(kinds) != layers:
        yield f"layer_types in config.json names {len(kinds)} layers, and num_hidden_layers is {layers}", AGAIN


def _dtype(config: Mapping[str, Any], family: ConfigClass) -> Iterator[Wrong]:
    for name in ("dtype", "torch_dtype"):
        value = config.get(name)
        if value is not None and not (isinstance(value, str) and _DTYPE.fullmatch(value)):
            yield f"{_in(name)} must be a dtype of torch, not {_json(value)}", 'write "bfloat16" or "float32" there'


def _names_of_functions(config: Mapping[str, Any], family: ConfigClass) -> Iterator[Wrong]:
    known = activations()
    for name in _ACTIVATIONS:
        value = config.get(name)
        if known and isinstance(value, str) and name in family.fields and value not in known:
            yield f"{_in(name)} is {show(value)}, which is no activation function of transformers", AGAIN


def _pad_token(config: Mapping[str, Any], family: ConfigClass) -> Iterator[Wrong]:
    """torch counts a negative one from the end of the embedding."""
    pad, vocabulary = config.get("pad_token_id"), config.get("vocab_size")
    if isinstance(pad, int) and isinstance(vocabulary, int) and not -vocabulary <= pad < vocabulary:
        yield (
            f"{_in('pad_token_id')} is {pad}, outside the vocabulary of {vocabulary}",
            "write one of its tokens, or null",
        )


def _experts(config: Mapping[str, Any], family: ConfigClass) -> Iterator[Wrong]:
    facts = model_facts(config)
    if facts is not None and 0 < facts.experts < facts.experts_per_token:
        yield f"each token visits {facts.experts_per_token} experts by config.json, which has {facts.experts}", AGAIN


# ── rotary positions ──────────────────────────────────────────────────────────────────────────────


def _rope(config: Mapping[str, Any], family: ConfigClass) -> Iterator[Wrong]:
    if family.fields and "rope_parameters" not in family.fields:
        return  # positions of another kind
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = config.get(name)
    if "rope_theta" in config and not (isinstance(given, Mapping) and "rope_theta" in given):
        yield from _above_zero("rope_theta", config["rope_theta"])
    yield from _rotated(config, family)
    if given is None:
        return
    if not isinstance(given, Mapping):
        yield f"{_in(name)} must be an object, not {_json(given)}", AGAIN
        return
    layers = config.get("layer_types")
    kinds = [kind for kind in given if isinstance(layers, list) and kind in layers]
    for part in [given[kind] for kind in kinds] if kinds else [given]:
        if isinstance(part, Mapping):
            yield from _one_rope(name, part, config, family)


def _one_rope(name: str, rope: Mapping[str, Any], config: Mapping[str, Any], family: ConfigClass) -> Iterator[Wrong]:
    kind, known = rope.get("rope_type", rope.get("type", "default")), rope_types()
    if not known:
        return
    if not isinstance(kind, str) or (kind not in known and f'"{kind}"' not in family.source):
        others = ", ".join(known)
        yield f"{_in(name)} has the rope_type {_json(kind)}, which transformers does not know", f"it knows {others}"
        return
    usual = {"rope_type", "rope_theta", "original_max_position_embeddings"}
    if missing := sorted(known.get(kind, frozenset()) - usual - rope.keys()):
        yield f"{_in(name)} lacks {', '.join(missing)}, which {kind} needs", AGAIN
    for key in ("rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"):
        if key in rope and (key != "rope_theta" or rope[key] is not None):
            yield from _above_zero(f"{name}.{key}", rope[key])
    facts = model_facts(config)
    pairs = int(facts.head_dim * _share(config, rope)) // 2 if facts else 0
    given = {key: rope[key] for key in ("short_factor", "long_factor") if rope.get(key) is not None}
    if wrong := [
        key for key, value in given.items() if pairs and not (isinstance(value, list) and len(value) == pairs)
    ]:
        message = f"{_in(f'{name}: {wrong[0]}')} must be a list of {pairs} numbers, one for each pair of a head's"
        yield message, AGAIN


def _above_zero(name: str, value: Any) -> Iterator[Wrong]:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        yield f"{_in(name)} must be a number above 0, not {_json(value)}", AGAIN


def _share(config: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    """Share of a head that is rotated; 1 where it cannot be told."""
    found = [of[name] for of in (rope, config) for name in _SHARES if name in of]
    return float(found[0]) if found and isinstance(found[0], int | float) else 1.0


def _rotated(config: Mapping[str, Any], family: ConfigClass) -> Iterator[Wrong]:
    """Rotary positions turn pairs of numbers in a head."""
    facts, share = model_facts(config), _share(config, {})
    wrong = {name: config[name] for name in _SHARES if name in config and not _is_share(config[name])}
    if wrong:
        name, value = next(iter(wrong.items()))
        yield f"{_in(name)} must be a number above 0 and at most 1, not {_json(value)}", AGAIN
    elif family.fields and facts is not None and facts.head_dim % 2 and int(facts.head_dim * share) == facts.head_dim:
        message = f"its heads have {facts.head_dim} numbers each, and rotary positions need an even count"
        yield message, "config.json is not the one that the model was trained with: copy it again"


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1

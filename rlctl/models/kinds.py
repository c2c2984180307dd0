"""Whether a model is a causal language model with trainable weights and a valid config.

Which kinds transformers builds as causal language models is read from its source, without importing it.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from specs.model_facts import model_facts

_TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
# Heads that do something else with the same layers.
_OTHER_HEADS = re.compile(r"For(MaskedLM|PreTraining|\w*Classification|QuestionAnswering|MultipleChoice|\w*Reward\w*)$")
_COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
_LAYERS = {"full_attention", "sliding_attention"}  # as backends/hf/hf_model.py, which builds them
_MAY_BE_NULL = ("num_key_value_heads",)
AGAIN = "copy config.json again"

Wrong = tuple[str, str]  # what is wrong, and a hint


def config_problem(config: Mapping[str, Any]) -> Wrong | None:
    """A size in `config.json` that is not a positive whole number."""
    for name in _COUNTS:
        value = config.get(name, 1)
        if isinstance(value, list) or (value is None and name in _MAY_BE_NULL):
            continue  # some families have one for each layer
        if type(value) is not int or value < 1:
            return f"{name} in config.json must be a whole number above 0, not {value!r}", AGAIN
    facts = model_facts(config)
    if facts is not None and 0 < facts.experts < facts.experts_per_token:
        return f"each token visits {facts.experts_per_token} experts by config.json, which has {facts.experts}", AGAIN
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if isinstance(kinds, list) and isinstance(layers, int) and len(kinds) != layers:
        return f"layer_types in config.json names {len(kinds)} layers, and num_hidden_layers is {layers}", AGAIN
    return None


def kind_problem(config: Mapping[str, Any], *, from_scratch: bool) -> Wrong | None:
    """Why rlctl cannot train a model of this `config.json`, by its kind. `from_scratch`: no weights are read.

    The transformers of this process is asked; models that bring their own code are not checked.
    """
    kind, hint = str(config.get("model_type", "")), "name a causal language model (Qwen, Llama, Gemma, …)"
    if config.get("is_encoder_decoder"):
        return f"{kind} is an encoder-decoder model; rlctl trains decoder-only models", hint
    known = causal_kinds()
    if known and kind not in known and not config.get("auto_map"):
        return f"the installed transformers has no causal language model of the type {kind!r}", hint
    text = config.get("text_config") or config
    kinds = text.get("layer_types") if isinstance(text, Mapping) else None
    if isinstance(kinds, list) and (unknown := sorted({str(name) for name in kinds} - _LAYERS)):
        return f"has layers of type {', '.join(unknown)}, and rlctl supports {', '.join(sorted(_LAYERS))}", hint
    if from_scratch:
        return None
    named = [str(name) for name in config.get("architectures") or ()]
    if named and named[0] not in known.get(kind, ()) and _OTHER_HEADS.search(named[0]):
        return f"holds a {named[0]}, which has no language modeling head", hint
    return None


def quantized_problem(config: Mapping[str, Any]) -> Wrong | None:
    """Quantized weights."""
    how = config.get("quantization_config")
    if not how:
        return None
    method = how.get("quant_method", "") if isinstance(how, Mapping) else ""
    message = f"its weights are quantized ({method or 'quantization_config'}): they can be neither trained nor synced"
    return message, "name the model that it was made from, in bf16 or fp32"


@cache
def causal_kinds() -> Mapping[str, tuple[str, ...]]:
    """model_type → classes that transformers builds for it; empty where that cannot be told."""
    package = importlib.util.find_spec("transformers")
    for root in (package.submodule_search_locations or []) if package else []:
        try:
            source = (Path(root) / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
        except OSError:
            continue
        found = re.search(rf"^{_TABLE} = OrderedDict\(\s*(\[.*?^    \])", source, re.DOTALL | re.MULTILINE)
        try:
            pairs = ast.literal_eval(found[1]) if found else []
        except (ValueError, SyntaxError):
            continue
        return {kind: (names,) if isinstance(names, str) else tuple(names) for kind, names in pairs}
    return {}

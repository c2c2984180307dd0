"""Whether a model is of a kind that rlctl trains: a causal language model with attention in every layer, or the same
layers below a head of one number.

Which kinds transformers builds so is read from its source, without importing it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from rlctl.models.config_class import ConfigClass, config_class, transformers_folder
from specs.schema.roles import HeadKind

_CAUSAL, _SCORING = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
# Heads that do something else with the same layers.
_OTHER_HEADS = re.compile(r"For(MaskedLM|PreTraining|\w*Classification|QuestionAnswering|MultipleChoice|\w*Reward\w*)$")
_LAYERS = {"full_attention", "sliding_attention"}  # as backends/hf/hf_model.py, which builds them
_OLD_NAMES = {"attention": "full_attention"}  # as transformers reads them
# What a family's layers are where config.json does not say: how its code begins, and the names in that.
_BY_DEFAULT, _NAMED = re.compile(r"\bself\.layer_types = \[([^\]]*)\]"), re.compile(r'(?<!\[)"(\w+)"')

_SCORES = "name a model of another family (qwen2, qwen3, llama, gemma3_text, mistral, … have one)"

Wrong = tuple[str, str]  # what is wrong, and a hint


def kind_problem(config: Mapping[str, Any], *, from_scratch: bool, head: HeadKind = "lm") -> Wrong | None:
    """Why rlctl cannot train a model of this `config.json`, by its kind. `from_scratch`: no weights are read. `head`:
    what it is to end in.

    The transformers of this process is asked; models that bring their own code are not checked.
    """
    kind, hint = str(config.get("model_type", "")), "name a causal language model (Qwen, Llama, Gemma, …)"
    family = config_class(kind) or ConfigClass()
    if family.value(config, "is_encoder_decoder"):
        return f"{kind} is an encoder-decoder model; rlctl trains decoder-only models", hint
    known = causal_kinds()
    if known and kind not in known and not config.get("auto_map"):
        return f"the installed transformers has no causal language model of the type {kind!r}", hint
    text = config.get("text_config")
    if wrong := _layers_problem(kind, text if isinstance(text, Mapping) else config, family):
        return wrong, hint
    scoring = _kinds(_SCORING)
    if head != "lm" and scoring and kind not in scoring and not config.get("auto_map"):
        what = "so it can predict or score nothing"
        return f"the installed transformers has no sequence-classification model of the type {kind!r}, {what}", _SCORES
    if from_scratch:
        return None
    named = [str(name) for name in config.get("architectures") or ()]
    fitting = (*known.get(kind, ()), *(scoring.get(kind, ()) if head != "lm" else ()))
    if named and named[0] not in fitting and _OTHER_HEADS.search(named[0]):
        return f"holds a {named[0]}, which has no language modeling head", hint
    return None


def _layers_problem(kind: str, config: Mapping[str, Any], family: ConfigClass) -> str:
    """What its layers do that packed sequences and their samplers do not allow, or ""."""
    kinds = config.get("layer_types")
    named = {_OLD_NAMES.get(str(name), str(name)) for name in kinds} if isinstance(kinds, list) else set()
    by_default = {name for code in _BY_DEFAULT.findall(family.source) for name in _NAMED.findall(code)}
    if unknown := sorted((named or by_default) - _LAYERS):
        return f"{kind} has layers of type {', '.join(unknown)}, and rlctl supports {', '.join(sorted(_LAYERS))}"
    if "_is_stateful = True" in family.modeling and not named:
        return f"{kind} has layers that carry a state from token to token (state space, linear attention)"
    if "as a standalone, add `is_decoder=True" in family.modeling and not config.get("is_decoder"):
        return f"{kind} is an encoder: every token sees those that follow it"
    if family.modeling and "ALL_ATTENTION_FUNCTIONS" not in family.modeling:
        return f"{kind} computes attention in code of its own, so sequences of a packed row cannot be kept apart"
    return ""


def quantized_problem(config: Mapping[str, Any], *, learns: bool) -> Wrong | None:
    """Quantized weights."""
    how = config.get("quantization_config") or config.get("compression_config")
    if not how:
        return None
    method = how.get("quant_method", "") if isinstance(how, Mapping) else ""
    why = "they can be neither trained nor synced" if learns else "its log-probs would not be those of the model itself"
    return (
        f"its weights are quantized ({method or 'quantization_config'}): {why}",
        "name the model that it was made from, in bf16 or fp32",
    )


def causal_kinds() -> Mapping[str, tuple[str, ...]]:
    """model_type → classes that transformers builds for it; empty where that cannot be told."""
    return _kinds(_CAUSAL)


@cache
def _kinds(table: str) -> Mapping[str, tuple[str, ...]]:
    root = transformers_folder()
    if root is None:
        return {}
    try:
        source = (root / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
        found = re.search(rf"^{table} = OrderedDict\(\s*(\[.*?^    \])", source, re.DOTALL | re.MULTILINE)
        pairs = ast.literal_eval(found[1]) if found else []
    except (OSError, ValueError, SyntaxError):
        return {}
    return {kind: (names,) if isinstance(names, str) else tuple(names) for kind, names in pairs}

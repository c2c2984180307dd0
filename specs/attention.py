"""Decides which attention a model computes, for check-config and for the process that builds the model.

`decide` takes what is known (packages of the role's interpreter, device, dtype, shape of the model) and returns what
will be in effect, and why. `auto` is the best that works; what is asked for by name works or is a problem: it is never
replaced. Where no GPU can be asked, the answer says what it depends on.

flash_attention_3 and the kernels of the hub are never `auto`'s choice: they are made for one generation of GPUs, or
are code that is downloaded. Neither is flex_attention, which compiles itself at its first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specs.model_facts import merged_config

Attention = Literal[
    "auto",
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
    "kernels-community/flash-attn2",
    "kernels-community/flash-attn3",
    "kernels-community/vllm-flash-attn3",
]
# Packages whose versions decide. transformers looks for flash attention under these names only.
PACKAGES = ("torch", "transformers", "flash-attn", "flash-attn-3", "kernels")
AUTO = ("flash_attention_2", "sdpa", "eager")  # best first
_DECODES = ("sdpa", "eager")  # over the cache of the torch rollout engine
_OLDEST_FLASH_2 = "2.3.3"
_OLDEST_SOFTCAP = "2.6.0"  # flash-attn learned softcap here
_OLDEST_FLEX = "2.5"  # of torch
_LARGEST_HEAD = 256
_SMALLEST_FLEX_HEAD = 16  # of its kernel for GPUs
_SOFTCAP, _SINKS = "softcap", "attention sinks"
# Models with a learned sink in every softmax; configs do not say so.
_MODELS_WITH_SINKS = {"deepseek_v4", "flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"}
_MODELS_WITH_SOFTCAP = {"gemma2", "vaultgemma"}  # where the config leaves it out


@dataclass(frozen=True)
class _Kernel:
    """Flash attention for GPUs from compute capability `first` to `last`, from a package."""

    package: str
    first: tuple[int, int]
    last: tuple[int, int] | None
    function: str

    @property
    def gpus(self) -> str:
        """Name the GPUs it runs on."""
        if self.first == self.last:
            return f"an {_sm(self.first)} GPU"
        return f"an {_sm(self.first)} GPU or a newer one" + (f", up to {_sm(self.last)}" if self.last else "")

    def runs_on(self, capability: tuple[int, int]) -> bool:
        return self.first <= capability and (self.last is None or capability <= self.last)


def _sm(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


_HUB = "flash_attn_varlen_func of {}"
_KERNELS = {
    "flash_attention_2": _Kernel("flash-attn", (8, 0), None, "flash_attn.flash_attn_varlen_func"),
    "flash_attention_3": _Kernel("flash-attn-3", (9, 0), (9, 0), "flash_attn_interface.flash_attn_varlen_func"),
    **{
        name: _Kernel("kernels", first, last, _HUB.format(name))
        for name, first, last in (
            ("kernels-community/flash-attn2", (8, 0), None),
            ("kernels-community/flash-attn3", (9, 0), (9, 0)),
            ("kernels-community/vllm-flash-attn3", (8, 0), (9, 0)),
        )
    },
}
FLASH = tuple(_KERNELS)  # implementations that take packed sequences by their lengths
_FUNCTIONS = {
    "eager": "eager_attention_forward of the model's own file",
    "sdpa": "backends.packed.packed_attention.sdpa_by_layout",
    "flex_attention": "torch.nn.attention.flex_attention.flex_attention",
}


@dataclass(frozen=True)
class AttentionFacts:
    """Facts that a decision rests on. Unknown: None, 0 or empty; nothing is refused for what is unknown."""

    device: Literal["cpu", "cuda"]
    dtype: str  # of the forward pass
    learns: bool  # whether a backward pass is computed
    role: str = ""  # for the words of a problem
    decodes: bool = False  # over the key-value cache of the torch rollout engine
    versions: Mapping[str, str] | None = None  # of `PACKAGES` in the role's interpreter
    capability: tuple[int, int] | None = None  # of the GPU
    head_dim: int = 0
    scores: str = ""  # what the model does to its scores besides scaling them (`score_changes`)
    not_offered: tuple[str, ...] = ()  # implementations that the model's class does not have


@dataclass(frozen=True)
class Decision:
    """`implementation` will be in effect and calls `function`. With a `problem` nothing can be built as asked."""

    asked: str
    implementation: str
    function: str
    why: str
    problem: str = ""
    hint: str = ""


def decide(asked: str, facts: AttentionFacts) -> Decision:
    """Decide a role's attention, for what its spec asks."""
    if asked != "auto":
        problem, hint = _obstacle(asked, facts)
        if problem:
            return Decision(asked, asked, _function(asked), "", problem, hint or _another(asked, facts))
        return Decision(asked, asked, _function(asked), ", ".join(filter(None, ("as asked", _condition(asked, facts)))))
    passed_over: list[str] = []
    for name in _DECODES if facts.decodes else AUTO:
        problem, _ = _obstacle(name, facts)
        if not problem:
            best = "what the torch rollout engine decodes with" if facts.decodes else "the fastest here"
            why = "; ".join(passed_over) or ", ".join(filter(None, (best, _condition(name, facts))))
            return Decision(asked, name, _function(name), why)
        passed_over.append(f"{name} {problem}")
    problem = f"nothing works: {'; '.join(passed_over)}"
    return Decision(asked, "sdpa", _function("sdpa"), "", problem, _another("", facts))


def score_changes(config: Mapping[str, Any]) -> str:
    """Name what a model does to its attention scores besides scaling them, by its `config.json`; or nothing."""
    merged = merged_config(config)
    model_type = merged.get("model_type")
    if merged.get("attn_logit_softcapping", model_type in _MODELS_WITH_SOFTCAP):
        return _SOFTCAP
    return _SINKS if model_type in _MODELS_WITH_SINKS else ""


def _function(name: str) -> str:
    return _KERNELS[name].function if name in _KERNELS else _FUNCTIONS[name]


def _condition(name: str, facts: AttentionFacts) -> str:
    """Name what the answer depends on and is unknown here, or what a user would not expect."""
    if name == "flex_attention" and facts.device == "cpu":
        return "unfused on the CPU: slow, for comparisons"
    if name not in _KERNELS:
        return ""
    kernel = _KERNELS[name]
    package = f"{kernel.package} in {facts.role or 'the role'}'s interpreter"
    unknown = [package] if facts.versions is None else []
    unknown += [kernel.gpus] if facts.capability is None else []
    return f"if there is {' and '.join(unknown)}" if unknown else ""


def _obstacle(name: str, facts: AttentionFacts) -> tuple[str, str]:
    """Return why an implementation cannot be used, or empty; and what to do about it, if not to take another."""
    if facts.decodes and name not in _DECODES:
        hint = f'set rollout.attn_implementation = "{_DECODES[bool(facts.scores)]}"; trainers may keep another'
        return "is not what the torch rollout engine decodes with: it runs sdpa or eager over a cache of its own", hint
    if name == "sdpa" and facts.scores:
        return f"does not compute {facts.scores}, which this model has", ""
    if name in facts.not_offered:
        return "is not offered by this model's class", ""
    if name in _KERNELS:
        return _flash_obstacle(name, _KERNELS[name], facts)
    if name == "flex_attention":
        return _flex_obstacle(facts), ""
    return "", ""


def _flash_obstacle(name: str, kernel: _Kernel, facts: AttentionFacts) -> tuple[str, str]:
    who = facts.role or "the role"
    if facts.device != "cuda":
        return f"needs a GPU, and {who} runs on the CPU", f'write "sdpa" or "auto", or give {who} devices'
    if facts.dtype != "bf16":
        hint = f'set {facts.role}.dtype = "bf16"' if facts.role else ""
        return f"works in bf16 only, and {who} is {facts.dtype}", hint
    if facts.head_dim > _LARGEST_HEAD:
        return f"takes heads of at most {_LARGEST_HEAD}, and the model's have {facts.head_dim}", ""
    if facts.capability is not None and not kernel.runs_on(facts.capability):
        return f"needs {kernel.gpus}, and this one is {_sm(facts.capability)}", ""
    if facts.scores == _SINKS and kernel.package != "kernels":
        return f"does not compute {facts.scores}, which this model has", ""
    return _package_obstacle(name, kernel, facts)


def _package_obstacle(name: str, kernel: _Kernel, facts: AttentionFacts) -> tuple[str, str]:
    if facts.versions is None:
        return "", ""
    installed = facts.versions.get(kernel.package, "")
    if not installed:
        whose = f"{facts.role}'s" if facts.role else "the role's"
        message = f"needs the package {kernel.package}, which is not installed in {whose} interpreter"
        return message, f'install it there, or write "auto"{_from_the_hub(name, facts.versions)}'
    oldest = _OLDEST_SOFTCAP if facts.scores == _SOFTCAP else _OLDEST_FLASH_2
    if kernel.package == "flash-attn" and _older(installed, oldest):
        return f"needs flash-attn {oldest} for this model, and {installed} is installed", "install a newer flash-attn"
    return "", ""


def _from_the_hub(name: str, versions: Mapping[str, str]) -> str:
    """Name the kernel of the hub that could be had: it is code to be asked for by name, never taken by itself."""
    if "kernels" not in versions or name != "flash_attention_2":
        return ""
    return ', or ask by name for the code that would be downloaded: "kernels-community/flash-attn2"'


def _flex_obstacle(facts: AttentionFacts) -> str:
    if facts.device == "cpu" and facts.learns:
        return f"has no backward pass on the CPU, where {facts.role or 'the role'} learns"
    if facts.device == "cpu" and facts.scores == _SINKS:
        return f"does not compute {facts.scores} on the CPU, which this model has"
    if facts.device == "cuda" and 0 < facts.head_dim < _SMALLEST_FLEX_HEAD:
        return f"takes heads of at least {_SMALLEST_FLEX_HEAD} on a GPU, and the model's have {facts.head_dim}"
    torch = facts.versions.get("torch", "") if facts.versions is not None else ""
    if torch and _older(torch, _OLDEST_FLEX):
        return f"needs torch {_OLDEST_FLEX}, and {torch} is installed"
    return ""


def _another(name: str, facts: AttentionFacts) -> str:
    """Return a hint: what would work instead."""
    works = [
        other for other in (_DECODES if facts.decodes else AUTO) if other != name and not _obstacle(other, facts)[0]
    ]
    if works:
        return f'write "{works[0]}" or "auto"'
    return "take another rollout engine for this model" if facts.decodes else "take another device or dtype"


def _older(installed: str, oldest: str) -> bool:
    from packaging.version import InvalidVersion, Version  # every role imports this file, few have the package

    try:
        return Version(installed) < Version(oldest)
    except InvalidVersion:
        return False  # a build of one's own: transformers has the last word

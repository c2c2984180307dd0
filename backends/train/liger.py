"""Liger's kernels (Hsu et al. 2024) in a trained model: its own patches where it knows the model, proven at build.

Liger's losses are not used: the head of training (`backends/train/lm_head.py`) never makes all logits, and returns
log-probs and entropy besides.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from backends.hf.score_layer import backbone
from backends.train.rms_norm import use_fast_norms
from specs.errors import ModelError
from specs.packages import installed_here
from specs.schema.engines.kernel_choice import PACKAGES, Asked, choose_kernels

# Sizes of the twin that proves the patches: kernels do not depend on them.
_SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "pad_token_id": None,
}
_GAPS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the largest number


@dataclass(frozen=True)
class HeldKernels:
    """Say what a model's modules compute with: `name` ("torch": their own code), and how many of each kind are
    replaced."""

    name: str
    replaced: Mapping[str, int] = field(default_factory=dict)

    def prove(self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
        """Compare values and gradients of a small model of the same class with and without the patches, on this device.
        Raises ModelError where they differ."""
        if self.name != "liger":
            return
        twin = _twin(model, device, dtype)
        theirs = _computed(twin)
        _patch(twin)
        gap = max(_gap(*pair) for pair in zip(_computed(twin), theirs, strict=True))
        if not gap < _GAPS.get(dtype, 5e-2):
            raise ModelError(
                f"Liger's kernels compute other numbers than {type(model).__name__} does in {dtype} (relative gap "
                f"{gap:.2g})",
                hint='write kernels = "torch", and report the versions of liger-kernel and triton',
            )


def hold_kernels(model: PreTrainedModel, asked: Asked, device: str) -> HeldKernels:
    """Patch a model's modules with the kernels that were asked for; `HeldKernels.prove` checks them once the device
    computes. Raises ModelError where `liger` cannot be had."""
    on_gpu = device != "cpu"
    choice = choose_kernels(asked, on_gpu=on_gpu, versions=installed_here(PACKAGES))
    if choice.problem:
        raise ModelError(f"kernels {asked}: {choice.problem}", hint=choice.hint)
    if choice.implementation == "liger":
        if _patch(model):
            replaced = Counter(module._get_name() for module in model.modules() if "forward" in vars(module))
            return HeldKernels("liger", dict(replaced))
        if asked == "liger":
            hint = 'write kernels = "torch" or "auto"'
            raise ModelError(f"liger-kernel has no patch for {type(model).__name__}", hint=hint)
    use_fast_norms(model)
    return HeldKernels("torch")


def _patch(model: PreTrainedModel) -> bool:
    """Let Liger replace the norms and MLPs of this model; return whether it knows the model's type."""
    from liger_kernel.transformers import monkey_patch

    if model.config.model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        return False
    names = vars(sys.modules[type(model).__module__])
    own = dict(names)
    # The rotation is a function of transformers' module: to replace it would change every model of the process.
    off = {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
    try:
        monkey_patch._apply_liger_kernel_to_instance(model, **off)
    except Exception as error:  # another package's code over a model of any kind
        message = f"liger-kernel fails to patch {type(model).__name__}: {error!r}"
        raise ModelError(message, hint='write kernels = "torch"') from error
    names.update(own)  # it also puts its classes under the names of transformers'
    return True


def _twin(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Build a small model of the same class, with random weights and norms that are not 1."""
    config = copy.deepcopy(model.config)
    for name, size in _SMALL.items():
        if hasattr(config, name):
            setattr(config, name, size)
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = kinds[: _SMALL["num_hidden_layers"]]
    config._attn_implementation = "eager"
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        twin: PreTrainedModel = type(model)(config)
        for parameter in twin.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, 0.05)
    return nn.Module.to(twin, device=device, dtype=dtype)


def _computed(model: PreTrainedModel) -> list[Tensor]:
    """Return the hidden states of a fixed sequence and the gradients of all parameters."""
    model.zero_grad()
    tokens = torch.arange(24, device=model.device)[None]
    hidden = backbone(model)(input_ids=tokens, use_cache=False)[0]
    weights = torch.sin(torch.arange(hidden.numel(), device=hidden.device, dtype=torch.float32)).view(hidden.shape)
    (hidden.float() * weights).sum().backward()
    return [hidden.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


def _gap(ours: Tensor, theirs: Tensor) -> float:
    largest: Any = theirs.float().abs().max().clamp_min(1e-30)
    return float((ours.float() - theirs.float()).abs().max() / largest)

"""Parameters that a model's class never trains, such as the biases by which Ernie's routers choose experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel


@contextmanager
def constants_as_buffers() -> Iterator[None]:
    """Make buffers of them, in the models that are built within, as most families have them: no optimizer decays them,
    and all that is a parameter may learn. (transformers itself reads them from files as ones that learn.) Buffers of
    files are read in fp32, as every engine holds them: in bf16 a router's biases would choose other experts."""
    plan_of: Any = getattr(PreTrainedModel, "_get_dtype_plan", lambda model, dtype: {})  # the first 5.x ask for none

    def plan(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
        held = chain(model.named_buffers(), model.named_parameters())
        named = [name for name, each in held if each.is_floating_point() and not each.requires_grad]
        return {**plan_of(model, dtype), **dict.fromkeys(named, torch.float32)}

    found: list[tuple[nn.Module, str, Tensor]] = []

    def note(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.requires_grad:
            found.append((module, name, parameter.data))

    handle = register_module_parameter_registration_hook(note)
    PreTrainedModel._get_dtype_plan = plan  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        handle.remove()
        PreTrainedModel._get_dtype_plan = plan_of  # type: ignore[method-assign]
    for module, name, made in found:
        if (parameter := module._parameters.pop(name, None)) is not None:
            # Where parameters lose their memory as they are made, buffers keep theirs.
            module.register_buffer(name, made if parameter.is_meta else parameter.data)

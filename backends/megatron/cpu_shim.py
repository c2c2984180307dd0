"""Lets Megatron-core 0.16 run on the CPU, over gloo. Only where there is no CUDA; a rank says so.

Megatron-core names the CUDA device in the code of its collectives, buffers, schedules and optimizers. These patches
give it the CPU there and nothing else: what is computed is its own code. Import it before anything of `megatron.core`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_state: list[TorchFunctionMode] = []  # the mode that is entered, once in a process


class _CudaMeansCpu(TorchFunctionMode):
    """Tensors that are asked for on "cuda" are made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": _CPU}
        return function(*args, **kwargs)


def install() -> None:
    """Patch this process, once. Raises RuntimeError where there is CUDA."""
    if torch.cuda.is_available():
        raise RuntimeError("the CPU shim is for machines without CUDA")
    if _state:
        return
    print("megatron: no CUDA here, so Megatron-core runs on the CPU, through a shim", file=sys.stderr, flush=True)
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *_, **__: None
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.default_generator.manual_seed
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    _name_types_as_cuda()
    mode: Any = _CudaMeansCpu()
    mode.__enter__()
    _state.append(mode)
    from megatron.core import jit

    jit.disable_jit_fuser()  # else torch.compile makes C++ out of small functions
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _name_types_as_cuda() -> None:
    """Its optimizers ask whether `tensor.type()` is "torch.cuda.FloatTensor"."""
    named = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = named(self, *args, **kwargs)
        on_cpu = isinstance(name, str) and not name.startswith("torch.cuda.")
        return name.replace("torch.", "torch.cuda.", 1) if on_cpu else name

    torch.Tensor.type = type_  # type: ignore[assignment, method-assign]

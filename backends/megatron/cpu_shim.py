"""Lets Megatron-core 0.16 run on the CPU, over gloo. Only where there is no CUDA; a rank says so.

Megatron-core names the CUDA device in the code of its collectives, buffers, schedules and optimizers. These patches
give it the CPU there and nothing else: what is computed is its own code. Import it before anything of `megatron.core`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import cache, wraps
from typing import Any

import torch
from torch import distributed as dist
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")


class _GlooOnOneDevice(dist.ProcessGroupGloo):
    """Each device has a thread that wakes a hundred times a second, and Megatron-core makes a group for every axis."""

    _device: Any = None
    _Options: Any = dist.ProcessGroupGloo._Options  # type: ignore[attr-defined]

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        _GlooOnOneDevice._device = _GlooOnOneDevice._device or self.create_default_device()
        options = self._Options()
        options._devices, options._timeout = [_GlooOnOneDevice._device], timeout
        super().__init__(store, rank, size, options)


class _OneStream:
    """Stand in for what the token dispatcher does with streams; the CPU has one. Also the event that it records."""

    def wait_stream(self, _: _OneStream) -> None: ...

    def record_event(self) -> _OneStream:
        return self

    def synchronize(self) -> None: ...


@cache
def install() -> None:
    """Patch this process, once. Raises RuntimeError where there is CUDA."""
    if torch.cuda.is_available():
        raise RuntimeError("the CPU shim is for machines without CUDA")
    print("megatron: no CUDA here, so Megatron-core runs on the CPU, through a shim", file=sys.stderr, flush=True)
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *_, **__: None
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.Stream = _OneStream
    cuda.current_stream = _OneStream
    cuda.stream = lambda _: nullcontext()
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    c10d: Any = dist.distributed_c10d
    c10d.ProcessGroupGloo = _GlooOnOneDevice
    _name_types_as_cuda()
    for name, make in [*vars(torch).items()]:
        if callable(make) and (name.endswith("_like") or make in _device_constructors()):
            setattr(torch, name, _on_cpu(make))
    _import_without_compiling()
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    from megatron.core.transformer.moe import token_dispatcher

    # As on a GPU: what is sent to which expert are numbers then, no tensors, which collectives do not take.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda given, as_numpy=False, **_: (
        given.numpy() if as_numpy and isinstance(given, torch.Tensor) else given
    )
    from megatron.core.tensor_parallel import mappings

    mappings._gather_along_first_dim = _but_uneven(mappings._gather_along_first_dim, _gather_uneven)
    mappings._reduce_scatter_along_first_dim = _but_uneven(mappings._reduce_scatter_along_first_dim, _sum_uneven)


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """Have tensors that are asked for on "cuda" made on the CPU. (A mode would see every use of every tensor, too.)"""

    @wraps(make)
    def made(*args: Any, **named: Any) -> Any:
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = _CPU
        return make(*args, **named)

    return made


def _import_without_compiling() -> None:
    """Else torch.compile makes C++ out of small functions, once for each length of a row. Megatron-core marks those of
    modules that it imports at once before it can be told."""
    compiled, torch.compile = torch.compile, lambda function: function  # type: ignore[assignment]
    try:
        from megatron.core import jit
    finally:
        torch.compile = compiled
    jit.disable_jit_fuser()


def _but_uneven(even: Callable[..., Any], uneven: Callable[..., Any]) -> Callable[..., Any]:
    """Its own collective, but for the numbers of rows that ranks of an expert have of each other's tokens."""

    def either(rows: torch.Tensor, group: Any, sizes: Sequence[int] | None = None, *more: Any, **named: Any) -> Any:
        if sizes is None or group.size() == 1:
            return even(rows, group, sizes, *more, **named)
        return uneven(rows, group, sizes)

    return either


def _gather_uneven(rows: torch.Tensor, group: Any, sizes: Sequence[int]) -> torch.Tensor:
    """gloo gathers from ranks that have as many rows."""
    filled = rows.new_zeros(max(sizes), *rows.shape[1:])
    filled[: len(rows)] = rows
    parts = [torch.empty_like(filled) for _ in sizes]
    dist.all_gather(parts, filled, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _sum_uneven(rows: torch.Tensor, group: Any, sizes: Sequence[int]) -> torch.Tensor:
    """This rank's rows of the sum."""
    total = rows.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    own: torch.Tensor = total.split(list(sizes))[group.rank()]
    return own.clone()


def _name_types_as_cuda() -> None:
    """Its optimizers ask whether `tensor.type()` is "torch.cuda.FloatTensor"."""
    named = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = named(self, *args, **kwargs)
        on_cpu = isinstance(name, str) and not name.startswith("torch.cuda.")
        return name.replace("torch.", "torch.cuda.", 1) if on_cpu else name

    torch.Tensor.type = type_  # type: ignore[assignment, method-assign]

"""`with walk():` around code for a GPU: every operator is put on the timeline, with what it reads and writes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from simulated_device.timeline import HOST, Timeline, line
from simulated_device.torch_cuda import current_stream, device_library, span_of, timeline

# Operators for whose result the host waits: numbers, and shapes that depend on values.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "bincount"}
NO_DATA = ("empty", "new_empty", "set_", "resize_")  # they touch no byte
MOST = 4096


@contextmanager
def walk(*, device: int = 0) -> Iterator[Timeline]:
    """Follow what a rank does, which is to use this device; what is wrong is in `faults` afterwards."""
    timeline.begin_anew()
    mode = _Follower(device)
    mode.forget()
    with mode:
        yield timeline


class _Follower(TorchDispatchMode):
    def __init__(self, device: int) -> None:
        super().__init__()
        self.device = device
        self.freed = (ctypes.c_void_p * MOST)()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # seen again, as what it does to this rank's rows
        if torch.is_inference_mode_enabled() and func.name() != "aten::scaled_dot_product_attention":
            with self:  # what is put together from other operators comes whole
                if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return out
        with timeline.lock:
            self.forget()
            given = [(tensor, span_of(tensor), writes) for tensor, writes in _tensors(func._schema, args, kwargs)]
        out = func(*args, **kwargs)
        with timeline.lock:
            self.forget()
            self._follow(func, args, kwargs, given, out)
        return out

    def forget(self) -> None:
        while count := device_library().take_freed(self.freed, MOST):
            for address in self.freed[:count]:
                timeline.free(address)

    def _follow(self, func: Any, args: Any, kwargs: Any, given: list[Any], out: Any) -> None:
        known = {span[0] for _, span, _ in given}
        made = [(tensor, span_of(tensor), True) for tensor in _flat(out)]
        made = [each for each in made if each[1][0] not in known]
        touched = [each for each in (*given, *made) if each[0].is_cuda or each[0].is_pinned()]
        if not touched:
            return
        name, where = func._schema.name.removeprefix("aten::"), line()
        device = next((tensor.device for tensor, _, _ in touched if tensor.is_cuda), None)
        stream = HOST if device is None else current_stream(device).number
        if device is not None and device.index != self.device:
            timeline.faults.append(f"{name} at {where} is on {device}, and this rank's is cuda:{self.device}")
        if name == "_fused_adamw_" and {tensor.dtype for tensor in args[0]} != {torch.float32}:
            timeline.faults.append(f"{name} at {where} steps weights that are not fp32: these are no masters")
        timeline.begin(stream)
        for tensor, (address, _), _ in made:
            if (tensor.is_cuda or tensor.is_pinned()) and address not in timeline.memory:
                timeline.allocate(address, stream if tensor.is_cuda else HOST, name, where)
        for _, (address, span), writes in touched if not name.startswith(NO_DATA) else ():
            if writes is not None:
                timeline.use(address, span, stream, name, where, writes=writes)
        if stream != HOST:
            on_host = [tensor for tensor, _, _ in (*given, *made) if not tensor.is_cuda]
            self._count(name, where, stream, on_host, args, kwargs)

    def _count(self, name: str, where: str, stream: int, on_host: list[Tensor], args: Any, kwargs: Any) -> None:
        """Count what goes between host and device, and whether the host waits for it."""
        if name in ("copy_", "_to_copy") and on_host:
            asynchronous = kwargs.get("non_blocking", len(args) > 2 and args[2] is True)
            waits = not asynchronous or not all(tensor.is_pinned() for tensor in on_host)
        elif name in WAITING or (name.startswith(("index", "_index_put")) and _looks_at_host(args)):
            waits = True
        else:
            return
        timeline.copies[where] += 1
        if waits:
            timeline.host_waits(timeline.clocks[stream])


def _looks_at_host(args: Any) -> bool:
    """Return whether indices are counted on the host (masks), or come from there."""
    indices = [each for each in args[1] or () if each is not None] if isinstance(args[1], list | tuple) else []
    return any(not each.is_cuda or each.dtype in (torch.bool, torch.uint8) for each in indices)


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)


def _tensors(schema: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, bool | None]]:
    """Yield each tensor that is given, and whether it is written; None: its memory is not touched, as of a view."""
    for number, argument in enumerate(schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        writes = False if alias is None else True if alias.is_write else None
        for tensor in _flat(value):
            if tensor.numel():
                yield tensor, writes

"""Stand-ins for what `torch.cuda` cannot do without a driver. Streams and events write into a `Timeline`."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from simulated_device.timeline import HOST, Timeline, line

timeline = Timeline()
_numbers = itertools.count(10)
_thread = threading.local()
_loaded: list[ctypes.CDLL] = []


class Stream:
    """A queue of a device. Each device has one from the start, whose number is the device's."""

    def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None) -> None:
        self.device = torch.device("cuda", index_of(device))
        self.number = self.stream_id = self.cuda_stream = next(_numbers) if number is None else number

    def wait_stream(self, other: Stream) -> None:
        timeline.join(self.number, timeline.clocks[other.number])

    def wait_event(self, event: Event) -> None:
        timeline.join(self.number, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        timeline.host_waits(timeline.clocks[self.number])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.number == other.number

    def __hash__(self) -> int:
        return self.number


class Event:
    """A point in a stream. One that was never recorded holds nobody up."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Counter[int] = Counter()

    def record(self, stream: Stream | None = None) -> None:
        timeline.begin((stream or current_stream()).number)
        self.clock = Counter(timeline.clocks[(stream or current_stream()).number])

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        timeline.host_waits(self.clock)

    def query(self) -> bool:
        return all(timeline.clocks[HOST][stream] >= count for stream, count in self.clock.items())


def device_library() -> ctypes.CDLL:
    return _loaded[0]


def span_of(tensor: Tensor) -> tuple[int, tuple[int, int]]:
    """Return where its memory begins, and between which bytes of it the tensor lies."""
    start = tensor.storage_offset()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().data_ptr(), (start * tensor.itemsize, (start + reach + 1) * tensor.itemsize)


def index_of(device: Any = None) -> int:
    index = torch.device("cuda" if device is None else device).index if not isinstance(device, int) else device
    return torch.cuda.current_device() if index is None else index


def current_stream(device: Any = None) -> Stream:
    streams: dict[int, Stream] = _thread.__dict__.setdefault("streams", {})
    return streams.setdefault(index_of(device), Stream(device, number=index_of(device)))


@contextmanager
def stream(given: Stream | None) -> Iterator[None]:
    if given is None:
        yield
        return
    before = current_stream(given.device)
    _thread.streams[given.device.index] = given
    try:
        yield
    finally:
        _thread.streams[given.device.index] = before


class Graph:
    """What was called while it was captured; a replay calls it again, into the same memory."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            made = func(*args, **kwargs)
            if not any(value.alias_info for value in func._schema.returns):
                for old, new in zip(*map(tree_leaves, (out, made)), strict=True):
                    old.copy_(new)


class _Capture(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.graph.calls.append((func, args, kwargs or {}, out))
        return out


def captured(graph: Graph, **how: Any) -> _Capture:
    return _Capture(graph)


def install(library: ctypes.CDLL) -> None:
    """Put them in the place of torch's, before anything of ours is imported."""
    _loaded.append(library)

    def resize(storage: Any, nbytes: int) -> Any:
        if storage.device.type != "cuda":
            return resize_of_host(storage, nbytes)
        library.resize_storage(storage._cdata, nbytes)
        return storage

    def record_stream(tensor: Tensor, given: Stream) -> None:
        held = timeline.memory.get(tensor.untyped_storage().data_ptr())
        if held is not None:
            held.recorded.add(given.number)

    def numpy(tensor: Tensor, **how: Any) -> Any:
        if tensor.is_pinned():  # whoever has the array may read or write it from now on
            timeline.begin(HOST)
            timeline.use(*span_of(tensor), HOST, "numpy", line(), writes=True)
        return numpy_of_torch(tensor, **how)

    shared: dict[bytes, Any] = {}

    def share(storage: Any) -> tuple[Any, ...]:
        file = os.memfd_create("of a device")
        os.truncate(file, storage.nbytes())
        library.share_storage(storage._cdata, file, True)
        shared[handle := f"/proc/{os.getpid()}/fd/{file}".encode()] = weakref.ref(storage)
        return (0, handle, storage.nbytes(), 0, b"", 0, b"", False)

    def mapped(device: int, handle: bytes, nbytes: int, *rest: Any) -> Any:
        if handle in shared:  # of this process: at one address, whose uses are followed
            return shared.pop(handle)()
        storage = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}").untyped_storage()
        library.share_storage(storage._cdata, os.open(handle, os.O_RDWR), False)
        return storage

    def held(device: Any = None) -> int:
        return int(library.held_bytes())

    def nothing(device: Any = None) -> None: ...

    def exchange(device: int) -> int:
        before = int(library.current_device())
        library.set_device(before if device < 0 else device)
        return before

    def visible() -> list[str]:  # as CUDA, when it is first asked: a rank narrows them before
        return os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")

    resize_of_host, numpy_of_torch = torch.UntypedStorage.resize_, torch.Tensor.numpy
    patches: tuple[tuple[Any, dict[str, Any]], ...] = (
        (torch.UntypedStorage, {"resize_": resize, "_share_cuda_": share, "_new_shared_cuda": staticmethod(mapped)}),
        (torch.Tensor, {"record_stream": record_stream, "numpy": numpy}),
        (torch.cuda.nvtx, {"range_push": lambda message: 0, "range_pop": lambda: 0}),
        (
            torch.cuda,
            {
                "Stream": Stream,
                "Event": Event,
                "CUDAGraph": Graph,
                "graph": captured,
                "graph_pool_handle": lambda: (0, 0),
                "stream": stream,
                "current_stream": current_stream,
                "default_stream": lambda device=None: Stream(device, number=index_of(device)),
                "_exchange_device": exchange,
                "_maybe_exchange_device": exchange,
                "is_available": lambda: True,
                "is_initialized": lambda: True,
                "device_count": lambda: len(visible()),
                "current_device": lambda: library.current_device(),
                "set_device": lambda device: library.set_device(index_of(device)),
                "synchronize": lambda device=None: timeline.host_waits(timeline.everything()),
                **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_reserved"), held),
                "manual_seed": lambda seed: None,
                "default_generators": tuple(torch.Generator() for _ in range(8)),
                **dict.fromkeys(("_lazy_init", "reset_peak_memory_stats", "empty_cache", "ipc_collect"), nothing),
                "get_rng_state": lambda device=None: torch.get_rng_state(),
                "set_rng_state": lambda state, device=None: None,
                "get_device_capability": lambda device=None: (9, 0),
                "get_device_properties": lambda device=None: SimpleNamespace(
                    uuid=f"GPU-{visible()[index_of(device)]}", total_memory=2**36
                ),
                "is_bf16_supported": lambda including_emulation=True: True,
            },
        ),
    )
    for owner, names in patches:
        for name, value in names.items():
            setattr(owner, name, value)
    _kernels()
    _collectives()


class Nccl:
    """A group by itself, as `ProcessGroupNCCL` is one."""

    class Options:
        _timeout = timedelta(minutes=30)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._gloo = distributed.ProcessGroupGloo(store, rank, size, options._timeout)

    def allreduce(self, tensor: Tensor) -> Any:
        return self._gloo.allreduce(torch.ops.simulated.on_host(tensor))

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        return self._gloo.broadcast(torch.ops.simulated.on_host(tensor), root)


def _collectives() -> None:
    """In the place of NCCL: gloo, which is given the host's side of the same memory (device.cpp)."""
    real = distributed.init_process_group

    def init_process_group(backend: str | None = None, **how: Any) -> None:
        real("cpu:gloo,cuda:gloo" if backend == "nccl" else backend, **how)

    distributed.init_process_group = init_process_group
    distributed.ProcessGroupNCCL = Nccl


_KERNELS: list[torch.library.Library] = []  # they last as long as these do


def _kernels() -> None:
    """Attention as torch's CPU chooses it, so that numbers can be held against the CPU's to the bit; and what only a
    GPU has a kernel for."""
    aten = torch.ops.aten

    def attention(
        q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, causal: bool = False, **how: Any
    ) -> Tensor:
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        flash, plain = aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_attention_math
        if aten._fused_sdp_choice(q, k, v, mask, dropout, causal, **how) == 1:
            return flash(q, k, v, dropout, causal, attn_mask=mask, scale=how.get("scale"))[0]
        return plain(q, k, v, mask, dropout, causal, **how)[0]

    def addmm(self: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor, **factors: Any) -> Tensor:
        return out.copy_(self + a.to(out_dtype) @ b.to(out_dtype))  # a GPU rounds nothing before it adds

    def histc(self: Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> Tensor:
        return aten.histc(self.cpu().float(), bins, min, max).to(self.dtype).to(self.device)  # the CPU's takes no int

    aten_library = torch.library.Library("aten", "IMPL")
    aten_library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
    aten_library.impl("histc", histc, "CUDA", allow_override=True)
    aten_library.impl("addmm.dtype_out", addmm, "CUDA")
    _KERNELS.append(aten_library)

"""Runs inside vLLM's worker, next to the model: vLLM adds these methods to its worker class
(`worker_extension_cls`). With tensor parallelism every worker has a part of each weight."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from backends.hf.adapter_names import is_on_the_wire
from backends.vllm_rollout.lent_bytes import Lent
from backends.vllm_rollout.vllm_adapters import AdapterSlot
from backends.weights.checksum import hashing
from backends.weights.tensor_bytes import tensor_bytes, torch_dtype, typed, wire_dtype
from backends.weights.word_sum import read_totals, total_of_part
from specs.memory_parts import GIB


@dataclass(frozen=True)
class Piece:
    """A part of a weight, read back from vLLM's own tensor, and where in the whole weight it lies (in elements)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class SummedPiece:
    """Describe a `Piece`, with what it adds to the weight's `total` (`backends/weights/word_sum.py`) in place of the
    bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    total: int


_BLOCK_BYTES = 64 * 2**20  # of a weight that crosses nodes, on a GPU at a time
_DERIVED = ("W_UK_T", "W_UV")  # parameters that vLLM makes of others

# (name, dtype on the wire, shape)
WireName = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class WorkerModel:
    """Description of the model that this worker built."""

    model_class: str
    parameters: int  # of this worker, without vLLM's padding of the vocabulary; a tied one once
    dtypes: tuple[str, ...]
    attention: tuple[str, ...]  # vLLM's names of the backends that the layers hold
    attention_classes: tuple[str, ...]
    tied_embeddings: bool


class WorkerExtension:
    """Methods for `collective_rpc`. `self` is vLLM's worker."""

    vllm_config: Any
    device: torch.device
    model_runner: Any
    get_model: Any

    def rlctl_unlink_shared_memory(self) -> None:
        """Unlink the segments (8 MiB each) of vLLM's all-reduce on the CPU. Every worker maps them by now, and vLLM
        itself unlinks them only at an orderly end."""
        for segment in Path("/dev/shm").glob(f"{os.environ.get('VLLM_DIST_IDENT')}-*-cpushm_*"):
            segment.unlink(missing_ok=True)

    @torch.inference_mode()
    def rlctl_load(
        self, name: str, dtype: str, shape: tuple[int, ...], buffer: NDArray[np.uint8] | Lent
    ) -> list[Piece]:
        """Load a Hugging Face weight from wire bytes on the host, and read back every place that it was copied to."""
        (copies,) = self._rlctl_copies([((name, dtype, shape), buffer)])
        return [Piece(tuple(part.shape), part.stride(), first, tensor_bytes(own)) for own, part, first in copies]

    @torch.inference_mode()
    def rlctl_load_and_sum(
        self, weights: Sequence[tuple[WireName, Tensor | NDArray[np.uint8] | Lent]]
    ) -> list[list[SummedPiece]]:
        """Do the same as `rlctl_load`, for several weights, whose bytes are on this worker's device or in host memory.
        Of what was read back only sums leave the device. Raises RuntimeError naming a weight that vLLM refuses."""
        copies = self._rlctl_copies(weights)
        sums = [total_of_part(own, part.stride(), first) for each in copies for own, part, first in each]
        with hashing():
            totals = iter(read_totals(sums))
        return [
            [SummedPiece(tuple(p.shape), p.stride(), first, next(totals)) for _, p, first in each] for each in copies
        ]

    def _rlctl_copies(
        self, weights: Sequence[tuple[WireName, Tensor | NDArray[np.uint8] | Lent]]
    ) -> list[list[tuple[Tensor, Tensor, int]]]:
        """Load weights through the model's own loader, adapters into their places. Of each the copies that were made:
        vLLM's own tensor, the part of the weight that it now holds, and the first element of that in the weight.

        Fused projections and shards are up to vLLM: the copies of its loader are recorded, not guessed.
        """
        named = [
            (name, _wire_tensor(dtype, shape, self._rlctl_received(buffer) if isinstance(buffer, Lent) else buffer))
            for (name, dtype, shape), buffer in weights
        ]
        reached, copies = "", CopiesFrom([weight for _, weight in named])

        def reaching(adapters: bool) -> Iterator[tuple[str, Tensor]]:
            nonlocal reached
            for name, weight in named:
                if is_on_the_wire(name) == adapters:
                    reached = name
                    yield name, weight

        with copies:
            try:
                if not all(is_on_the_wire(name) for name, _ in named):
                    self.get_model().load_weights(reaching(adapters=False))
                for name, weight in reaching(adapters=True):
                    self.__dict__["_rlctl_slot"].write(name, weight)
            except (ValueError, KeyError, AssertionError, RuntimeError) as error:
                raise RuntimeError(f"weight {reached}: {error}") from error
        return [
            [(_as_sent(name, own, part), part, first) for own, part, first in each]
            for (name, _), each in zip(named, copies.found, strict=True)
        ]

    def _rlctl_received(self, lent: Lent) -> NDArray[np.uint8]:
        """Return bytes that the first node's process lends. Where workers are on several nodes, the first one maps them
        and sends them to the others by their own group: by NCCL between GPUs."""
        if self.vllm_config.parallel_config.nnodes == 1:
            return lent.mapped()
        from vllm.distributed.parallel_state import get_world_group

        group = get_world_group()
        bytes_U = lent.mapped() if group.rank_in_group == 0 else np.empty(lent.nbytes, dtype=np.uint8)
        for start in range(0, lent.nbytes, _BLOCK_BYTES):
            block_U = torch.from_numpy(bytes_U[start : start + _BLOCK_BYTES])
            on_device = block_U.to(self.device)
            torch.distributed.broadcast(on_device, group.first_rank, group=group.device_group)
            if group.rank_in_group > 0:
                block_U.copy_(on_device)
        return bytes_U

    def rlctl_derive(self) -> None:
        """Make again what vLLM makes of weights when it starts: the two parts of `kv_b_proj` of latent attention."""
        for layer in self._attention_layers():
            if hasattr(layer, "W_UK_T"):
                layer.process_weights_after_loading(self.vllm_config.model_config.dtype)

    def rlctl_clear_adapters(self, rank: int, layers: tuple[str, ...]) -> None:
        """Make room for one set of adapters of `rank`, all zero. Raises ModelError where vLLM has none for one of
        `layers`."""
        slot = self.__dict__.get("_rlctl_slot") or AdapterSlot(self.model_runner, rank)
        for layer in layers:
            slot.check(layer)
        slot.clear()
        self.__dict__["_rlctl_slot"] = slot

    def rlctl_temperature(self, temperature: float | None) -> None:
        """Divide logits by `temperature` where they leave the model, until None: vLLM reports log-probs of prompts
        without any temperature. In fp32, as vLLM's sampler does: bf16 would be rounded a second time."""
        model = self.get_model()
        model.__dict__.pop("compute_logits", None)
        if temperature is not None:
            compute_logits = model.compute_logits
            model.compute_logits = lambda *args, **kwargs: compute_logits(*args, **kwargs).float() / temperature

    def rlctl_release(self, tag: str) -> None:
        """Free the memory of "weights" or "kv_cache" under the tensors that use it. For platforms without vLLM's sleep
        mode."""
        released: dict[str, ReleasedCache | ReleasedWeights] = self.__dict__.setdefault("_rlctl_released", {})
        assert tag not in released, f"{tag} was released twice"
        weights, cache = self.get_model().parameters(), self.model_runner.kv_caches
        released[tag] = ReleasedCache(cache) if tag == "kv_cache" else ReleasedWeights(weights)

    def rlctl_reclaim(self, tag: str) -> None:
        """Give the tensors of `tag` memory again. What was in it is gone."""
        self.__dict__["_rlctl_released"].pop(tag).restore()

    def _attention_layers(self) -> list[Any]:
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        return [layer for layer in layers if hasattr(layer, "kv_cache") and hasattr(layer, "get_attn_backend")]

    def rlctl_memory(self) -> tuple[float, float]:
        """GiB that this worker holds of its GPU, and the most that it has held. torch counts what vLLM's allocator has
        put to sleep as reserved: the addresses stay, the pages are gone."""
        from vllm.device_allocator.cumem import CuMemAllocator

        allocator = CuMemAllocator.instance
        allocations = [] if allocator is None else list(allocator.pointer_to_data.values())
        asleep = sum(each.handle[1] for each in allocations if each.is_asleep)
        return (torch.cuda.memory_reserved() - asleep) / GIB, torch.cuda.max_memory_reserved() / GIB

    def rlctl_describe(self) -> WorkerModel:
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        model: nn.Module = self.get_model()
        tables = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
        layers = self._attention_layers()
        classes = {type(getattr(layer, "impl", layer)) for layer in layers}  # a layer with a state is its own
        return WorkerModel(
            model_class=type(model).__name__,
            parameters=_count(model, padded=tables),
            dtypes=tuple(sorted({wire_dtype(p.dtype) for p in model.parameters()})),
            attention=tuple(sorted({layer.get_attn_backend().get_name() for layer in layers})),
            attention_classes=tuple(sorted(f"{one.__module__}.{one.__qualname__}" for one in classes)),
            tied_embeddings=len({id(table.weight) for table in tables}) == 1,
        )


def _as_sent(name: str, own: Tensor, part: Tensor) -> Tensor:
    """Return what vLLM's tensor says that was sent: itself, or, of decays of Mamba layers, which vLLM keeps as
    -exp(A_log), the part that gives them to the bit."""
    if name.endswith(".A_log") and torch.equal(own, -part.float().exp()):
        return part
    return own


class CopiesFrom(TorchDispatchMode):
    """Watches `copy_` out of the memory of some contiguous tensors, which may be parts of one memory. `found` has for
    each of them (target, view of the source, its first element in the source), in order."""

    def __init__(self, sources: Sequence[Tensor]) -> None:
        super().__init__()
        self.found: list[list[tuple[Tensor, Tensor, int]]] = [[] for _ in sources]
        self._place = sorted((source.data_ptr(), source.nbytes, i) for i, source in enumerate(sources) if source.nbytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            target, part = args[:2]
            position = bisect_right(self._place, part.data_ptr(), key=lambda place: place[0]) - 1
            if position >= 0:
                first_byte, nbytes, index = self._place[position]
                behind = part.data_ptr() - first_byte
                if behind < nbytes:
                    self.found[index].append((target, part, behind // part.itemsize))
        return out


class ReleasedCache:
    """Memory that tensors had, views of it too. They keep their shapes, and are not to be touched until `restore`."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self.storages = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self.storages:
            storage.resize_(0)

    def restore(self) -> None:
        for storage, nbytes in self.storages:
            storage.resize_(nbytes)


class ReleasedWeights:
    """Memory that parameters had. Not by their storage: memory that numpy has seen cannot be resized."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [(parameter, parameter.shape, parameter.stride()) for parameter in parameters]
        for parameter, _, _ in self.parameters:
            parameter.data = parameter.data.new_empty(0)

    def restore(self) -> None:
        for parameter, shape, strides in self.parameters:
            parameter.data = torch.empty_strided(shape, strides, dtype=parameter.dtype, device=parameter.device)


def _wire_tensor(dtype: str, shape: tuple[int, ...], buffer: Tensor | NDArray[np.uint8]) -> Tensor:
    """Wire bytes as a tensor; a view where that can be. A buffer may be read-only shared memory; it is only read."""
    if not isinstance(buffer, Tensor):
        buffer = torch.from_numpy(buffer if buffer.flags.writeable else buffer.copy())
    return typed(buffer, torch_dtype(dtype)).view(shape)


def _count(model: nn.Module, padded: list[Any]) -> int:
    count, seen = 0, set()
    modules: Iterable[Any] = model.modules()
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or name in _DERIVED:
                continue
            seen.add(id(parameter))
            count += parameter.numel()
            if module in padded:
                extra_rows = parameter.shape[0] - module.org_vocab_size
                count -= extra_rows * parameter[0].numel()
    return count

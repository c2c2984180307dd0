"""Locates a rank's partition in DeepSpeed's memory, as runs of elements of named weights.

Stages 1 and 2 lay a group's parameters out one after another and give each rank an equal slice of that flat buffer.
Stage 3 shards every parameter into equal parts (the last one padded) and lays a rank's parts out one after another.
Either way a rank's fp32 master weights are one flat tensor per group, and Adam's moments lie like them.

Written against DeepSpeed 0.19: these are its internal names, for its public functions gather whole tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from backends.train.tensor_shards import Shard, whole
from backends.ulysses.sequence_group import all_gather


@dataclass(frozen=True)
class Run:
    """Elements `start` … `start + count - 1` of a weight: elements `offset` … of flat group `group`."""

    name: str
    parameter: nn.Parameter
    group: int
    offset: int
    start: int
    count: int

    def shard(self, name: str, flats: list[Tensor]) -> Shard:
        flat = flats[self.group].detach()[self.offset : self.offset + self.count]
        return Shard(name, full_shape(self.parameter), self.start, flat)


class Partitions(ABC):
    """A rank's part of a model under ZeRO. `optimizer`: DeepSpeed's wrapper; `weights`: what `named_weights` says."""

    def __init__(self, optimizer: Any, weights: Mapping[str, Tensor]) -> None:
        self.optimizer = optimizer
        self.weights = weights
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.names = {id(tensor): name for name, tensor in weights.items()}
        self.runs = list(self._runs())
        learned = {id(p) for group in self._groups() for p in group}
        self.learned = [name for name, tensor in weights.items() if id(tensor) in learned]

    @property
    @abstractmethod
    def masters(self) -> list[Tensor]:
        """The flat fp32 master weights of each group."""

    @property
    @abstractmethod
    def shards(self) -> int:
        """Into how many parts the master weights are sharded, read back from the sizes of what is there."""

    @abstractmethod
    def _groups(self) -> list[list[nn.Parameter]]: ...

    @abstractmethod
    def _runs(self) -> Iterator[Run]: ...

    @abstractmethod
    def refresh(self) -> None:
        """Bring what the forward pass reads up to date with the master weights. All ranks call it."""

    @abstractmethod
    def full(self, name: str, *, master: bool, sent: torch.dtype | None = None) -> Tensor:
        """A weight whole, on the device: its master copy where there is one, or what the forward pass reads. All ranks
        call it. `sent`: to what parts may be cast before they travel."""

    @abstractmethod
    def _frozen(self, name: str, tensor: Tensor) -> Shard | None: ...

    @abstractmethod
    def compute_tensors(self) -> list[Tensor]:
        """Memory that the forward pass reads, besides the master weights."""

    @abstractmethod
    def gradient_tensors(self) -> list[Tensor]:
        """Memory of accumulated gradients."""

    def weight_shards(self) -> Iterator[Shard]:
        for run in self.runs:
            yield run.shard(run.name, self.masters)
        learned = set(self.learned)
        for name, tensor in self.weights.items():
            if name not in learned and (shard := self._frozen(name, tensor)) is not None:
                yield shard


def full_shape(tensor: Tensor) -> tuple[int, ...]:
    """Shape of a parameter that may be partitioned."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


class SlicedGroups(Partitions):
    """Stages 1 and 2: every rank has all weights for its forward pass, and a slice of the master weights."""

    @property
    def masters(self) -> list[Tensor]:
        flats: list[Tensor] = self.optimizer.single_partition_of_fp32_groups
        return flats

    @property
    def shards(self) -> int:
        return int(self.optimizer.bit16_groups_flat[0].numel() // self.masters[0].numel())

    def _groups(self) -> list[list[nn.Parameter]]:
        groups: list[list[nn.Parameter]] = self.optimizer.round_robin_bit16_groups
        return groups

    def _runs(self) -> Iterator[Run]:
        for number, group in enumerate(self._groups()):
            first = self.rank * int(self.optimizer.partition_size[number])
            last = first + int(self.optimizer.partition_size[number])
            for parameter, offset in zip(group, self.optimizer.round_robin_bit16_offsets[number], strict=True):
                a, b = max(offset, first), min(offset + parameter.numel(), last)
                if a < b:
                    yield Run(self.names[id(parameter)], parameter, number, a - first, a - offset, b - a)

    def refresh(self) -> None:
        self.optimizer.update_lp_params()

    def full(self, name: str, *, master: bool, sent: torch.dtype | None = None) -> Tensor:
        tensor = self.weights[name].detach()
        if not master or tensor.dtype == torch.float32 or name not in self.learned:
            return tensor
        if tensor.dtype == sent:  # every rank computes with the whole cast of the masters
            return tensor
        # Every element has one owner, so a sum of bit patterns puts the pieces together exactly.
        bits_P = torch.zeros(tensor.numel(), dtype=torch.int32, device=tensor.device)
        for run in self.runs:
            if run.name == name:
                bits_P[run.start : run.start + run.count] = run.shard(name, self.masters).flat.view(torch.int32)
        dist.all_reduce(bits_P)
        return bits_P.view(torch.float32).view(tensor.shape)

    def _frozen(self, name: str, tensor: Tensor) -> Shard | None:
        return whole(name, tensor, owned=self.rank == 0)

    def compute_tensors(self) -> list[Tensor]:
        frozen = [tensor for name, tensor in self.weights.items() if name not in self.learned]
        return [*self.optimizer.bit16_groups_flat, *frozen]

    def gradient_tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        for parameter in (p for group in self._groups() for p in group):
            found += [g for g in (parameter.grad, getattr(parameter, "grad_accum", None)) if g is not None]
        for kept in (self.optimizer.averaged_gradients, self.optimizer.all_grad_tensors):
            for entry in kept.values():
                found += [entry] if isinstance(entry, Tensor) else [g for g in entry or () if g is not None]
        return found


class ShardedParameters(Partitions):
    """Stage 3: a rank has its part of every parameter. A role that does not learn has no groups, only parts."""

    @property
    def masters(self) -> list[Tensor]:
        flats: list[Tensor] = getattr(self.optimizer, "fp32_partitioned_groups_flat", [])
        return flats

    @property
    def shards(self) -> int:
        parameter: Any = next(tensor for tensor in self.weights.values() if hasattr(tensor, "ds_tensor"))
        return int(parameter.ds_numel_aligned // parameter.ds_tensor.numel())

    def _groups(self) -> list[list[nn.Parameter]]:
        groups: list[list[nn.Parameter]] = getattr(self.optimizer, "fp16_groups", [])
        return groups

    def _runs(self) -> Iterator[Run]:
        self.offsets: dict[str, tuple[int, int]] = {}
        for number, group in enumerate(self._groups()):
            offset = 0
            for parameter in group:
                name = self.names[id(parameter)]
                self.offsets[name] = (number, offset)
                start, count = self._own(parameter)
                if count:
                    yield Run(name, parameter, number, offset, start, count)
                offset += parameter.partition_numel()  # type: ignore[attr-defined]

    def _own(self, parameter: Any) -> tuple[int, int]:
        """First element and number of elements of this rank's part, without padding."""
        part = parameter.partition_numel()
        start = min(self.rank * part, parameter.ds_numel)
        return start, min(part, parameter.ds_numel - start)

    def refresh(self) -> None:
        """Parameters that stay gathered are let go of: the next forward pass gathers them again."""
        self._offload.partition_all_parameters()
        for compute, master in zip(
            getattr(self.optimizer, "fp16_partitioned_groups_flat", []), self.masters, strict=True
        ):
            compute.copy_(master.detach())

    @property
    def _offload(self) -> Any:
        return getattr(self.optimizer, "parameter_offload", self.optimizer)

    def full(self, name: str, *, master: bool, sent: torch.dtype | None = None) -> Tensor:
        parameter: Any = self.weights[name]
        if not hasattr(parameter, "ds_tensor"):  # a buffer
            buffer: Tensor = parameter.detach()
            return buffer
        part_P: Tensor = parameter.ds_tensor.detach()
        if master and name in self.offsets:
            group, offset = self.offsets[name]
            part_P = self.masters[group].detach()[offset : offset + parameter.partition_numel()]
        if sent is not None and self.world_size > 1:
            part_P = part_P.to(sent)
        part_P = part_P.to(parameter.device).contiguous()
        full_P = torch.empty(part_P.numel() * self.world_size, dtype=part_P.dtype, device=part_P.device)
        all_gather(full_P, part_P)
        return full_P[: parameter.ds_numel].view(full_shape(parameter))

    def _frozen(self, name: str, tensor: Tensor) -> Shard | None:
        if not hasattr(tensor, "ds_tensor"):
            return whole(name, tensor, owned=self.rank == 0)
        start, count = self._own(tensor)
        return Shard(name, full_shape(tensor), start, tensor.ds_tensor.detach()[:count]) if count else None

    def compute_tensors(self) -> list[Tensor]:
        """Parameters that stay gathered are let go of, and gathered again when they are needed."""
        self._offload.partition_all_parameters()
        parts = [tensor.ds_tensor if hasattr(tensor, "ds_tensor") else tensor for tensor in self.weights.values()]
        return [*getattr(self.optimizer, "fp16_partitioned_groups_flat", []), *parts]

    def gradient_tensors(self) -> list[Tensor]:
        return [self.optimizer.grad_partitions_flat_buffer] if self.masters else []

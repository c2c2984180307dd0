"""The ranks that hold one copy of the model together: all of them compute on the samples of all of them.

The driver gives every rank samples of its own. Ranks of a tensor or pipeline group need the same ones, so they join
what they were given, and each hands back its own part of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from specs.wire.batch import Batch


@dataclass(frozen=True)
class Joined:
    """The samples of all ranks of the group, in the order of the ranks, and where this rank's own are."""

    batch: Batch
    own_B: slice
    own_T: slice


class ModelGroup:
    """The tensor and pipeline ranks around this one."""

    def __init__(self, device: torch.device) -> None:
        from megatron.core import parallel_state as state

        self.device = device
        self.model: Any = state.get_model_parallel_group()
        self.tensor: Any = state.get_tensor_model_parallel_group()
        self.pipeline: Any = state.get_pipeline_model_parallel_group()
        self.data: Any = state.get_data_parallel_group()
        self.tensor_rank, self.tensor_ranks = self.tensor.rank(), self.tensor.size()
        self.stage, self.stages = self.pipeline.rank(), self.pipeline.size()
        self.speaks = self.model.rank() == 0  # for the group, where only one may

    def joined(self, batch: Batch) -> Joined:
        """A collective of the group; columns must be the same."""
        if self.model.size() == 1:
            return Joined(batch, slice(None), slice(None))
        names = sorted(batch.columns)
        counts = self._gather(torch.tensor([len(batch), batch.num_tokens], device=self.device))
        sizes = [tuple(count.tolist()) for count in counts]
        columns: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
        for (sequences, tokens), flat_U in zip(sizes, self._gather_bytes(batch, names, sizes), strict=True):
            start = 0
            for name in names:
                own = batch[name]
                stop = start + (tokens if name.endswith("_T") else sequences) * own.itemsize
                columns[name].append(flat_U[start:stop].view(own.dtype))
                start = stop
        before = np.array(sizes[: self.model.rank()], dtype=np.int64).reshape(-1, 2).sum(0)
        return Joined(
            Batch({name: np.concatenate(parts) for name, parts in columns.items()}),
            slice(int(before[0]), int(before[0]) + len(batch)),
            slice(int(before[1]), int(before[1]) + batch.num_tokens),
        )

    def _gather_bytes(
        self, batch: Batch, names: Sequence[str], sizes: Sequence[tuple[int, int]]
    ) -> list[NDArray[np.uint8]]:
        per_sequence = sum(batch[name].itemsize for name in names if not name.endswith("_T"))
        per_token = sum(batch[name].itemsize for name in names if name.endswith("_T"))
        nbytes = [sequences * per_sequence + tokens * per_token for sequences, tokens in sizes]
        own_U = np.concatenate([np.ascontiguousarray(batch[name]).view(np.uint8) for name in names])
        padded_U = torch.zeros(max(nbytes), dtype=torch.uint8)
        padded_U[: len(own_U)] = torch.from_numpy(own_U)
        gathered = self._gather(padded_U.to(self.device))
        return [each.cpu().numpy()[:size] for each, size in zip(gathered, nbytes, strict=True)]

    def _gather(self, own: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(own) for _ in range(self.model.size())]
        dist.all_gather(parts, own, group=self.model)
        return parts

    def from_last_stage(self, tensor: Tensor) -> Tensor:
        """What the last stage has, on every stage; others give a tensor of that shape to fill."""
        return self.from_stage(self.stages - 1, tensor)

    def from_stage(self, stage: int, tensor: Tensor) -> Tensor:
        """As `from_last_stage`, of any stage."""
        if self.stages > 1:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, dist.get_global_rank(self.pipeline, stage), group=self.pipeline)
        return tensor

    @property
    def ranks_of_stage(self) -> int:
        return int(self.tensor_ranks * self.data.size())

    def place_in_stage(self) -> int:
        """This rank's place among the ranks that hold its stage."""
        return int(self.data.rank() * self.tensor_ranks + self.tensor_rank)

    def of_all_tensor_ranks(self, part: Tensor) -> list[Tensor]:
        """The parts of all tensor ranks, in their order. Contiguous: gloo mixes up what is not."""
        if self.tensor_ranks == 1:
            return [part]
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.tensor_ranks)]
        dist.all_gather(parts, part.contiguous(), group=self.tensor)
        return parts

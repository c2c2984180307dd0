"""The ranks that hold one copy of the model together: all of them compute on the samples of all of them.

The driver gives every rank samples of its own. Ranks of a tensor, pipeline or context group need the same ones, so they
join what they were given, and each hands back its own part of the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from backends.protocol import COLLECTIVE_TIMEOUT
from backends.ulysses.sequence_group import ALONE, SequenceGroup, all_gather


class ModelGroup:
    """The tensor, pipeline and context ranks around this one. `context`: those that have a part of each row. `data`:
    those that hold the same part of the model, which are context ranks and those of all replicas."""

    def __init__(self, device: torch.device) -> None:
        from megatron.core import parallel_state as state

        self.device = device
        self.tensor: Any = state.get_tensor_model_parallel_group()
        self.pipeline: Any = state.get_pipeline_model_parallel_group()
        self.data: Any = state.get_data_parallel_group(with_context_parallel=True)
        self.replicas = int(state.get_data_parallel_world_size())
        context: Any = state.get_context_parallel_group()
        self.context = ALONE if context.size() == 1 else SequenceGroup(context, context.size(), context.rank())
        self.model: Any = state.get_model_parallel_group() if self.context.alone else self._with_context()
        self.tensor_rank, self.tensor_ranks = self.tensor.rank(), self.tensor.size()
        self.stage, self.stages = self.pipeline.rank(), self.pipeline.size()
        chunks = state.get_virtual_pipeline_model_parallel_world_size() or 1
        self.stages_of_model = chunks * self.stages  # groups of layers, one after another; ranks take turns
        self.own_stages = range(self.stage, self.stages_of_model, self.stages)
        self.expert_tensor: Any = state.get_expert_tensor_parallel_group()
        self.expert_data: Any = state.get_expert_data_parallel_group()
        self.expert_rank = int(state.get_expert_model_parallel_rank())
        self.expert_ranks = int(state.get_expert_model_parallel_world_size())
        self.experts: Any = state.get_expert_tensor_and_model_parallel_group()

    def _with_context(self) -> Any:
        """Megatron has no group of all that compute a row: they are one replica's. A collective of all ranks."""
        from megatron.core import parallel_state as state

        own = torch.tensor([state.get_data_parallel_rank()], device=self.device)
        replica_R = own.new_zeros(dist.get_world_size())
        all_gather(replica_R, own)
        groups = [
            dist.new_group(torch.nonzero(replica_R == replica).flatten().tolist(), timeout=COLLECTIVE_TIMEOUT)
            for replica in range(self.replicas)
        ]
        return groups[int(own)]

    def from_last_stage(self, tensor: Tensor) -> Tensor:
        """Return on every rank what the last stage has, summed over its context ranks, each with 0 at what others have;
        other stages give a tensor of that shape to fill."""
        tensor = self.from_stage(self.stages - 1, tensor)
        if not self.context.alone:
            dist.all_reduce(tensor, group=self.context.group)
        return tensor

    def from_stage(self, stage: int, tensor: Tensor) -> Tensor:
        """Return the tensor of one stage on every stage; others give one of that shape to fill."""
        if self.stages > 1:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, dist.get_global_rank(self.pipeline, stage), group=self.pipeline)
        return tensor

    def of_all_tensor_ranks(self, part: Tensor) -> list[Tensor]:
        """The parts of all tensor ranks, in their order."""
        return _gathered(part, self.tensor)

    def of_all_expert_ranks(self, part: Tensor) -> list[list[Tensor]]:
        """The parts of all ranks that hold the experts of this stage: of each expert rank those of its tensor ranks."""
        parts, each = _gathered(part, self.experts), self.expert_tensor.size()
        return [parts[first : first + each] for first in range(0, len(parts), each)]

    @property
    def replicas_meet(self) -> bool:
        """Whether data ranks exchange tokens, and so compute as many micro-batches."""
        return not set(dist.get_process_group_ranks(self.experts)) <= set(dist.get_process_group_ranks(self.tensor))


def _gathered(part: Tensor, group: Any) -> list[Tensor]:
    """The tensors of all ranks of the group, in their order. Contiguous: gloo mixes up what is not."""
    if group.size() == 1:
        return [part]
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts

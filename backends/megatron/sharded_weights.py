"""This rank's part of the weights and of Adam's state, by their Hugging Face names.

Megatron's distributed optimizer shards masters and moments over the data ranks by position in a flat buffer; a
parameter of a stage may lie in several of them. Here they are read whole, for export and checkpoints, and written
from whole parts, when a model or a checkpoint is read. (Megatron's own checkpoints are pickles, which rlctl neither
writes nor reads; ours have the names and shapes of the model, so that any engine on any number of ranks reads them.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

from backends.megatron.layouts import Slot, fuse, own_part, own_rows, part_of, put_experts, unfuse, whole_tensor
from backends.megatron.model_group import ModelGroup
from backends.megatron.weight_map import ModelMap
from backends.train.tensor_shards import Shard

Kind = Literal["weight", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")


class ShardedWeights:
    """`optimizer`: Megatron's, of a role that learns. `shapes`: of every weight by name."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        optimizer: Any,
        model_map: ModelMap,
        shapes: Mapping[str, Sequence[int]],
        group: ModelGroup,
    ) -> None:
        self.map, self.shapes, self.group = model_map, shapes, group
        self.parameters = named_parameters(chunks)
        self.slots = rank_slots(model_map, group)
        placed = {slot.parameter for slot in self.slots}
        assert placed == set(self.parameters), placed ^ set(self.parameters)
        self.slot_of = {name: slot for slot in reversed(self.slots) for name in slot.weights}
        self.optimizers = [] if optimizer is None else list(optimizer.chained_optimizers)
        self.dtype = torch.float32 if optimizer is not None else next(iter(self.parameters.values())).dtype
        self.adamw = [each.optimizer for each in self.optimizers if each.optimizer is not None]

    # ── this data rank's slice of a parameter ─────────────────────────────────────────────────────

    def make_moments(self) -> None:
        """State exists from the start, so that a trainer that has not stepped yet saves and loads like any other. Each
        parameter has a step count of its own: one that they share would be counted once for each of them."""
        for adamw in self.adamw:
            for group in adamw.param_groups:
                for main in group["params"]:
                    state: dict[str, Tensor] = {"step": torch.zeros(())}
                    for kind in MOMENTS:
                        state[kind] = torch.zeros_like(main, dtype=torch.float32)
                    adamw.state[main] = state

    def masters(self) -> list[Tensor]:
        """This data rank's slices of the weights; of fp32 weights, they are views."""
        return [main for adamw in self.adamw for group in adamw.param_groups for main in group["params"]]

    def state_tensors(self) -> list[Tensor]:
        """Masters and moments."""
        moments = (state[kind] for adamw in self.adamw for state in adamw.state.values() for kind in MOMENTS)
        return [*(main.detach() for main in self.masters()), *moments]

    def _slice(self, parameter: nn.Parameter, kind: Kind) -> tuple[int, Tensor] | None:
        """First element and values of this rank's slice of the master or of a moment; None where it has none."""
        for optimizer in self.optimizers:
            if parameter in optimizer.model_param_group_index_map:
                group, place = optimizer.model_param_group_index_map[parameter]
                main = optimizer.optimizer.param_groups[group]["params"][place]
                held = main if kind == "weight" else optimizer.optimizer.state[main][kind]
                return optimizer._get_model_param_range_map(parameter)["param"].start, held.detach().view(-1)
        return None

    def _read(self, parameter: nn.Parameter, kind: Kind) -> Tensor:
        """The parameter's values on this tensor rank, whole; all data ranks call it together."""
        if not self.optimizers or (kind == "weight" and parameter.dtype == torch.float32):
            return parameter.detach()
        whole = torch.zeros(parameter.numel(), device=parameter.device)
        if (part := self._slice(parameter, kind)) is not None:
            start, held = part
            whole[start : start + len(held)] = held
        of_expert = not getattr(parameter, "allreduce", True)  # Megatron's own mark
        replicas = self.group.expert_data if of_expert else self.group.data
        if replicas.size() > 1:
            dist.all_reduce(whole, group=replicas)
        return whole.view(parameter.shape)

    @torch.no_grad()
    def _write(self, parameter: nn.Parameter, kind: Kind, value: Tensor) -> None:
        if kind == "weight":
            parameter.copy_(value)
        if (part := self._slice(parameter, kind)) is not None:
            start, held = part
            held.copy_(value.reshape(-1)[start : start + len(held)])

    # ── whole tensors, by name ────────────────────────────────────────────────────────────────────

    def whole(
        self, names: Sequence[str], kind: Kind = "weight", *, computed: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Tensors of this stage, whole, one after another; all its ranks iterate together. `names` in the order of the
        model. `computed`: what the forward pass reads, instead of the master."""
        left = Counter(self.slot_of[name].parameter for name in names)
        made: dict[str, list[Tensor]] = {}
        for name in names:
            slot = self.slot_of[name]
            if slot.rows:
                yield name, self._all_experts(name, kind, computed=computed)
                continue
            if slot.parameter not in made:
                made[slot.parameter] = unfuse(self._held(slot, kind, computed=computed), slot, self.map.heads)
            part = made[slot.parameter][slot.weights.index(name)]
            left[slot.parameter] -= 1
            if not left[slot.parameter]:
                del made[slot.parameter]
            parts = [part] if slot.shard_dim is None else self.group.of_all_tensor_ranks(part)
            yield name, whole_tensor(parts, slot, self.shapes[name][0])

    def _held(self, slot: Slot, kind: Kind, *, computed: bool) -> Tensor:
        parameter = self.parameters[slot.parameter]
        return parameter.detach() if computed else self._read(parameter, kind)

    def _all_experts(self, name: str, kind: Kind, *, computed: bool) -> Tensor:
        """One tensor of all experts of a layer, from the ranks that have some of them."""
        here = [self._held(slot, kind, computed=computed) for slot in self.slots if name in slot.weights]
        every = self.group.of_all_expert_ranks(torch.stack(here))
        held = [[part[place] for part in ranks] for ranks in every for place in range(len(here))]
        whole = torch.empty(tuple(self.shapes[name]), dtype=here[0].dtype, device=here[0].device)
        put_experts(whole, self.map.slots_of_experts(name), held, self.map.heads)
        return whole

    def names_here(self, names: Sequence[str]) -> list[str]:
        """The weights of `names` that are read from this stage."""
        group = self.group
        return [name for name in names if self.map.stage_of(name, group.stages_of_model) in group.own_stages]

    # ── filled by a reader ────────────────────────────────────────────────────────────────────────

    def wanted(self, kind: Kind = "weight") -> Iterator[Shard]:
        """The elements that this rank needs, as host memory in the precision that is kept, for a reader that fills each
        shard before it asks for the next one."""
        suffix = "" if kind == "weight" else f".{kind}"
        for slot in self.slots:
            group = self.group.expert_tensor if slot.rows else self.group.tensor
            place = group.rank(), group.size()
            parts = []
            for name, source in slot.sources:
                shape = tuple(self.shapes[name])
                row, start = (shape[1:], 0) if source is None else (shape[-1:], source.start)
                rows = own_rows(slot, shape[0] if source is None else len(source), *place)
                into = torch.zeros(len(rows), *row, dtype=self.dtype)
                yield Shard(f"{name}{suffix}", shape, (start + rows.start) * math.prod(row), into.view(-1))
                parts.append(own_part(into, slot, *place))
            self._write(self.parameters[slot.parameter], kind, fuse(parts, slot, self.map.heads))


def named_parameters(chunks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Parameters of all of a rank's groups of layers; a name begins with the group's number."""
    return dict(nn.ModuleList(chunks).named_parameters())


def rank_slots(model_map: ModelMap, group: ModelGroup) -> list[Slot]:
    """Slots of this rank's groups of layers, with its own experts; parameters are named as by `named_parameters`."""
    every = model_map.experts
    experts = None if every is None else part_of(every.count, group.expert_rank, group.expert_ranks)
    return [
        replace(slot, parameter=f"{chunk}.{slot.parameter}")
        for chunk, stage in enumerate(group.own_stages)
        for slot in model_map.slots(stage, group.stages_of_model, group.tensor_ranks, experts)
    ]

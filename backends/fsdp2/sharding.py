"""How FSDP2 shards a model: which modules are gathered together, along which mesh, and where a rank's rows begin.

(Zhao et al. 2023, "PyTorch FSDP"; `fully_shard` is its second, per-parameter form.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from backends.hf.recompute import decoder_layers
from backends.protocol import Rank
from backends.train.policy import Policy
from backends.train.tensor_shards import Shard, whole
from backends.weights.tensor_bytes import named_weights
from specs.schema.engines.fsdp2_table import Fsdp2Table


class ShardMesh:
    """`replicate` groups of `shard` ranks: each group holds the model once, sharded by rows."""

    def __init__(self, engine: Fsdp2Table, rank: Rank, device: torch.device) -> None:
        mesh = engine.mesh(rank.world_size)
        assert mesh.ranks == rank.world_size, "specs/rules/mesh_rules.py"
        self.axes, self.replicate, self.shard = dict(mesh.axes or {}), mesh.replicate, mesh.shard
        self.shard_index = rank.rank % self.shard
        self.replicate_index = rank.rank // self.shard
        self.device_mesh: DeviceMesh = (
            init_device_mesh(device.type, (self.shard,), mesh_dim_names=("shard",))
            if self.replicate == 1
            else init_device_mesh(device.type, (self.replicate, self.shard), mesh_dim_names=("replicate", "shard"))
        )
        self.shard_group = self.device_mesh["shard"].get_group()


def shard_policy(policy: Policy, mesh: ShardMesh, engine: Fsdp2Table, compute: torch.dtype) -> list[FSDPModule]:
    """Shard `policy`, whose parameters may be on meta, in place; returns the modules that gather, the root last.

    Parameters keep their dtype and are gathered in `compute`; gradients are *summed* over the mesh, in fp32.
    """
    master = next(policy.parameters()).dtype
    mixed = MixedPrecisionPolicy(
        param_dtype=None if master == compute else compute,
        reduce_dtype=None if master == compute else torch.float32,
        cast_forward_inputs=False,  # it would round the advantages and log-probs of the loss, too
    )
    pinned = mesh.device_mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if engine.offload == "cpu" else OffloadPolicy()
    shared: dict[str, Any] = {"mesh": mesh.device_mesh, "mp_policy": mixed, "offload_policy": offload}
    # The blocks that are gathered one at a time.
    layers = decoder_layers(policy.model, needed="by which fsdp2 shards a model", hint='use engine.kind = "ddp"')
    units: list[nn.Module] = [*layers, policy]
    for unit in units:
        # The root stays gathered between forward and backward in any case: it is used last and first.
        keep: dict[str, Any] = {} if unit is policy else {"reshard_after_forward": engine.reshard_after_forward}
        fully_shard(unit, **shared, **keep)
    gathering: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for module in gathering:
        # The caller's loss is already divided by global counts. Plain sums, not FSDP's averages multiplied back.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    return gathering


def gathering_dtype(unit: FSDPModule) -> torch.dtype:
    """Return the dtype that a module's parameters are gathered in, read back from FSDP's own state: nothing is gathered
    for it."""
    group = unit._get_fsdp_state()._fsdp_param_group
    assert group is not None, "a module that has parameters"
    return group.mp_policy.param_dtype or next(unit.parameters()).dtype  # type: ignore[attr-defined]


def allocate(policy: Policy, engine: Fsdp2Table, device: torch.device) -> None:
    """Allocate this rank's rows of parameters that were sharded on meta. Buffers are unchanged."""
    buffers = [(module, dict(module._buffers)) for module in policy.modules()]
    policy.to_empty(device=torch.device("cpu") if engine.offload == "cpu" else device)
    for module, kept in buffers:
        module._buffers.update(kept)


@dataclass(frozen=True)
class RowShardedTensor:
    """A weight as this rank holds it: a parameter's rows, or a buffer, which every rank holds whole."""

    tensor: Tensor
    mesh: ShardMesh

    @property
    def local(self) -> Tensor:
        """This rank's rows, without padding: a view of the memory that FSDP gathers from."""
        tensor = self.tensor.detach()
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    @property
    def start(self) -> int:
        """The first of this rank's elements in the flattened tensor."""
        if not isinstance(self.tensor, DTensor):
            return 0
        rows = self.tensor.shape[0]
        first = min(rows, self.mesh.shard_index * -(-rows // self.mesh.shard))
        return first * math.prod(self.tensor.shape[1:])

    def shard(self, name: str, local: Tensor) -> Shard:
        """Memory that lies along this tensor (itself, a moment), as a shard called `name`."""
        if not isinstance(self.tensor, DTensor):
            return whole(name, local, owned=self.mesh.shard_index == self.mesh.replicate_index == 0)
        return Shard(name, tuple(self.tensor.shape), self.start, local.view(-1), self.mesh.replicate_index == 0)

    def full(self, device: torch.device, sent: torch.dtype | None = None) -> Tensor:
        """The whole tensor on `device`, on every rank: a collective. It may be the engine's own memory. Rows that
        travel are cast to `sent` before."""
        tensor, local = self.tensor.detach(), self.local
        if not isinstance(tensor, DTensor):
            return tensor
        rows = local if sent is None or self.mesh.shard == 1 else local.to(sent)
        rows = rows.to(device)  # those in host memory are gathered through the device
        if rows is not local:
            tensor = DTensor.from_local(
                rows, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
            )
        return tensor.full_tensor()


def sharded_tensors(model: PreTrainedModel, mesh: ShardMesh) -> dict[str, RowShardedTensor]:
    """Return parameters and saved buffers in the order of `state_dict`; a tied one once, under its first name."""
    return {name: RowShardedTensor(tensor, mesh) for name, tensor in named_weights(model).items()}

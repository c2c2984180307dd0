"""The `fsdp2` train engine: parameters, gradients and optimizer state are sharded by rows across the ranks.

A layer's parameters are gathered when it runs and freed afterwards; gradients are reduce-scattered once per
`forward_backward`. Each rank steps its own rows with a plain AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from backends.fsdp2.sharding import ShardMesh, allocate, gathering_dtype, shard_policy, sharded_tensors
from backends.hf.hf_model import build_on_meta, describe
from backends.protocol import OnMeta, Rank
from backends.train.adamw import MOMENTS, gradient_norm, make_adamw, make_state, set_learning_rate, set_steps
from backends.train.engine import HfTrainEngine
from backends.train.policy import Policy
from backends.train.role_group import join_group, pretended_group
from backends.train.tensor_shards import Shard, TensorKind
from backends.weights.tensor_bytes import DTYPES, wire_dtype
from specs.schema.engines.fsdp2_table import Fsdp2Table
from specs.schema.role_section import DType
from specs.wire.as_built import ModelBuilt
from specs.wire.role_config import TrainConfig


class Fsdp2TrainEngine(HfTrainEngine):
    """Any Hugging Face causal language model that has a list of decoder layers."""

    in_step = True  # every forward and backward pass gathers from all

    def __init__(self, config: TrainConfig, rank: Rank) -> None:
        super().__init__(config, rank)
        assert isinstance(config.engine, Fsdp2Table)
        self.engine, self.compute = config.engine, DTYPES[config.model.dtype]
        self.mesh = ShardMesh(config.engine, rank, self.device)
        held = self._hold_model(build_on_meta)
        model = held.model
        self.policy = Policy(model, config)
        self.units = shard_policy(self.policy, self.mesh, config.engine, self.compute)
        allocate(self.policy, config.engine, self.device)
        self.weights = sharded_tensors(model, self.mesh)
        self._read_weights(held.aliases)
        self._verify()
        # Plain tensors that share memory with the local rows: a step needs no other rank. A parameter with fewer rows
        # than ranks leaves some of these without any.
        self.rows: dict[str, nn.Parameter] = {}
        self.adamw: torch.optim.AdamW | None = None
        if config.optimizer is not None:
            learned = {name: self.weights[name] for name in self._learned() if self.weights[name].local.numel()}
            self.rows = {name: nn.Parameter(weight.local) for name, weight in learned.items()}
            dims = [(rows, learned[name].tensor.ndim) for name, rows in self.rows.items()]
            self.adamw = make_adamw(dims, config.optimizer)
            make_state(self.adamw, self.rows.values())

    @classmethod
    def _held_dtype(cls, config: TrainConfig) -> DType:
        """Trainable parameters are held in fp32 even when they compute in bf16: the master weights are exact."""
        return "fp32" if config.optimizer is not None else config.model.dtype

    @classmethod
    def _wrapped_on_meta(cls, policy: Policy, config: TrainConfig, rank: Rank) -> OnMeta:
        """Shard as the first of so many ranks would, on the host, in a group that sends nothing."""
        assert isinstance(config.engine, Fsdp2Table)
        with pretended_group(rank):
            mesh = ShardMesh(config.engine, rank, torch.device("cpu"))
            units = shard_policy(policy, mesh, config.engine, DTYPES[config.model.dtype])
            about = describe(policy.model, config.model, checksum=False)
            found = {"dtype": wire_dtype(gathering_dtype(units[0])), "mesh": mesh.axes}
        return OnMeta(about.model_copy(update=found))

    def _join_ranks(self) -> None:
        join_group(self.rank, self.config.model.device, even_alone=True)

    def _built(self) -> ModelBuilt:
        """All ranks call this together. The checksum is of the weights in compute precision, as `ddp` holds them."""
        computed = {name: self.compute for name, own in self.weights.items() if isinstance(own.tensor, nn.Parameter)}
        full = self._full_weights(self.weights, computed)
        weights = ((name, tensor.to(computed.get(name, tensor.dtype))) for name, tensor in full)
        return self._described(weights, dtype=wire_dtype(self._gathered_dtype()), mesh=self.mesh.axes)

    def _gathered_dtype(self) -> torch.dtype:
        """Read back from a layer that has been gathered: what its forward pass computes in."""
        layer = self.units[0]
        layer.unshard()
        dtype: torch.dtype = next(layer.parameters()).dtype  # type: ignore[attr-defined]
        layer.reshard()
        return dtype

    def _let_go(self) -> None:
        """Forget what is gathered. After a forward pass without a backward the root still is, and would stay as it was
        when the rows change."""
        for unit in self.units:
            unit.reshard()

    # ── learning ──────────────────────────────────────────────────────────────────────────────────

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        root = self.units[-1]  # the policy
        root.set_requires_gradient_sync(last or self.engine.sync_every_micro_batch)
        root.set_requires_all_reduce(last)  # one sum between replicas: these gradients are already sharded
        loss.backward()

    def _sum_gradients(self) -> float:
        self._let_go()
        total = gradient_norm(self._gradients().values()).square().to(self.device)
        dist.all_reduce(total, group=self.mesh.shard_group)
        return math.sqrt(float(total))

    def _step(self, lr: float, clip: float | None) -> None:
        assert self.adamw is not None
        for name, gradient in self._gradients().items():
            if clip is not None:
                gradient.mul_(clip)
            if name in self.rows:
                self.rows[name].grad = gradient
        set_learning_rate(self.adamw, lr)
        self.adamw.step()
        self.adamw.zero_grad()

    def _zero_gradients(self) -> None:
        self.policy.zero_grad()

    def _gradients(self) -> dict[str, Tensor]:
        """Gradients of this rank's rows, by name; zeros without a micro-batch."""
        gradients = {}
        for name in self._learned():
            grad = self.weights[name].tensor.grad
            gradients[name] = torch.zeros_like(self.weights[name].local) if grad is None else _local(grad)
        return gradients

    # ── weights ───────────────────────────────────────────────────────────────────────────────────

    def _weight_kinds(self) -> Mapping[str, TensorKind]:
        return {name: (tuple(weight.tensor.shape), weight.tensor.dtype) for name, weight in self.weights.items()}

    def _full_weights(self, names: Collection[str], sent: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
        chosen = ((name, weight) for name, weight in self.weights.items() if name in names)
        return ((name, weight.full(self.device, sent.get(name))) for name, weight in chosen)

    def _weight_shards(self) -> Iterator[Shard]:
        return (weight.shard(name, weight.local) for name, weight in self.weights.items())

    def _moment_shards(self) -> Iterator[Shard]:
        for name, kind, moment in self._moments():
            yield self.weights[name].shard(f"{name}.{kind}", moment)

    def _moments(self) -> Iterator[tuple[str, str, Tensor]]:
        if self.adamw is None:
            return
        for name, rows in self.rows.items():
            for kind in MOMENTS:
                yield name, kind, self.adamw.state[rows][kind]

    def _learned(self) -> Sequence[str]:
        return [name for name, weight in self.weights.items() if weight.tensor.requires_grad]

    def _loaded(self, optimizer_steps: int) -> None:
        self._let_go()
        if self.adamw is not None:
            set_steps(self.adamw, optimizer_steps)

    # ── memory ────────────────────────────────────────────────────────────────────────────────────

    def _memory(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        self._let_go()
        weights = [weight.local for weight in self.weights.values()]
        gradients = [_local(grad) for weight in self.weights.values() if (grad := weight.tensor.grad) is not None]
        return [*weights, *(moment for _, _, moment in self._moments())], gradients


def _local(grad: Tensor) -> Tensor:
    """This rank's rows of a gradient."""
    assert isinstance(grad, DTensor)
    return grad.to_local()

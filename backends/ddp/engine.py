"""The `ddp` train engine: every rank holds the whole model, and gradients are summed once per optimizer step.

P: elements of the flat buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor
from torch import distributed as dist
from transformers import PreTrainedModel

from backends.ddp.flat_buffers import FlatAdamW, FlatParameters
from backends.hf.hf_model import build_model, describe
from backends.protocol import OnMeta, Rank, Weight
from backends.train import weight_export
from backends.train.adamw import gradient_norm, set_steps
from backends.train.engine import HfTrainEngine
from backends.train.lm_head import Head
from backends.train.policy import Policy
from backends.train.tensor_shards import Shard, TensorKind, whole
from backends.weights.tensor_bytes import DTYPES, named_weights
from specs.schema.engines.ddp_table import DdpTable
from specs.schema.role_section import DType
from specs.schema.spec import WeightForm
from specs.wire.as_built import ModelBuilt
from specs.wire.role_config import TrainConfig


class DdpTrainEngine(HfTrainEngine):
    """Any Hugging Face causal language model, replicated on every rank."""

    def __init__(self, config: TrainConfig, rank: Rank) -> None:
        super().__init__(config, rank)
        assert isinstance(config.engine, DdpTable)
        model = self._hold_model(partial(build_model, load_weights=True)).model
        self.flat = _flatten(model, config)
        self.policy = Policy(model, config)
        if isinstance(self.policy.head, Head):
            self.policy.head.adds_gradient = config.engine.adds_gradients_in_place(config.model.dtype)
        self.optimizer = None if config.optimizer is None else FlatAdamW(self.flat, config.optimizer)
        self._verify()

    @classmethod
    def _held_dtype(cls, config: TrainConfig) -> DType:
        """Weights that learn are read in fp32 even when the model computes in bf16: their masters are exact."""
        return "fp32" if config.optimizer is not None and config.lora is None else config.model.dtype

    @classmethod
    def _wrapped_on_meta(cls, policy: Policy, config: TrainConfig, rank: Rank) -> OnMeta:
        _flatten(policy.model, config)
        return super()._wrapped_on_meta(policy, config, rank)

    def _built(self) -> ModelBuilt:
        return describe(self.policy.model, self.config.model, checksum=True)

    # ── learning ──────────────────────────────────────────────────────────────────────────────────

    @property
    def _grad_P(self) -> Tensor:
        assert self.flat.grad_P is not None
        return self.flat.grad_P

    def _sum_gradients(self) -> float:
        if self.rank.world_size > 1:
            dist.all_reduce(self._grad_P)
        return float(gradient_norm([self._grad_P]))

    def _step(self, lr: float, clip: float | None) -> None:
        assert self.optimizer is not None
        if clip is not None:
            self._grad_P.mul_(clip)
        self.optimizer.step(lr)
        self.flat.refresh()

    def _zero_gradients(self) -> None:
        self._grad_P.zero_()

    # ── weights ───────────────────────────────────────────────────────────────────────────────────

    def _best_weights(self) -> dict[str, Tensor]:
        """Every weight by name, fp32 master where there is one."""
        return self._by_name(self._masters())

    def _masters(self) -> dict[str, Tensor]:
        return {segment.name: self.flat.source(segment) for segment in self.flat.segments}

    def _by_name(self, learned: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every weight, in the order of the model, those `learned` as given. To walk through a whole model takes a
        millisecond, which is spared where there is no other weight."""
        if learned.keys() == self._kinds.keys():
            return {name: learned[name] for name in self._kinds}
        return self._among_all(learned)

    def _among_all(self, learned: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: learned.get(name, own.detach()) for name, own in named_weights(self.policy.model).items()}

    def export_weights(self, dtype: DType, form: WeightForm = "merged") -> Iterator[Weight]:
        """Return the weights that the model computes with, where that is what travels: the master, or its cast to the
        last bit."""
        if form == "merged" and self.adapters is None and DTYPES[dtype] == self.flat.compute_P.dtype:
            computed = {segment.name: segment.parameter for segment in self.flat.segments}
            # They are views, so all at once: between copies, which drive Python out of the cache, it takes far longer.
            return iter(list(weight_export.stream(iter(self._by_name(computed).items()), dtype, self._buffers)))
        return super().export_weights(dtype, form)

    def _weight_kinds(self) -> Mapping[str, TensorKind]:
        return self._kinds

    @cached_property
    def _kinds(self) -> Mapping[str, TensorKind]:
        """Cached: read twice in every sync, and constant."""
        best = self._among_all(self._masters())
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in best.items()}

    def _full_weights(self, names: Collection[str], sent: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in self._best_weights().items() if name in names)

    def _weight_shards(self) -> Iterator[Shard]:
        return self._shared_out(self._best_weights())

    def _moment_shards(self) -> Iterator[Shard]:
        return self._shared_out({} if self.optimizer is None else self.optimizer.named_state())

    def _shared_out(self, tensors: Mapping[str, Tensor]) -> Iterator[Shard]:
        """All ranks hold all weights; each saves a share of them."""
        for number, (name, tensor) in enumerate(tensors.items()):
            yield whole(name, tensor, owned=number % self.rank.world_size == self.rank.rank)

    def _learned(self) -> Sequence[str]:
        return [segment.name for segment in self.flat.segments]

    def _loaded(self, optimizer_steps: int) -> None:
        self.flat.refresh()
        if self.optimizer is not None:
            set_steps(self.optimizer.adamw, optimizer_steps)

    # ── memory ────────────────────────────────────────────────────────────────────────────────────

    def _memory(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        frozen = [p.data for p in self.policy.model.parameters() if self.adapters is not None and not p.requires_grad]
        keep = [self.flat.compute_P, *frozen]
        if self.optimizer is not None:
            keep += [self.optimizer.exp_avg_P, self.optimizer.exp_avg_sq_P]
        if self.flat.master_P is not None:
            keep.append(self.flat.master_P)  # of fp32 weights the same memory, which counts once
        return keep, [] if self.flat.grad_P is None else [self.flat.grad_P]


def _flatten(model: PreTrainedModel, config: TrainConfig) -> FlatParameters:
    return FlatParameters(model, DTYPES[config.model.dtype], learns=config.optimizer is not None)

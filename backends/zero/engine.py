"""The `zero` train engine: DeepSpeed ZeRO shards optimizer state, gradients and parameters across all ranks.

Numbers are those of `ddp`: the gradient is the sum over ranks (DeepSpeed averages, so the loss is multiplied by the
number of ranks), AdamW is torch's, weight decay is for matrices, and a step whose gradient norm is not finite changes
nothing. A role that does not learn has nothing to shard at stages 1 and 2: it holds its model whole, without DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from backends.hf.adapter_names import is_adapter
from backends.hf.hf_model import build_model, build_on_meta, cast_parameters, describe
from backends.packed.packed_input import PackedInput
from backends.packed.row_ops import RowCopies
from backends.packed.state_layers import state_layers
from backends.protocol import OnMeta, Rank, StepResult
from backends.train.adamw import MOMENTS, make_adamw, make_state, set_learning_rate, set_steps
from backends.train.engine import HfTrainEngine
from backends.train.policy import Policy, Task
from backends.train.tensor_shards import Shard, TensorKind, whole
from backends.weights.tensor_bytes import DTYPES, named_weights
from backends.zero.deepspeed_start import (
    check_keys,
    deepspeed_config,
    import_deepspeed,
    shard_model,
    start_deepspeed,
    stop_deepspeed,
)
from backends.zero.partitions import Partitions, ShardedParameters, SlicedGroups, full_shape
from specs.schema.engines.zero_table import ZeroTable
from specs.schema.role_section import DType
from specs.wire.as_built import ModelBuilt
from specs.wire.role_config import TrainConfig


class ZeroTrainEngine(HfTrainEngine):
    """Any Hugging Face causal language model, under ZeRO stage 1, 2 or 3."""

    in_step = True

    def __init__(self, config: TrainConfig, rank: Rank) -> None:
        super().__init__(config, rank)
        deepspeed = import_deepspeed(config.model.device)
        assert isinstance(config.engine, ZeroTable)
        self.stage = config.engine.stage
        ds_config = deepspeed_config(config)
        check_keys(deepspeed, config)
        shards_parameters = self.stage == 3
        held = self._hold_model(build_on_meta if shards_parameters else partial(build_model, load_weights=False))
        model = held.model
        cast_parameters(model, DTYPES[config.model.dtype])  # peft makes adapters in fp32, and so are their masters
        if shards_parameters:
            shard_model(deepspeed, model, ds_config, self.device)
            if layers := state_layers(model):
                # Ranks may run them in unequal numbers of batches: their parameters are gathered once for all of these.
                deepspeed.utils.set_z3_leaf_modules(model, list({type(layer) for layer in layers}))
                model.enable_input_require_grads()  # or hooks miss the first layer over frozen embeddings
        self.policy = Policy(model, config)
        self.adamw: torch.optim.AdamW | None = None
        if config.optimizer is not None:
            # DeepSpeed puts its flat master weights in the place of each group's parameters.
            dims = [(p, len(full_shape(p))) for p in self.policy.parameters() if p.requires_grad]
            self.adamw = make_adamw(dims, config.optimizer)
        self.deepspeed: Any = None
        self.parts: Partitions | None = None
        if shards_parameters or self.adamw is not None:
            self.deepspeed, *_ = deepspeed.initialize(model=self.policy, optimizer=self.adamw, config=ds_config)
            layout = ShardedParameters if shards_parameters else SlicedGroups
            self.parts = layout(self.deepspeed.optimizer, named_weights(model))
        self._read_weights(held.aliases)
        if self.parts is not None:
            self.parts.refresh()
            if self.adamw is not None:
                make_state(self.adamw, self.parts.masters)
        self._verify()

    def _join_ranks(self) -> None:
        start_deepspeed(self.rank, self.config.model.device)

    @classmethod
    def _held_dtype(cls, config: TrainConfig) -> DType:
        """DeepSpeed makes the fp32 masters by itself."""
        return config.model.dtype

    @classmethod
    def _wrapped_on_meta(cls, policy: Policy, config: TrainConfig, rank: Rank) -> OnMeta:
        """DeepSpeed shards only with memory and with all ranks there, but it checks the keys that the spec adds."""
        assert isinstance(config.engine, ZeroTable)
        if config.engine.deepspeed:
            check_keys(import_deepspeed(config.model.device), config)
        cast_parameters(policy.model, DTYPES[config.model.dtype])
        about = super()._wrapped_on_meta(policy, config, rank).model
        return OnMeta(about, not_seen=("mesh",))

    def _built(self) -> ModelBuilt:
        model, parts = self.policy.model, self.parts
        mesh = {"shard": self.rank.world_size if parts is None else parts.shards}
        if not isinstance(parts, ShardedParameters):
            return describe(model, self.config.model, checksum=True).model_copy(update={"mesh": mesh})
        parameters: Iterator[tuple[str, Any]] = model.named_parameters()  # DeepSpeed adds `ds_numel` to each parameter
        sizes = {name: (int(p.ds_numel), bool(p.requires_grad)) for name, p in parameters}
        return self._described(
            ((name, parts.full(name, master=False)) for name in parts.weights if not is_adapter(name)),
            parameters=sum(size for name, (size, _) in sizes.items() if not is_adapter(name)),
            trainable_parameters=sum(size for size, learns in sizes.values() if learns),
            mesh=mesh,
        )

    # ── computing ─────────────────────────────────────────────────────────────────────────────────

    def _rounds(self, micro_batches: int) -> int:
        """At least one, so that DeepSpeed has seen a backward pass before it steps."""
        return super()._rounds(max(1, micro_batches))

    def _run(self, row: PackedInput, rows_N: RowCopies | None, task: Task | None) -> Any:
        return (self.deepspeed or self.policy)(row, rows_N, task)

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        """Stage 1 sums over ranks in `optim_step`; 2 and 3 after every micro-batch, to let go of what others own."""
        self.deepspeed.backward(loss * self.rank.world_size)

    # ── learning ──────────────────────────────────────────────────────────────────────────────────

    def optim_step(self) -> StepResult:
        """DeepSpeed sums, clips, steps and zeroes in one call."""
        lr = self._learning_rate()
        assert self.adamw is not None
        set_learning_rate(self.adamw, lr)
        self.deepspeed.step()
        self.gradients_are_zero = True
        norm, skipped = float(self.deepspeed.get_global_grad_norm()), bool(self.deepspeed.optimizer.overflow)
        if skipped:
            self.state.skipped_steps += 1
            self.deepspeed.optimizer.averaged_gradients.clear()  # stage 2 would add to what an offload keeps there
        else:
            self.state.optimizer_steps += 1
        return StepResult(norm, lr, skipped)

    # ── weights ───────────────────────────────────────────────────────────────────────────────────

    def _weight_kinds(self) -> Mapping[str, TensorKind]:
        weights, learned = named_weights(self.policy.model), set(self._learned())
        return {
            name: (full_shape(tensor), torch.float32 if name in learned else tensor.dtype)
            for name, tensor in weights.items()
        }

    def _full_weights(self, names: Collection[str], sent: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
        parts = self.parts
        if parts is None:
            held = named_weights(self.policy.model)
            return ((name, tensor.detach()) for name, tensor in held.items() if name in names)
        chosen = (name for name in parts.weights if name in names)
        return ((name, parts.full(name, master=True, sent=sent.get(name))) for name in chosen)

    def _weight_shards(self) -> Iterator[Shard]:
        if self.parts is not None:
            return self.parts.weight_shards()
        return (whole(name, t, owned=self.rank.rank == 0) for name, t in named_weights(self.policy.model).items())

    def _moment_shards(self) -> Iterator[Shard]:
        if self.adamw is None or self.parts is None:
            return
        for kind in MOMENTS:
            flats = [self.adamw.state[flat][kind] for flat in self.parts.masters]
            for run in self.parts.runs:
                yield run.shard(f"{run.name}.{kind}", flats)

    def _learned(self) -> Sequence[str]:
        return [] if self.parts is None else self.parts.learned

    def _loaded(self, optimizer_steps: int) -> None:
        if self.parts is not None:
            self.parts.refresh()
        if self.adamw is not None:
            set_steps(self.adamw, optimizer_steps)

    # ── memory ────────────────────────────────────────────────────────────────────────────────────

    def _memory(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Yield device tensors; those that DeepSpeed left on the host stay where they are."""
        if self.parts is None:
            return list(named_weights(self.policy.model).values()), []
        keep = [*self.parts.compute_tensors(), *self.parts.masters]
        if self.adamw is not None:
            keep += [self.adamw.state[flat][kind] for flat in self.parts.masters for kind in MOMENTS]
        return keep, self.parts.gradient_tensors()

    def close(self) -> None:
        if self.deepspeed is not None:
            self.deepspeed.destroy()
        stop_deepspeed()

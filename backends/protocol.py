"""The engine protocol: interfaces of engines that train a model and of engines that sample from one.

Engines know nothing of the network, the driver or the files of a run; workers do (`workers/`).
Batches come in as numpy columns (`specs/wire/batch.py`) and go out the same way. The contract tests
(`tests/backends/test_protocol_train.py`, `test_protocol_rollout.py`) run against every engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from backends.completions import Completion, Completions, SampleRequest
from backends.replica_span import ReplicaSpan
from specs.errors import ModelError
from specs.schema.algorithms.algorithm import UNIT_REDUCTIONS, AnyLoss
from specs.schema.role_section import DType
from specs.schema.spec import WeightForm
from specs.wire.as_built import ModelBuilt
from specs.wire.batch import Batch
from specs.wire.bodies import LossScale
from specs.wire.role_config import RolloutConfig, Sampling, TrainConfig

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # a rank that waits this long for the others gives up
# Flat bytes: NDArray[np.uint8] in host memory, whose checksum is xxh3-64 (`backends/weights/checksum.py`), or a
# one-dimensional uint8 torch.Tensor on a device, whose checksum is computed there (`backends/weights/word_sum.py`).
Buffer = Any


@dataclass(frozen=True)
class WeightSpec:
    """A weight as it travels: Hugging Face name, dtype on the wire ("fp32", "bf16", or a numpy name), shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Weight(ABC):
    """One weight of the stream. Lives only until the stream moves on."""

    spec: WeightSpec

    @abstractmethod
    def copy_to(self, buffer: Buffer) -> str:
        """Write the bytes in wire dtype into `buffer`, which is exactly `spec.nbytes` long; returns the checksum (hex)
        that goes with such a buffer (`Buffer`), of the engine's own tensor, not of the copy."""

    def copy_in_blocks(self, blocks: Iterable[NDArray[np.uint8]]) -> str:
        """Do the same as `copy_to`, into host memory that comes block by block, `spec.nbytes` in all. A block is filled
        when the next one is asked for, or the end; from then on others read it."""
        whole_U = np.empty(self.spec.nbytes, dtype=np.uint8)
        digest, start = self.copy_to(whole_U), 0
        for block_U in blocks:
            block_U[:] = whole_U[start : start + len(block_U)]
            start += len(block_U)
        return digest


@dataclass(frozen=True)
class Rank:
    """Rank of this process in its group. `span`: the nodes of a replica that lies on several."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    span: ReplicaSpan | None = None


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. `skipped` when the gradient norm was not finite (nothing was changed but the skip count)."""

    grad_norm: float
    lr: float
    skipped: bool


@dataclass(frozen=True)
class OnMeta:
    """Hold what an engine would build, read back from a model without memory. `not_seen`: fields of `model` that only a
    real start can show."""

    model: ModelBuilt
    not_seen: tuple[str, ...] = ()


class TrainEngine(ABC):
    """Holds a model that computes log-probs, or values and scores, and, with an optimizer, learns."""

    # Whether `forward` and `forward_backward` count their micro-batches (`backends/activity.py`). Only then can no
    # progress be told from slow progress, and `run.stall_timeout_s` holds for them.
    counts_progress: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def build(cls, config: TrainConfig, rank: Rank) -> TrainEngine: ...

    @classmethod
    def import_code(cls, config: TrainConfig) -> None:
        """Import what `build` would, so that it does not count as the model's memory. Raises no more than `build`."""

    @classmethod
    def on_meta(cls, config: TrainConfig, rank: Rank) -> OnMeta | None:
        """Return what `build` would make on that rank, made by the same code without memory for it, without the other
        ranks and without the device. None: this engine cannot say before it is built. Raises what `build` would."""
        return None

    @abstractmethod
    def built(self) -> ModelBuilt:
        """Describe the model, read back from the model itself."""

    @abstractmethod
    def forward(self, batch: Batch, *, adapters: bool = True) -> NDArray[np.float32]:
        """`logprob_T` of this rank's sequences, fp32: log p(token | before) / temperature where `loss_mask_T`
        is 1, else 0. No gradients. Splits into micro-batches by itself. All ranks call it; they may differ in work.
        `adapters` False: of the model without its LoRA adapters. An empty batch gives an empty array."""

    def values(self, batch: Batch) -> NDArray[np.float32]:
        """`value_T` of this rank's sequences, fp32: where `loss_mask_T` is 1, what a value head (`ModelConfig.head`)
        says at the token before, so from all that was known when the token was drawn; else 0. Otherwise as `forward`.
        """
        raise self._no_scalar_head()

    def scores(self, batch: Batch) -> NDArray[np.float32]:
        """`score_B` of this rank's sequences, fp32: what the head says at each one's last token; 0 for one without
        tokens. Reads `tokens_T` alone. Otherwise as `forward`."""
        raise self._no_scalar_head()

    def _no_scalar_head(self) -> ModelError:
        return ModelError(
            f"{type(self).__name__} has no head that gives values or scores",
            hint="critics and reward models need an engine that builds one: set engine.kind of the role",
        )

    def _no_lm_head(self) -> ModelError:
        return ModelError("a model with a value head has no log-probs and writes nothing")

    @abstractmethod
    def forward_backward(self, batch: Batch, loss: AnyLoss, scale: LossScale) -> Mapping[str, float]:
        """Accumulate gradients of this rank's share of the loss: a `Loss` or an objective, or, of a model with a value
        head, a `ValueLoss` or an objective of scores. Needs the columns that `loss.columns` names. Returns what
        `loss.metrics` declares, as sums over this rank's tokens or units, or maxima, and the counts of `ENGINE_SUMS`
        and `ENGINE_MAXIMA`; the caller joins ranks and divides. All ranks call it with the same loss; they may differ
        in work. An empty batch is legal. Sequences with the same `unit_B` are given to one rank, or one group of ranks
        that share rows, and computed in one micro-batch: BatchError where they are over the budget of one."""

    def evaluate(self, batch: Batch, loss: AnyLoss, scale: LossScale) -> Mapping[str, float]:
        """Return what `forward_backward` would, without gradients: nothing changes. All ranks call it."""
        raise ModelError(f"{type(self).__name__} measures no loss without gradients", hint="leave out [eval]")

    @abstractmethod
    def optim_step(self) -> StepResult:
        """Sum gradients over ranks where that is not done yet, clip, step optimizer and schedule, zero gradients.
        A non-finite norm is skipped on all ranks alike."""

    @abstractmethod
    def export_weights(self, dtype: DType, form: WeightForm = "merged") -> Iterator[Weight]:
        """Every weight once (a tied one under its first name), floating ones cast to `dtype`, one at a time.
        All ranks must exhaust the stream; only rank 0's weights are read.

        `form` "merged": of the model as it is without adapters in it, those it has added in. "apart": the model's own
        and the adapters' (`….lora_A.weight` [rank, in], then `….lora_B.weight` [out, rank], the latter times
        alpha / rank). "adapters": the adapters' alone."""

    @abstractmethod
    def weight_specs(self, dtype: DType, form: WeightForm = "merged") -> Sequence[WeightSpec]:
        """List what `export_weights` will yield, in order, without touching data."""

    @abstractmethod
    def offload(self) -> None:
        """Move weights, optimizer state and gradients off the device. Bit-exact and idempotent."""

    @abstractmethod
    def onload(self) -> None:
        """Undo `offload`. A second call does nothing."""

    @abstractmethod
    def save(self, folder: Path) -> Sequence[Path]:
        """Write weights (fp32 master where there is one), optimizer, schedule, skip count and RNG into the existing
        empty `folder`; returns the files that this rank wrote. All ranks call it. Engines for Hugging Face models write
        `backends/train/tensor_shards.py`, so that each reads what another wrote, on any number of ranks."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restore what `save` wrote: bit for bit on as many ranks of the same engine. Raises CheckpointError when it is
        of another model."""

    @abstractmethod
    def start_schedule_at(self, optimizer_steps: int) -> None:
        """Go on with the learning-rate schedule as if so many optimizer steps were behind it. Another run's checkpoint
        was loaded: its steps are the optimizer's, not this run's schedule's."""

    @abstractmethod
    def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[GreedyCompletion]:
        """Greedy continuation of each prompt by the training forward pass: the proof that an export must repeat. Of a
        model with a value head these are its `values`, and this raises ModelError."""

    def close(self) -> None:
        """Release devices and process groups."""


@dataclass(frozen=True)
class GreedyCompletion:
    """Tokens of a greedy continuation, and how far each was ahead of the runner-up (logits, nats)."""

    tokens: list[int]
    margins: list[float]


# What `forward_backward` returns whatever the loss: counts, which the caller adds up over ranks, and maxima.
ENGINE_SUMS = (
    "tokens",  # loss tokens seen
    "sequences",  # sequences with a loss token
    "micro_batches",  # forward passes with gradients
    "flops",  # of these and their backward passes, by the model's shape; tokens where that is not known
)
ENGINE_MAXIMA = ("micro_batch_tokens_max",)
# Besides, of a batch with `unit_B`: its units, and how many of their sequences are chosen and rejected.
UNIT_SUMS = tuple(UNIT_REDUCTIONS.values())

Emit = Callable[[Batch], None]


class RolloutEngine(ABC):
    """Holds a copy of the actor's weights and samples from it."""

    counts_progress: ClassVar[bool] = False  # as that of a `TrainEngine`, of what `step` writes
    progress_unit: ClassVar[str] = "token"  # what it counts

    @classmethod
    @abstractmethod
    def build(cls, config: RolloutConfig, rank: Rank) -> RolloutEngine: ...

    @classmethod
    def hold_part(cls, config: RolloutConfig, span: ReplicaSpan, address: str, port: int) -> None:
        """Hold this node's part of a replica that spans several, which meet at `address`, until the process is ended.
        Of engines whose tables say `spans_nodes`."""
        raise NotImplementedError

    @classmethod
    def import_code(cls, config: RolloutConfig) -> None:
        """Do the same as `TrainEngine.import_code`."""

    @classmethod
    def on_meta(cls, config: RolloutConfig, rank: Rank) -> OnMeta | None:
        """Do the same as `TrainEngine.on_meta`."""
        return None

    @abstractmethod
    def built(self) -> ModelBuilt: ...

    @abstractmethod
    def weight_specs(self) -> Sequence[WeightSpec]:
        """Weights that this engine must be given, with its own dtype and shape, in any order. Adapters too, where it
        applies them itself."""

    def weight_form(self) -> WeightForm:
        """Say what the next import must bring. An engine that applies adapters itself wants them and the model "apart"
        at first and whenever it has lost the model, afterwards "adapters" alone."""
        return "merged"

    @abstractmethod
    def import_weight(self, spec: WeightSpec, buffer: NDArray[np.uint8]) -> str:
        """Load one weight from wire bytes; returns the xxh3-64 (hex) of the bytes *read back from the engine's own
        tensor*. Raises SyncError naming the weight when name, dtype or shape is not what the engine holds.

        One exception: sglang holds its tensors in a server that shows no bytes, so it reads back what it hands over,
        and compares the server's own hashes in `finish_import` (docs/rollout.md)."""

    def import_in_blocks(self, spec: WeightSpec, blocks: Iterable[NDArray[np.uint8]]) -> str:
        """Do the same as `import_weight`, from bytes that come block by block. A block is gone when the next one is
        asked for. An engine that can copy each to its place spares a copy of the whole weight."""
        whole_U, start = np.empty(spec.nbytes, dtype=np.uint8), 0
        for block_U in blocks:
            whole_U[start : start + len(block_U)] = block_U
            start += len(block_U)
        return self.import_weight(spec, whole_U)

    def import_from_device(self, weights: Sequence[tuple[WeightSpec, Buffer]]) -> list[str] | None:
        """Do the same as `import_weight`, for several from uint8 tensors on a device; returns their checksums
        (`word_sum`), read back from the engine's own tensors. When it returns, nothing reads the buffers any more.
        None, and nothing is loaded, where the engine takes weights from host memory alone."""
        return None

    @abstractmethod
    def finish_import(self) -> None:
        """All weights are in: tie, pack, drop every cached key and value. Until the first call, `generate` refuses."""

    @property
    @abstractmethod
    def open_requests(self) -> int:
        """Requests that were added and are neither finished nor aborted. While there is one that is not suspended,
        weights do not change; while there is any, the engine does not sleep."""

    @abstractmethod
    def add(self, requests: Sequence[SampleRequest]) -> None:
        """Take requests in, also while others are open; nothing is computed yet. What a completion is depends on its
        request alone, never on its neighbours. Raises BatchError, and takes none, where one is wrong: an id that is
        open, an empty prompt, more tokens than the engine was built for, a prefix that is not shared."""

    @abstractmethod
    def step(self) -> Sequence[Completion]:
        """Go on with the open requests, a token each or more; return those that have finished. An error leaves none
        open."""

    @abstractmethod
    def abort(self, ids: Collection[int] | None = None) -> None:
        """Drop these open requests, by default all. Ids that are not open are left alone: their answer was faster."""

    def suspend(self) -> Sequence[Completion]:
        """Break off the open requests, so that weights may change; return what has been written of those that
        have a token. To continue, add each again with its tokens after its own, and its position as much further on:
        all of it is then computed with the new weights. An engine that keeps its cache leaves them open: the next
        `step` continues. Engines that cannot do it raise NotImplementedError (`RolloutTable.suspends`)."""
        raise NotImplementedError(f"{type(self).__name__} does not tell what it has written before the end")

    def forget(self, ids: Collection[int]) -> None:
        """Free what was kept of these ids for a later turn (`SampleRequest.keep`): none follows."""

    def counters(self) -> Mapping[str, int]:
        """Return what was counted since the engine was built (`decode_steps`, …)."""
        return {}

    def generate(self, prompts: Batch, sampling: Sampling, emit: Emit) -> Mapping[str, int]:
        """Write one completion for each prompt: `add`, and `step` to the end. `prompts` has PROMPT_COLUMNS, and where
        some samples take the likeliest token whatever `sampling` says, `greedy_B`.

        `emit` is called with finished batches (SAMPLE_COLUMNS: the tokens of prompt and completion, mask 1 on what
        this call wrote and 0 on all of the prompt, `rollout_logprob_T`, `finished_B`) as soon as whole groups are done,
        each sample exactly once. Returns counters (`generated_tokens`, …)."""
        completions, before = Completions(prompts, sampling, emit), self.counters()
        self.add(completions.requests())
        try:
            while self.open_requests:
                for completion in self.step():
                    completions.finish(completion)
                completions.flush()
        except BaseException:
            self.abort()
            raise
        counted = {name: count - before.get(name, 0) for name, count in self.counters().items()}
        return {"generated_tokens": completions.generated_tokens, **counted}

    @abstractmethod
    def score(self, batch: Batch, temperature: float) -> NDArray[np.float32]:
        """`logprob_T` of given sequences (every token but each first has one; first is 0): the behaviour probe."""

    @abstractmethod
    def sleep(self, level: int) -> None:
        """1: free the KV cache, weights to host memory. 2: free both; weights must be imported again."""

    @abstractmethod
    def wake(self, tags: Sequence[str]) -> None:
        """Bring back "weights" and/or "kv_cache". After level 2 weights come back empty until `finish_import`."""

    def gpu_memory_GiB(self) -> tuple[float, float] | None:
        """Return what this replica holds of its fullest GPU, and the most that it has held. None where torch's
        allocator in this process knows."""
        return None

    def close(self) -> None: ...

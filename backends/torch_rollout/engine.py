"""The `torch` rollout engine: a Hugging Face model that samples, inside the worker's own process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from backends.completions import Completion, SampleRequest
from backends.hf.attention_choice import choose
from backends.hf.hf_model import (
    build_model,
    build_without_memory,
    describe,
    import_code,
    read_config,
)
from backends.hf.matmul import use_fast_linears
from backends.hf.model_shape import end_tokens, weight_spec
from backends.memory import hand_back
from backends.packed.layout import PackedLayout
from backends.protocol import OnMeta, Rank, WeightSpec
from backends.rollout.stop_tokens import stop_tokens
from backends.rollout.synced_sampler import WEIGHTS, SyncedSampler
from backends.torch_rollout.decode_check import check_decoding, kept_of_a_token
from backends.torch_rollout.decode_graphs import DecodeGraphs
from backends.torch_rollout.decoder import Decoder
from backends.torch_rollout.fused import choose_forward, side_by_side
from backends.torch_rollout.kept_prefixes import KeptPrefixes
from backends.torch_rollout.kv_cache import KvCache
from backends.torch_rollout.runner import Forward, packed_positions
from backends.weights.checksum import Digest, blocks_of
from backends.weights.host_pieces import fill, host_checksum
from backends.weights.tensor_bytes import named_weights, tensor_bytes, typed
from backends.weights.word_sum import word_sums
from specs.errors import ModelError, SyncError
from specs.schema.engines.torch_rollout_table import TorchRolloutTable
from specs.wire.as_built import ModelBuilt
from specs.wire.batch import Batch
from specs.wire.role_config import ModelConfig, RolloutConfig


class TorchRolloutEngine(SyncedSampler):
    """Continuous batching over a preallocated cache. Weights come by `import_weight`, never from the model folder."""

    counts_progress = True

    def __init__(self, config: RolloutConfig, model: PreTrainedModel) -> None:
        assert isinstance(config.engine, TorchRolloutTable)
        self._weights = named_weights(model)
        held = {name: weight_spec(name, tensor) for name, tensor in self._weights.items()}
        super().__init__(config, held, f"{type(model).__name__} here", model.config.get_text_config().vocab_size)
        self.table, self.model = config.engine, model
        self.device = torch.device(config.model.device)
        ends = end_tokens(config.model.path, model.config.get_text_config().eos_token_id)
        self.stops = stop_tokens(ends, config, ask_tokenizer=True)
        self._take_memory()
        self._forward: Forward | None = None  # chosen and checked with the first weights
        self._cache: KvCache | None = None
        self._graphs: DecodeGraphs | None = None  # of the cache
        self._decoder: Decoder | None = None  # of the open requests
        self._kept = KeptPrefixes(self.table.max_sequences * config.model.max_sequence_tokens)
        self._dropped = False  # slept at level 2: weights have no memory

    @classmethod
    def build(cls, config: RolloutConfig, rank: Rank) -> TorchRolloutEngine:
        """Raises ModelError for a model or an attention that this engine cannot run."""
        return cls(config, _make_model(config, partial(build_model, load_weights=False)))

    @classmethod
    def import_code(cls, config: RolloutConfig) -> None:
        import_code(config.model)

    @classmethod
    def on_meta(cls, config: RolloutConfig, rank: Rank) -> OnMeta:
        return OnMeta(describe(_make_model(config, build_without_memory), config.model, checksum=False))

    def built(self) -> ModelBuilt:
        return describe(self.model, self.config.model, checksum=False)

    # ── weights ───────────────────────────────────────────────────────────────────────────────────

    def import_weight(self, spec: WeightSpec, buffer: NDArray[np.uint8]) -> str:
        if len(buffer) != spec.nbytes:
            raise SyncError(f"weight {spec.name} is truncated: {len(buffer)} of {spec.nbytes} bytes")
        return self.import_in_blocks(spec, blocks_of(buffer))

    @torch.inference_mode()
    def import_in_blocks(self, spec: WeightSpec, blocks: Iterable[NDArray[np.uint8]]) -> str:
        tensor = self._take(spec, spec.nbytes)
        if tensor.is_cpu and tensor.is_contiguous():
            return _copied(blocks, tensor_bytes(tensor))
        arrived = tensor.contiguous()  # itself, or memory that its bytes come to first
        fill(arrived, blocks)
        if arrived is not tensor:
            tensor.copy_(arrived)
        return host_checksum(tensor.contiguous())

    @torch.inference_mode()
    def import_from_device(self, weights: Sequence[tuple[WeightSpec, Tensor]]) -> list[str] | None:
        held = {self._weights[spec.name].device for spec, _ in weights if spec.name in self._weights}
        if not held <= {buffer_U.device for _, buffer_U in weights}:
            return None
        taken = [self._take(spec, len(buffer_U)) for spec, buffer_U in weights]
        for tensor, (_, buffer_U) in zip(taken, weights, strict=True):
            tensor.copy_(typed(buffer_U, tensor.dtype).view(tensor.shape))
        return word_sums(taken)

    def _take(self, spec: WeightSpec, nbytes: int) -> Tensor:
        """Return the tensor that a weight of `nbytes` bytes is to fill."""
        self._arrive(spec, nbytes)
        return self._weights[spec.name]

    @torch.inference_mode()
    def _adopt(self) -> None:
        self.model.tie_weights()
        if not self.table.keep_cache:
            self._kept.clear()
        if self._open:
            assert self._decoder is not None, "requests were added"
            self._decoder.ready.clear()  # the next token of each is drawn with the new weights
        else:
            self._decoder = None  # what its cache holds belongs to the old weights
        if self._forward is None:
            self._forward = choose_forward(self.model, self.device, self.config.model.max_sequence_tokens)
            check_decoding(self.model, self._forward, self.device)

    # ── sampling ──────────────────────────────────────────────────────────────────────────────────

    def _begin(self, requests: Sequence[SampleRequest]) -> None:
        assert self._forward is not None, "it is made when the weights are complete"
        slots = min(self.table.max_sequences, len(self._open))
        if self._decoder is None or len(self._open) == len(requests):  # nothing else is open
            cache = self._cache_for(slots)
            ahead, counts = self.table.prefill_tokens, self.counts
            self._decoder = Decoder(self._forward, cache, self.stops, ahead, counts, self._kept, self._graphs)
        elif slots > self._decoder.cache.slots:
            # Twice as many: those that come one by one would copy the cache each time.
            self._decoder.cache.grow(min(self.table.max_sequences, max(slots, 2 * self._decoder.cache.slots)))
            self._decoder.graphs = self._graphs = self._graphs_of(self._decoder.cache)
        self._decoder.add(requests)

    @torch.inference_mode()
    def _advance(self) -> Sequence[Completion]:
        assert self._decoder is not None, "requests were added"
        return self._decoder.step()

    @torch.inference_mode()
    def _drop(self, ids: Collection[int]) -> None:
        self._kept.forget(ids)
        if self._open:
            assert self._decoder is not None, "requests were added"
            self._decoder.drop(ids)
        else:
            self._decoder = None

    def _keeps_cache(self) -> bool:
        return self.table.keep_cache

    def _written(self) -> Sequence[Completion]:
        assert self._decoder is not None, "requests were added"
        return self._decoder.written()

    def forget(self, ids: Collection[int]) -> None:
        self._kept.forget(ids)

    @torch.inference_mode()
    def score(self, batch: Batch, temperature: float) -> NDArray[np.float32]:
        self._check_usable("score", (WEIGHTS,))
        assert self._forward is not None, "it is made when the weights are complete"
        logprob_T = np.zeros(batch.num_tokens, dtype=np.float32)
        offsets = batch.offsets
        for index, tokens in enumerate(batch.sequences("tokens_T")):
            if len(tokens) < 2:
                continue
            lengths = [len(tokens)]
            tokens_T = torch.from_numpy(tokens.astype(np.int64)).to(self.device)
            layout = PackedLayout(lengths, self.device)
            logits = self._forward(tokens_T, packed_positions(lengths, self.device), layout)
            scores = (logits[:-1].float() / temperature).log_softmax(-1).gather(-1, tokens_T[1:, None])[:, 0]
            logprob_T[offsets[index] + 1 : offsets[index + 1]] = scores.cpu().numpy()
        return logprob_T

    def _cache_for(self, slots: int) -> KvCache:
        """The cache with at least that many slots. Made at the first use and kept until the engine sleeps."""
        if self._cache is None or self._cache.slots < slots:
            self._cache = self._graphs = None
            _give_back_memory(self.device)
            length, dtype = self.config.model.max_sequence_tokens, self.model.dtype
            try:
                kept, states = kept_of_a_token(self.model, self.device)
                self._cache = KvCache(kept, states, slots, length, self.device, dtype)
                self._graphs = self._graphs_of(self._cache)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not isinstance(error, torch.OutOfMemoryError) and "alloc" not in str(error):
                    raise
                raise ModelError(
                    f"no memory for a cache of {slots} sequences of {length} tokens: {error}",
                    hint="lower rollout.engine.max_sequences",
                ) from None
        return self._cache

    def _graphs_of(self, cache: KvCache) -> DecodeGraphs | None:
        assert self._forward is not None, "it is made when the weights are complete"
        if self.device.type == "cpu" or self.table.enforce_eager or not self._forward.capturable:
            return None
        return DecodeGraphs(self._forward, cache, self.model.config.get_text_config().vocab_size)

    # ── sleep ─────────────────────────────────────────────────────────────────────────────────────

    def _fall_asleep(self, level: int) -> None:
        self._cache = self._decoder = self._graphs = None
        self._kept.clear()
        if level == 2:
            self._drop_weights()
        elif WEIGHTS in self._awake and self.device.type != "cpu":
            self._move_weights(torch.device("cpu"))
        _give_back_memory(self.device)

    def _wake_up(self, tag: str) -> None:
        if tag == WEIGHTS and self._dropped:
            self._take_memory()
            self._dropped = False
            if self._forward is not None:
                self._forward.join()
        elif tag == WEIGHTS and self.device.type != "cpu":
            self._move_weights(self.device)

    def _take_memory(self) -> None:
        """Give weights memory. What they held is lost. What the fused path wants side by side has one memory, so that
        nothing is ever copied to bring it together."""
        shape = {id(tensor): torch.Size(self._held[name].shape) for name, tensor in self._weights.items()}
        groups = list(side_by_side(self.model))
        grouped = {id(tensor) for group in groups for tensor in group}
        for group in [*groups, *([tensor] for tensor in self._weights.values() if id(tensor) not in grouped)]:
            sizes = [shape[id(tensor)].numel() for tensor in group]
            block = torch.empty(sum(sizes), dtype=group[0].dtype, device=group[0].device)
            for tensor, part in zip(group, block.split(sizes), strict=True):
                tensor.data = part.view(shape[id(tensor)])

    def _move_weights(self, device: torch.device) -> None:
        if self._forward is not None:
            self._forward.release()
        cast(nn.Module, self.model).to(device)  # as in `build_model`
        self._weights = named_weights(self.model)  # parameters keep their identity, buffers do not
        if self._forward is not None and device == self.device:
            self._forward.join()

    def _drop_weights(self) -> None:
        if self._forward is not None:
            self._forward.release()
        for tensor in self._weights.values():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._dropped = True

    def close(self) -> None:
        self._cache = self._decoder = self._graphs = None
        self._kept.clear()
        self._drop_weights()
        self._forward = None
        _give_back_memory(self.device)


def _make_model(config: RolloutConfig, make: Callable[[ModelConfig], PreTrainedModel]) -> PreTrainedModel:
    """A model that takes no gradients, by `make`. Raises ModelError for an attention that this engine cannot run."""
    decision = choose(config.model, read_config(config.model), decodes=True)
    model = make(config.model.model_copy(update={"attn_implementation": decision.implementation}))
    use_fast_linears(model, config.model.device)
    return model.requires_grad_(False)


def _copied(blocks: Iterable[NDArray[np.uint8]], held_U: NDArray[np.uint8]) -> str:
    """Copy each block to its place in the model's memory; return the checksum of what lies there, which is hashed while
    the cache holds it: checking costs no second trip to memory."""
    digest, start = Digest(), 0
    for block_U in blocks:
        there_U = held_U[start : start + len(block_U)]
        there_U[:] = block_U
        digest.update(there_U)
        start += len(block_U)
    return digest.hexdigest()


def _give_back_memory(device: torch.device) -> None:
    gc.collect()
    hand_back(device.type)

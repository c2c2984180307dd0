"""The static side of the rollout engine `torch` (`backends/torch_rollout/`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from specs.errors import Problem
from specs.memory_parts import DTYPE_BYTES, Part
from specs.schema.engines.engine_table import CacheKeepingTable, EngineContext
from specs.schema.engines.held_model import FP32_BYTES, Replica, replica_weights
from specs.schema.engines.transformers_tables import BuiltHere
from specs.schema.mesh import Mesh


class TorchRolloutTable(BuiltHere, CacheKeepingTable):
    """The embedded sampler: continuous batching over a preallocated KV cache, on CPU or GPU."""

    kind: Literal["torch"] = "torch"
    max_sequences: int = Field(256, gt=0)
    """Sequences decoded at the same time (slots of the KV cache)."""
    prefill_tokens: int = Field(8192, gt=0)
    """Most prompt tokens that go through the model at once."""
    enforce_eager: bool = False
    """Launch each kernel of a decode step by itself, also on a GPU, where CUDA graphs launch all at once."""

    engine_class: ClassVar[str | None] = "backends.torch_rollout.engine:TorchRolloutEngine"
    parallel_on_cpu: ClassVar[bool | None] = False

    def mesh(self, processes: int) -> Mesh:
        return Mesh(processes, 1, axes={})

    def problems(self, context: EngineContext) -> Iterator[Problem]:
        longest = context.max_prompt_tokens
        if self.prefill_tokens < longest:
            message = f"less than the longest prompt may have ({longest} tokens)"
            yield Problem(f"{context.role}.engine.prefill_tokens", message, f"use at least {longest}")

    def memory(self, replica: Replica) -> Iterator[Part]:
        """Reserve a cache for as many sequences of full length as are decoded at a time."""
        yield from replica_weights(replica)
        slots = min(self.max_sequences, replica.sequences)
        cache = slots * replica.max_sequence_tokens * replica.cache_bytes_per_token
        cache += slots * replica.state_bytes_per_sequence
        yield Part("KV cache", cache, replica.awake, exact=True)
        if replica.several_turns:
            waiting = min(self.max_sequences, replica.sequences) * replica.max_sequence_tokens
            yield Part("waiting episodes", waiting * replica.cache_bytes_per_token, replica.awake)
        facts, size = replica.facts, DTYPE_BYTES[replica.dtype]
        prompts = max(1, min(self.prefill_tokens, replica.sequences * replica.max_prompt_tokens))
        inner = facts.intermediate_size or 4 * facts.hidden_size
        forward = prompts * (3 * inner + 4 * facts.hidden_size) * size
        yield Part("prompts going through", forward + prompts * replica.cache_bytes_per_token, replica.awake)
        # As the model gives them, in fp32, divided by the temperature, log-probs; their cumulative sum in fp64.
        yield Part("logits", slots * facts.vocab_size * (size + 5 * FP32_BYTES), replica.awake)

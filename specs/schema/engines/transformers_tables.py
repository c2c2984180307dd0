"""Base tables of the engines whose models are transformers' own, built by `backends/hf/hf_model.py`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from specs.model_facts import ModelFacts
from specs.schema.engines.engine_table import Attends, EngineTable, ModelOf, TrainTable
from specs.schema.engines.kernel_choice import Asked
from specs.schema.role_section import DType

HUGGING_FACE = ("torch", "transformers", "accelerate", "packaging")
KEPT_OF_MLP = 4
"""Tensors [tokens, width of the MLP] that each layer keeps: gate, its activation, up projection, product."""


class BuiltHere(EngineTable):
    """An engine that builds transformers' class and takes its attention from the spec."""

    packages: ClassVar[tuple[str, ...] | None] = HUGGING_FACE
    attention: ClassVar[Attends | None] = "spec"
    model_of: ClassVar[ModelOf | None] = "transformers"


class TrainedHere(BuiltHere, TrainTable):
    """A train engine on top of `backends/train/engine.py`, which computes, saves and exports."""

    logits_chunk_tokens: int | None = Field(None, gt=0)
    """Response tokens whose logits exist at the same time. Unset: as many as make 64 MiB of logits on the CPU, 256
    MiB on a GPU, and 4096 at most."""

    checkpoint_format: ClassVar[str | None] = "tensor shards"  # backends/train/tensor_shards.py
    checkpoint_bytes: ClassVar[int | None] = 12  # the fp32 weight and both moments
    splits_sequences: ClassVar[bool] = True
    resumes_reshaped: ClassVar[bool | None] = True
    angles_kept: ClassVar[int] = 0
    """Tensors [tokens, head size] that each layer keeps of rotating queries and keys; 0: all layers share them."""
    always_entropy: ClassVar[bool] = False
    """Whether the head computes entropies for every loss: one more copy of a chunk of logits."""

    def logits_chunk(self, vocabulary: int, *, on_gpu: bool) -> int:
        """Return `logits_chunk_tokens` in effect. Peaks then do not grow with the vocabulary; a GPU needs more rows at
        a time to be busy with a matrix product."""
        elements = 2**26 if on_gpu else 2**24
        return self.logits_chunk_tokens or max(1, min(4096, elements // max(1, vocabulary)))

    def mlp_tensors(self, facts: ModelFacts) -> int:
        """Return what `KEPT_OF_MLP` is in the layers of this engine."""
        return KEPT_OF_MLP

    def adds_gradients_in_place(self, dtype: DType) -> bool:
        """Return whether a gradient may be added to what the engine holds as soon as it is computed: it is fp32, whole,
        and waits for nothing."""
        return False


class OwnModules(TrainedHere):
    """A train engine that runs transformers' own modules."""

    kernels: Asked = "torch"
    """Choose what computes norms and gated MLPs. `torch`: the model's own modules. `liger`: Triton kernels of the
    package liger-kernel, on a GPU, or the spec is refused. `auto`: those where they can be had, else the model's own;
    `check-config` and `as_built.json` say which."""

"""The engines: a table for each `kind` of `[actor] engine`, `[ref] engine` and `[rollout] engine`.

All keys have defaults, so that `--set actor.engine.kind=KIND` alone is a valid change.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, WrapValidator

from specs import foreign_engines
from specs.table import PathText, Table

OWN_ATTENTION = ("vllm", "sglang")  # rollout engines that choose their attention themselves


class DdpEngine(Table):
    """Every rank holds the whole model; gradients are summed once per optimizer step."""

    kind: Literal["ddp"] = "ddp"
    logits_chunk_tokens: int = Field(
        4096, gt=0, description="Response tokens whose logits exist at the same time; lower it for large vocabularies."
    )


class Fsdp2Engine(Table):
    """PyTorch's FSDP2: each group of `shard` ranks holds the model once, cut in rows; groups are replicas."""

    kind: Literal["fsdp2"] = "fsdp2"
    shard: int | None = Field(
        None, gt=0, description="Ranks that hold the model together; unset: all processes of the role."
    )
    replicate: int = Field(
        1, gt=0, description="Groups that each hold the whole model; shard × replicate is the role's processes."
    )
    reshard_after_forward: bool = Field(
        True,
        description="Let go of a layer's gathered parameters after its forward pass and gather them again for the "
        "backward pass; false is quicker and holds the whole model in compute precision.",
    )
    offload: Literal["none", "cpu"] = Field(
        "none",
        description="`cpu`: parameters, gradients and optimizer live in host memory and visit the GPU layer by layer.",
    )
    sync_every_micro_batch: bool = Field(
        False,
        description="Reduce gradients after every micro-batch: less memory (no whole gradient is kept), more traffic.",
    )
    logits_chunk_tokens: int = Field(
        4096, gt=0, description="Response tokens whose logits exist at the same time; lower it for large vocabularies."
    )


class ZeroEngine(Table):
    """DeepSpeed ZeRO: optimizer state (1), gradients too (2), parameters too (3) are cut across the ranks."""

    kind: Literal["zero", "zero3"] = "zero"
    stage: Literal[1, 2, 3] = Field(3, description="What is cut across ranks. `zero3` is `zero` with stage 3.")
    offload_optimizer: bool = Field(False, description="Keep optimizer state in host memory and step there.")
    offload_parameters: bool = Field(False, description="Keep parameters in host memory; stage 3 only.")
    logits_chunk_tokens: int = Field(
        4096, gt=0, description="Response tokens whose logits exist at the same time; lower it for large vocabularies."
    )
    deepspeed: dict[str, Any] = Field(
        {},
        description="More keys for DeepSpeed's configuration (`rlctl train --dry-run` shows all of it). A key that the "
        "spec decides elsewhere is refused.",
    )


class FakeTrainEngine(Table):
    """A numpy bigram language model with exact gradients: tests the whole frame in milliseconds, without torch."""

    kind: Literal["fake"] = "fake"


class TorchRolloutEngine(Table):
    """The embedded sampler: continuous batching over a preallocated KV cache, on CPU or GPU."""

    kind: Literal["torch"] = "torch"
    max_sequences: int = Field(256, gt=0, description="Sequences decoded at the same time (slots of the KV cache).")
    prefill_tokens: int = Field(8192, gt=0, description="Most prompt tokens that go through the model at once.")


class VllmEngine(Table):
    """vLLM in the role's own process: for models and batches where its kernels pay, usually on GPUs."""

    kind: Literal["vllm"] = "vllm"
    tensor_parallel: int = Field(
        1,
        gt=0,
        description="Workers of vLLM that hold the model together, a part each: a GPU each, on the CPU a process each.",
    )
    gpu_memory_utilization: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the GPU's memory that vLLM takes for weights, activations and KV cache. A GPU of its own "
        "can give 0.9; shared with a trainer, what the trainer leaves during a sync.",
    )
    kv_cache_GiB: float | None = Field(
        None,
        gt=0,
        description="Size of the KV cache; unset: 1 on the CPU, on a GPU what `gpu_memory_utilization` leaves.",
    )
    max_sequences: int = Field(256, gt=0, description="Sequences decoded at the same time.")
    prefix_caching: bool = Field(True, description="Compute the prompt of a group once for all of its answers.")
    lora: Literal["merged", "adapters"] = Field(
        "merged",
        description="What a sync sends of an actor that trains adapters: the whole model with them `merged` in, "
        "or the model once and then the `adapters` alone, which vLLM applies itself.",
    )
    enforce_eager: bool | None = Field(
        None,
        description="Run the model without compiling it and without CUDA graphs; unset: only on the CPU, where "
        "compiling takes longer than it saves.",
    )


class SglangEngine(Table):
    """An SGLang server per replica, as a child of the role's process, spoken to over HTTP. Needs GPUs."""

    kind: Literal["sglang"] = "sglang"
    tensor_parallel: int = Field(1, gt=0, description="GPUs that hold the model together.")
    memory_fraction: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Share of the GPU's memory for weights and KV cache together. A GPU of its own can give 0.85; "
        "shared with a trainer, what the trainer leaves during a sync.",
    )
    max_sequences: int = Field(256, gt=0, description="Sequences decoded at the same time.")
    prefix_caching: bool = Field(True, description="Compute the prompt of a group once for all of its answers.")
    deterministic: bool = Field(
        True,
        description="SGLang's deterministic inference: a sample depends on `run.seed` and its number alone. Without it "
        "sampling is faster, and SGLang takes no seed of a sample.",
    )
    weights_backup: bool = Field(
        False,
        description="Let the weights survive a sleep in host memory. A run does without: a sync follows every sleep.",
    )
    weights_dir: PathText = Field(
        "",
        description="Folder that a sync passes the weights through, whole, as safetensors; the server must see it, and "
        "it is emptied after each sync. Empty: shared memory (`/dev/shm`).",
    )


class FakeRolloutEngine(Table):
    """Samples from the fake trainer's bigram model."""

    kind: Literal["fake"] = "fake"


# Kinds that are none of these may be another package's (`specs/foreign_engines.py`).
TrainEngineTable = Annotated[
    DdpEngine | Fsdp2Engine | ZeroEngine | FakeTrainEngine,
    Field(discriminator="kind"),
    WrapValidator(foreign_engines.or_foreign("train")),
    PlainSerializer(foreign_engines.dump),
]
RolloutEngineTable = Annotated[
    TorchRolloutEngine | VllmEngine | SglangEngine | FakeRolloutEngine,
    Field(discriminator="kind"),
    WrapValidator(foreign_engines.or_foreign("rollout")),
    PlainSerializer(foreign_engines.dump),
]

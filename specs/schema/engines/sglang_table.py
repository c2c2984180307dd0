"""The static side of the rollout engine `sglang` (`backends/sglang_rollout/`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from specs.errors import Problem
from specs.memory_parts import GIB, Part
from specs.schema.engines.engine_table import Attends, EngineContext, ModelOf, RolloutTable
from specs.schema.engines.held_model import Replica, share_of_gpu
from specs.schema.mesh import Mesh
from specs.schema.table import PathText
from specs.text import show

_BEYOND_FRACTION_GIB = 2.0  # memory beside weights and cache: activations, graphs (an assumption)
_SET_BY_THE_ENGINE = ("SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")


class SglangTable(RolloutTable):
    """An SGLang server per replica, as a child of the role's process, spoken to over HTTP. Needs GPUs."""

    kind: Literal["sglang"] = "sglang"
    tensor_parallel: int = Field(1, gt=0)
    """GPUs that hold the model together."""
    memory_fraction: float = Field(0.5, gt=0, lt=1)
    """Share of the GPU's memory for weights and KV cache together. A GPU of its own can give 0.85; shared with a
    trainer, what the trainer leaves during a sync."""
    max_sequences: int = Field(256, gt=0)
    """Sequences decoded at the same time."""
    prefix_caching: bool = True
    """Compute equal prompts once for all of their completions."""
    deterministic: bool = True
    """SGLang's deterministic inference: a sample depends on `run.seed` and its number alone. Without it sampling is
    faster, and SGLang takes no seed of a sample."""
    weights_backup: bool = False
    """Let the weights survive a sleep in host memory. A run does without: a sync follows every sleep."""
    weights_dir: PathText = ""
    """Folder that a sync passes the weights through, whole, as safetensors; the server must see it, and it is
    emptied after each sync. Empty: memory of this host."""

    engine_class: ClassVar[str | None] = "backends.sglang_rollout.engine:SglangRolloutEngine"
    packages: ClassVar[tuple[str, ...] | None] = ("torch", "transformers", "packaging", "sglang")
    where_to_get: ClassVar[str] = (
        "give it an environment: python3 -m venv .venv-sglang && .venv-sglang/bin/pip install sglang==0.5.23 pydantic "
        'pyzmq numpy safetensors xxhash psutil packaging; then set rollout.python = ".venv-sglang/bin/python"'
    )
    attention: ClassVar[Attends | None] = "engine"
    model_of: ClassVar[ModelOf | None] = "transformers"
    parallel_on_cpu: ClassVar[bool | None] = False

    def mesh(self, processes: int) -> Mesh:
        return Mesh(processes, 1)

    def devices_per_process(self) -> int:
        return self.tensor_parallel

    def problems(self, context: EngineContext) -> Iterator[Problem]:
        """Refuse the CPU, and what its log-probs do not describe."""
        role, section = context.role, context.section
        if not section.devices:
            message = f"needs a GPU, and {role} runs on the CPU: SGLang publishes no packages for it"
            hint = f'name GPUs in {role}.devices, or use {role}.engine.kind = "torch" or "vllm"'
            yield Problem(f"{role}.engine.kind", message, hint)
        for key, off in (("top_p", 1.0), ("top_k", 0)):
            if getattr(section, key) != off:
                message = "the log-probs that SGLang returns leave it out, so they would not be those of the samples"
                hint = f'set {role}.{key} = {off:g}, or use {role}.engine.kind = "torch" or "vllm"'
                yield Problem(f"{role}.{key}", message, hint)
        for evaluation in context.evaluations:
            if evaluation.top_p < 1:
                hint = f'leave it out, or use {role}.engine.kind = "torch" or "vllm"'
                yield Problem(
                    f"{evaluation.key}.top_p", "the engine sglang samples without top_p", hint, show(evaluation.top_p)
                )
        for name in _SET_BY_THE_ENGINE:
            if name in section.env:
                yield Problem(f"{role}.env.{name}", "rlctl sets this one itself", "remove the key")

    def memory(self, replica: Replica) -> Iterator[Part]:
        """Count the share that it is given, and what it needs beside."""
        yield from share_of_gpu(replica, int(self.memory_fraction * replica.gpu_GiB * GIB), kept=self.weights_backup)
        yield Part("activations, graphs", int(_BEYOND_FRACTION_GIB * GIB), replica.awake)

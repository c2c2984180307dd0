"""The static side of the train engine `megatron` (`backends/megatron/`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import ceil
from typing import Any, ClassVar, Literal

from pydantic import Field

from specs.errors import Problem
from specs.memory_parts import ADAM_BYTES, Part
from specs.model_facts import ModelFacts, shares_out, sharing_degrees
from specs.model_shapes import LM_HEADS, SCORE_LAYER, ParameterShape
from specs.schema.engines.engine_table import Attends, EngineContext
from specs.schema.engines.held_model import FP32_BYTES, HeldTrainer, state
from specs.schema.engines.library_keys import Settings
from specs.schema.engines.megatron_config import GRADIENTS, LOCAL, MEGATRON, TRANSFORMER_ENGINE, adam_settings
from specs.schema.engines.transformers_tables import HUGGING_FACE, TrainedHere
from specs.schema.mesh import CONTEXT, EXPERT, EXPERT_TENSOR, Mesh, divisors
from specs.schema.role_section import DType, Optimizer, RoleSection
from specs.schema.roles import RoleName
from specs.schema.table import no_effect
from specs.text import listed, show

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
"""Values of `model_type` whose weights have a place in Megatron's layers (`backends/megatron/weight_map.py`)."""
EXPERTS = ".mlp.experts."
_CUT = ("embed_tokens.weight", "lm_head.weight", "_proj.weight", "_proj.bias")
_INSTEAD = 'or engine.kind = "fsdp2" or "zero3", which train any model'


class MegatronTable(TrainedHere):
    """Megatron-core: layers are sharded across tensor ranks and dealt out to pipeline stages; groups are replicas."""

    kind: Literal["megatron"] = "megatron"
    tensor_parallel: int = Field(1, gt=0)
    """Ranks that each layer is sharded across."""
    pipeline_parallel: int = Field(1, gt=0)
    """Stages that the layers are shared out to, as many to each."""
    context_parallel: int = Field(1, gt=0)
    """Ranks that each row is split across: attention exchanges rows for heads (Ulysses, Jacobs et al. 2023). A rank
    computes so many times fewer tokens of a row of `micro_batch_tokens`."""
    virtual_pipeline: int = Field(1, gt=0)
    """Groups of layers on each stage, which ranks compute in turn: the pipeline waits less."""
    tensor_sequence_parallel: bool = False
    """Split activations between the sharded layers along the row, across the tensor ranks. (Megatron calls it sequence
    parallelism; `sequence_parallel` of the role is another thing.)"""
    expert_parallel: int = Field(1, gt=0)
    """Ranks that the experts of a layer are shared out to."""
    expert_tensor_parallel: int | None = Field(None, gt=0)
    """Ranks that each expert is sharded across; default: `tensor_parallel`."""
    megatron: dict[str, Any] = Field({})
    """More options of Megatron-core's configurations, by their own names, which check them (`rlctl train --dry-run`
    shows all). What the spec or the model decides is refused."""

    engine_class: ClassVar[str | None] = "backends.megatron.engine:MegatronTrainEngine"
    packages: ClassVar[tuple[str, ...] | None] = (*HUGGING_FACE, "megatron-core")
    own_environment: ClassVar[bool] = True
    where_to_get: ClassVar[str] = "rlctl setup-engine megatron makes an environment for it"
    splits_sequences: ClassVar[bool] = False
    attention: ClassVar[Attends | None] = "engine"
    angles_kept: ClassVar[int] = 4  # cosines and sines, of queries and of keys
    always_entropy: ClassVar[bool] = True

    @property
    def group(self) -> int:
        """Ranks that hold a model together."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel

    @property
    def ranks_of_expert(self) -> int:
        """Ranks that each expert is sharded across."""
        return self.expert_tensor_parallel or self.tensor_parallel

    @property
    def expert_group(self) -> int:
        """Ranks of a stage that hold all experts of its layers together."""
        return self.expert_parallel * self.ranks_of_expert

    @property
    def order(self) -> str:
        """Return how ranks are numbered. Neighbours are the tensor ranks, then the stages of a model; replicas lie
        furthest apart. Megatron asks for the stages last where replicas hold experts together."""
        ranks = self.tensor_parallel * self.context_parallel
        return "tp-cp-ep-pp-dp" if self.expert_group == ranks else "tp-cp-ep-dp-pp"

    def mesh(self, processes: int) -> Mesh:
        """Return the mesh; a rule refuses axes that do not give the role's processes."""
        replicas, blocks = max(1, processes // self.group), self.pipeline_parallel if self.order.endswith("pp") else 1
        experts = (self.expert_parallel, self.ranks_of_expert)
        axes = mesh_axes(replicas, self.pipeline_parallel, self.tensor_parallel, experts, self.context_parallel)
        return Mesh(replicas, self.group, blocks=blocks, axes=axes)

    def problems(self, context: EngineContext) -> Iterator[Problem]:
        """Refuse meshes that do not fit the role's processes, what it does not do, and options that contradict."""
        role, section, optimizer = context.role, context.section, getattr(context.section, "optimizer", None)
        settings = self.settings(context.dtype, optimizer)
        yield from MEGATRON.problems(role, optimizer is not None, self.megatron, settings)
        yield from self._layer_problems(context)
        if section.processes % self.group:
            yield self._group_problem(role, section.processes)
        elif (ranks := section.processes // self.pipeline_parallel) % self.expert_group:
            message = (
                f"expert_parallel × ranks of each expert = {self.expert_parallel} × {self.ranks_of_expert}: groups of "
                f"{self.expert_group} ranks hold the experts of a stage, but a stage of {role} has {ranks} processes"
            )
            would = [n for n in divisors(ranks) if ranks % (n * self.ranks_of_expert) == 0]
            hint = f"use {listed(would)}" if would else f"{role}.engine.expert_tensor_parallel = 1 would fit"
            yield Problem(f"{role}.engine.expert_parallel", message, hint)
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            why = "pipeline_parallel is 1, and there are no stages that wait for each other"
            yield no_effect(f"{role}.engine.virtual_pipeline", why)
        if self.tensor_sequence_parallel and self.tensor_parallel == 1:
            why = "it splits activations across tensor ranks, and tensor_parallel is 1"
            yield no_effect(f"{role}.engine.tensor_sequence_parallel", why)
        if section.devices and getattr(section, "activation_offload", False):  # on the CPU it has no effect anywhere
            message = f'has no effect: {role}.engine.kind = "{self.kind}" keeps activations on the device'
            hint = f"remove the key; {role}.gradient_checkpointing saves as much"
            yield Problem(f"{role}.activation_offload", message, hint)
        if getattr(section, "lora", None) is not None:
            message = f'{role}.engine.kind = "{self.kind}" trains all weights: it has no adapters'
            hint = f'set {role}.engine = {{ kind = "fsdp2" }}: it trains adapters on the same ranks, and shards the '
            hint += f"model across all of them; or remove {role}.lora"
            yield Problem(f"{role}.lora", message, hint)

    def _group_problem(self, role: RoleName, processes: int) -> Problem:
        """Describe axes that do not give the role's processes, with what would."""
        axes = {"tensor_parallel": self.tensor_parallel, "pipeline_parallel": self.pipeline_parallel}
        if self.context_parallel > 1:
            axes["context_parallel"] = self.context_parallel
        message = (
            f"{' × '.join(axes)} = {' × '.join(map(str, axes.values()))}: groups of {self.group} ranks hold a "
            f"model, but {role} has {processes} processes"
        )
        hint = f"{role}.processes = {max(1, processes // self.group) * self.group} would fit, or axes whose product is "
        hint += listed(divisors(processes))
        return Problem(f"{role}.engine.tensor_parallel", message, hint)

    def _layer_problems(self, context: EngineContext) -> Iterator[Problem]:
        """Refuse layers of TransformerEngine where they cannot be."""
        role, asked = context.role, self.megatron.get("transformer_impl", LOCAL)
        key, hint = f"{role}.engine.megatron.transformer_impl", f'remove the key: "{LOCAL}" layers compute the same'
        if asked not in (LOCAL, TRANSFORMER_ENGINE):
            message = f"rlctl builds layers of {show(LOCAL)} or {show(TRANSFORMER_ENGINE)}"
            yield Problem(key, message, "write one of these, or remove the key", show(asked))
        elif asked == TRANSFORMER_ENGINE and context.device == "cpu":
            message = f"TransformerEngine computes on GPUs alone, and {role}.devices is empty"
            yield Problem(key, message, hint, show(TRANSFORMER_ENGINE))
        elif asked == TRANSFORMER_ENGINE and context.dtype == "fp32":
            message = f'TransformerEngine multiplies fp32 in TF32, and {role}.dtype is "fp32"'
            yield Problem(key, message, f'{hint}, or set {role}.dtype = "bf16"', show(TRANSFORMER_ENGINE))

    def model_problems(self, role: RoleName, section: RoleSection, facts: ModelFacts) -> Iterator[Problem]:
        """Refuse families without a table, and sizes that the axes do not divide."""
        key = f"{role}.engine"
        if facts.model_type not in FAMILIES:
            message = f"has no table of names for {facts.model_type or 'this model'}; it has for {', '.join(FAMILIES)}"
            yield Problem(f"{key}.kind", message, f"take one of these, {_INSTEAD}", show(self.kind))
            return
        if facts.sliding_window:
            message = f"has no sliding window, and the model's is of {facts.sliding_window} tokens"
            yield Problem(f"{key}.kind", message, f"take another model, {_INSTEAD}", show(self.kind))
        sizes = {"attention heads": facts.heads, "key and value heads": facts.kv_heads}
        sizes["rows of the MLP"] = facts.intermediate_size
        undivided = [f"{size} {name}" for name, size in sizes.items() if size % self.tensor_parallel]
        if undivided:
            fitting = [n for n in divisors(facts.heads) if not any(size % n for size in sizes.values())]
            message = f"does not divide the model's {' and '.join(undivided)}"
            yield Problem(f"{key}.tensor_parallel", message, f"use {listed(fitting)}", str(self.tensor_parallel))
        elif not shares_out(
            heads := facts.heads // self.tensor_parallel,
            keys := facts.kv_heads // self.tensor_parallel,
            self.context_parallel,
        ):
            message = (
                f"{heads} attention heads and {keys} key and value heads of a tensor rank cannot be dealt out to it"
            )
            hint = f"use {listed(sharing_degrees(heads, keys))}"
            yield Problem(f"{key}.context_parallel", message, hint, str(self.context_parallel))
        yield from self._expert_problems(key, facts)
        if facts.layers % self.pipeline_parallel:
            what = f"the model's {facts.layers} layers: every stage has as many"
            yield _not_divided(f"{key}.pipeline_parallel", self.pipeline_parallel, facts.layers, what)
        elif (each := facts.layers // self.pipeline_parallel) % self.virtual_pipeline:
            yield _not_divided(f"{key}.virtual_pipeline", self.virtual_pipeline, each, f"the {each} layers of a stage")

    def _expert_problems(self, key: str, facts: ModelFacts) -> Iterator[Problem]:
        """Refuse experts that cannot be dealt out, and axes of experts where there are none."""
        if not facts.experts:
            for name in ("expert_parallel", "expert_tensor_parallel"):
                if (given := getattr(self, name)) not in (1, None):
                    yield Problem(f"{key}.{name}", "has no effect: the model has no experts", "remove it", str(given))
            return
        if facts.experts % self.expert_parallel:
            what = f"the model's {facts.experts} experts"
            yield _not_divided(f"{key}.expert_parallel", self.expert_parallel, facts.experts, what)
        if (rows := facts.expert_size) % self.ranks_of_expert:
            what = f"the {rows} rows of an expert"
            yield _not_divided(f"{key}.expert_tensor_parallel", self.ranks_of_expert, rows, what)
        if self.tensor_parallel > 1 and not self.tensor_sequence_parallel:
            message = "experts on tensor ranks take tokens that are split across them"
            yield Problem(f"{key}.tensor_sequence_parallel", message, "set it to true", "false")

    def library_config(self, dtype: DType, optimizer: Optimizer | None, device: str) -> Mapping[str, Mapping[str, Any]]:
        """Return what the spec decides; the rest of its configuration is the model's own shape."""
        decided = dtype != "bf16" or not device.startswith("cuda")  # else whoever is there decides whose layers
        known = {"transformer_impl": LOCAL} if decided else {}
        return {"megatron": {**known, **self.settings(dtype, optimizer).fixed, **self.megatron}}

    def settings(self, dtype: DType, optimizer: Optimizer | None) -> Settings:
        """Return what rlctl tells Megatron-core. `optimizer` None: a role that does not learn."""
        fixed: dict[str, object] = {
            "tensor_model_parallel_size": self.tensor_parallel,
            "pipeline_model_parallel_size": self.pipeline_parallel,
            "sequence_parallel": self.tensor_sequence_parallel,
            "expert_model_parallel_size": self.expert_parallel,
            "expert_tensor_parallel_size": self.ranks_of_expert,
            "bf16": dtype == "bf16",
            "calculate_per_token_loss": True,  # gradients are summed over ranks; losses divide by global counts
            "variable_seq_lengths": True,
            **({} if optimizer is None else {**GRADIENTS, **adam_settings(optimizer)}),
        }
        if self.virtual_pipeline > 1:
            fixed["virtual_pipeline_model_parallel_size"] = self.virtual_pipeline
            # Stages that take turns send both ways at once, which two ranks mix up when it is one batch.
            fixed |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        if self.context_parallel > 1:
            fixed["context_parallel_size"] = self.context_parallel
        return Settings(fixed, {})

    def mlp_tensors(self, facts: ModelFacts) -> int:
        """Count an offset of 0 that Megatron adds to the up projection, which makes one more tensor of it while the
        first shares its memory with the gate; of an expert it weighs the product. Fused: the activation's two ends."""
        if self.megatron.get("bias_activation_fusion"):
            return 3
        return 6 if facts.experts else 5

    def memory(self, held: HeldTrainer) -> Iterator[Part]:
        """Count the stage that holds most: the first has the embedding, the last the head, which is the embedding once
        more where they are tied. Experts have data ranks of their own."""
        layers = 1 + max((p.layer for p in held.tensors.parameters if p.layer is not None), default=0)
        stages = [self._stage(held.tensors.parameters, stage, layers) for stage in range(self.pipeline_parallel)]
        most, experts = max(stages, key=sum)
        data = self.mesh(held.ranks).replicate
        expert_data = max(1, held.ranks // (self.expert_group * self.pipeline_parallel))
        owned = ceil(most / (data * self.context_parallel)) + ceil(experts / expert_data)
        yield state("weights", (most + experts) * held.compute_bytes)
        if held.optimizer is None:
            return
        if held.compute_bytes < FP32_BYTES:
            yield state("master weights", owned * FP32_BYTES)
        yield state("gradients", (most + experts) * FP32_BYTES, dropped=True)
        yield state("Adam moments", owned * ADAM_BYTES)

    def _stage(self, parameters: Iterable[ParameterShape], stage: int, layers: int) -> tuple[int, int]:
        """Return the elements of one stage on each of its tensor ranks: of dense layers, of experts."""
        each, last = ceil(layers / (self.pipeline_parallel * self.virtual_pipeline)), self.pipeline_parallel - 1
        every = list(parameters)
        tied = not any(p.name in (*LM_HEADS, SCORE_LAYER) for p in every)
        size = experts = 0
        for p in every:
            if p.layer is not None:
                here = p.layer // each % self.pipeline_parallel == stage
            elif p.name.endswith("embed_tokens.weight"):
                here = stage == 0 or (tied and stage == last)
            else:
                here = stage == last
            if here and EXPERTS in p.name:
                experts += p.elements // self.expert_group
            elif here:
                size += self._on_a_rank(p)
        return size, experts

    def _on_a_rank(self, parameter: ParameterShape) -> int:
        if not parameter.name.endswith(_CUT):
            return parameter.elements
        rows = parameter.shape[0]
        if parameter.layer is None:
            rows = ceil(rows / self.tensor_parallel) * self.tensor_parallel
        return rows * (parameter.elements // max(1, parameter.shape[0])) // self.tensor_parallel


def _not_divided(key: str, degree: int, number: int, what: str) -> Problem:
    return Problem(key, f"does not divide {what}", f"use {listed(divisors(number))}", str(degree))


def mesh_axes(data: int, pipeline: int, tensor: int, experts: tuple[int, int], context: int) -> dict[str, int]:
    """Return axis → ranks, as `ModelBuilt.mesh` has it. `experts`: ranks that share them out, and ranks that each is
    sharded across; there where they are not the axes of the rest of the model. `context`: where rows are split."""
    axes = {"data": data, "pipeline": pipeline, "tensor": tensor}
    if context > 1:
        axes[CONTEXT] = context
    return axes if experts == (1, tensor) else {**axes, EXPERT: experts[0], EXPERT_TENSOR: experts[1]}

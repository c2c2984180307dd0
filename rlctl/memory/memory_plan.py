"""`rlctl plan`: who holds how much, when, and whether it fits. Needs `config.json` of the models, no torch, no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.memory.activations import Pass, learning_parts, scoring_parts
from rlctl.memory.places import Place, RoleMemory, places_of
from rlctl.memory.role_models import Model, find_model, held_trainer, longest_share, replica_of
from specs.memory_parts import ALWAYS, BLOCK_BYTES, BLOCKS, DTYPE_BYTES, GIB, MOMENTS, SAMPLING, SCORING, Moment, Part
from specs.rules.attention_rules import AtHand, attention_of
from specs.rules.transport_rules import choose_transport
from specs.schema.engines.engine_table import answered
from specs.schema.engines.transformers_tables import KEPT_OF_MLP, TrainedHere
from specs.schema.mesh import CONTEXT, PIPELINE, TENSOR
from specs.schema.rank_groups import axis_of, devices_of_a_process, sequence_parallel_of
from specs.schema.recipes import SamplingSpec, sampling_of
from specs.schema.roles import ACTOR, ROLES, ROLLOUT, RoleName
from specs.schema.spec import Spec

CONTEXT_GIB = 0.7  # of a process on a GPU: CUDA context and kernels
COLLECTIVES_GIB = 0.3  # NCCL's buffers, where several ranks compute together
PROCESS_GIB = 0.6  # of a process on the CPU: Python, torch, transformers


@dataclass(frozen=True)
class MemoryPlan:
    """A plan: what each role holds, and where it adds up."""

    roles: tuple[RoleMemory, ...]
    places: tuple[Place, ...]

    @property
    def not_known(self) -> tuple[RoleMemory, ...]:
        """Roles whose engines do not say all that they hold."""
        return tuple(role for role in self.roles if role.not_known)

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The phases that the run has: only one with a sampler also samples and syncs, and only one with a reward model
        scores apart."""
        if all(role.role != ROLLOUT for role in self.roles):
            return tuple(moment for moment in MOMENTS if moment not in SAMPLING | {"sync"})
        scores = any(ROLES[role.role].holds == "score_model" for role in self.roles)
        return tuple(moment for moment in MOMENTS if scores or moment not in SCORING)


def plan_memory(spec: Spec, spec_dir: Path, *, gpu_GiB: float, host_GiB: float, exact: bool = False) -> MemoryPlan:
    """Plan a run. `gpu_GiB`: memory of each GPU. `host_GiB`: of each host; 0: not known. `exact`: count only what
    follows from shapes and dtypes. Raises SpecError where a model's shape cannot be found out."""
    roles = tuple(_roles(spec, spec_dir, gpu_GiB))
    if exact:
        roles = tuple(replace(role, parts=tuple(part for part in role.parts if part.exact)) for role in roles)
    return MemoryPlan(roles, tuple(places_of(spec, roles, gpu_GiB, host_GiB)))


_QUESTIONS = {"memory": "weights and all that follows from them", "model_of": "activations"}


def _roles(spec: Spec, spec_dir: Path, gpu_GiB: float) -> Iterator[RoleMemory]:
    sampling = sampling_of(spec)
    for name in spec.roles:
        section: Any = spec.role(name)
        if not ROLES[name].holds_model or section.engine.negligible_memory:
            continue
        engine, device = section.engine, "cuda" if section.devices else "cpu"
        scores = ROLES[name].holds == "score_model" and not spec.learns(name)
        # What of its memory the engine's table does not say. A rollout's formula is whole.
        asked = ("memory",) if ROLES[name].samples else tuple(_QUESTIONS)
        open_ = tuple(_QUESTIONS[question] for question in asked if not answered(type(engine), question))
        parts: list[Part] = []
        source = ""
        if len(open_) < len(asked):  # else no formula needs the model's shape
            model = find_model(spec, name, spec_dir)
            source = model.tensors.source
            if sampling is not None and ROLES[name].samples:
                of_engine = _rollout(sampling, section, model, gpu_GiB)
            else:
                of_engine = _trainer(spec, name, section, model)
            for part in of_engine:
                # What a trainer has while it learns, a model that only scores has while it scores.
                held = replace(part, phases=SCORING) if scores and part.phases != ALWAYS else part
                shares = spec.colocated and not ROLES[name].samples
                parts += _sharing(held, device, scores) if shares else [held]
        if device == "cpu":
            parts.append(Part("process and libraries", int(PROCESS_GIB * GIB), context=True))
        else:
            context = CONTEXT_GIB + (COLLECTIVES_GIB if ROLES[name].together and section.processes > 1 else 0.0)
            parts.append(Part("CUDA context, collectives", int(context * GIB), context=True))
        width = devices_of_a_process(section)
        yield RoleMemory(name, engine.kind, section.processes, device, width, tuple(parts), source, open_)


def _rollout(spec: SamplingSpec, section: Any, model: Model, gpu_GiB: float) -> Iterator[Part]:
    yield from section.engine.memory(replica_of(spec, model.tensors, model.facts, gpu_GiB=gpu_GiB)) or ()
    if spec.sync.delta:
        yield _last_weights(spec, model, "cuda" if section.devices else "cpu")


def _trainer(spec: Spec, role: RoleName, section: Any, model: Model) -> Iterator[Part]:
    device = "cuda" if section.devices else "cpu"
    yield from section.engine.memory(held_trainer(spec, role, model.tensors)) or ()
    if section.engine.model_of == "transformers":
        work = _pass(spec, role, section, model, device, min(longest_share(spec, role), section.micro_batch_tokens))
        yield from learning_parts(work) if spec.learns(role) else scoring_parts(work)
        if role == ACTOR and (sampling := sampling_of(spec)) is not None:
            yield from _sync(sampling, model, device)


def _pass(spec: Spec, role: RoleName, section: Any, model: Model, device: str, tokens: int) -> Pass:
    here, context = section.engine if isinstance(section.engine, TrainedHere) else None, axis_of(section, CONTEXT)
    chunk = tokens if here is None else here.logits_chunk(model.facts.vocab_size, on_gpu=device != "cpu")
    again = getattr(section, "gradient_checkpointing", False)
    decision = attention_of(spec, role, AtHand(config=model.config))  # `auto` may come to eager
    return Pass(
        facts=model.facts,
        config=model.config,
        dtype=spec.dtype(role),
        device=device,
        tokens=-(-tokens // context),
        longest=spec.longest_tokens(role),
        logits_chunk=chunk,
        attention=decision.implementation if decision is not None else "",
        recomputed=model.facts.layers if again is True else int(again),
        sequence_parallel=sequence_parallel_of(section) * context,
        tensor=axis_of(section, TENSOR),
        row_parts=axis_of(section, TENSOR) if getattr(section.engine, "tensor_sequence_parallel", False) else 1,
        stages=axis_of(section, PIPELINE),
        chunks=getattr(section.engine, "virtual_pipeline", 1),
        angles=0 if here is None else here.angles_kept,
        mlp_tensors=KEPT_OF_MLP if here is None else here.mlp_tensors(model.facts),
        head_norms=model.tensors.norms_heads,
        offloaded=getattr(section, "activation_offload", False) and device != "cpu",
        head=ROLES[role].head,
        trains_head=getattr(section, "lora", None) is None,
        adds_head_gradient=here is not None and here.adds_gradients_in_place(spec.dtype(role)),
        entropy=getattr(spec.losses.get(role), "entropy_coef", 0) != 0 or (here is not None and here.always_entropy),
    )


def _sync(spec: SamplingSpec, model: Model, device: str) -> Iterator[Part]:
    """Count a weight that is whole for a moment, in fp32 and as it travels, and the transport's ring or two buckets."""
    size = DTYPE_BYTES[spec.dtype(ROLLOUT)]
    phases: frozenset[Moment] = frozenset({"sync"})
    yield Part("largest weight, whole", model.tensors.largest * (4 + size), phases)
    transport = choose_transport(spec)[0]
    if transport == "shm":
        yield Part("ring", BLOCKS * BLOCK_BYTES, phases, host=device != "cpu", first_rank=True)
        return
    whole, largest = model.tensors.elements * size, model.tensors.largest * size
    bucket = max(min(int(spec.sync.bucket_MiB * 2**20), whole), largest)
    travels_on_host = transport == "folder" and device != "cpu"
    if spec.sync.delta:
        yield replace(_last_weights(spec, model, device), first_rank=True)
    yield Part("buckets", 2 * bucket, phases, host=travels_on_host, first_rank=True)


def _last_weights(spec: SamplingSpec, model: Model, device: str) -> Part:
    """Count the weights that changes are counted from, at either end."""
    nbytes = model.tensors.elements * DTYPE_BYTES[spec.dtype(ROLLOUT)]
    return Part("weights sent last", nbytes, exact=True, host=device != "cpu")


def _sharing(part: Part, device: str, scores: bool) -> Iterator[Part]:
    """Split a part on a shared device: while its role is away it is in host memory, or gone; on the CPU there is no
    other place. A learner is away while others sample; a model that only `scores` is there for that alone."""
    away = ALWAYS - SCORING if scores else SAMPLING
    stays = part.host or not (part.leaves or part.dropped) or (device == "cpu" and (scores or not part.dropped))
    if stays or not part.phases & away:
        yield part
        return
    yield replace(part, phases=part.phases - away)
    if not part.dropped:
        yield replace(part, name=f"{part.name}, offloaded", phases=part.phases & away, host=True)

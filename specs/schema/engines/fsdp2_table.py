"""The static side of the train engine `fsdp2` (`backends/fsdp2/`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import ClassVar, Literal

from pydantic import Field

from specs.errors import Problem
from specs.memory_parts import ADAM_BYTES, LEARNING, Part, pinned_rounding
from specs.model_shapes import ParameterShape
from specs.schema.engines.engine_table import EngineContext
from specs.schema.engines.held_model import FP32_BYTES, HeldTrainer, elements, state
from specs.schema.engines.transformers_tables import OwnModules
from specs.schema.mesh import Mesh, divisors
from specs.schema.roles import ROLES, RoleName
from specs.schema.table import no_effect
from specs.text import listed


class Fsdp2Table(OwnModules):
    """PyTorch's FSDP2: each group of `shard` ranks holds the model once, sharded by rows; groups are replicas."""

    kind: Literal["fsdp2"] = "fsdp2"
    shard: int | None = Field(None, gt=0)
    """Ranks that hold the model together; unset: all processes of the role."""
    replicate: int | None = Field(None, gt=0)
    """Groups that each hold the whole model; unset: one for each `shard` of the role's processes."""
    reshard_after_forward: bool = True
    """Let go of a layer's gathered parameters after its forward pass and gather them again for the backward pass;
    false is quicker and holds the whole model in compute precision."""
    offload: Literal["none", "cpu"] = "none"
    """`cpu`: parameters, gradients and optimizer live in host memory and visit the GPU layer by layer."""
    sync_every_micro_batch: bool = False
    """Reduce gradients after every micro-batch: less memory (no whole gradient is kept), more traffic."""

    engine_class: ClassVar[str | None] = "backends.fsdp2.engine:Fsdp2TrainEngine"

    def mesh(self, processes: int) -> Mesh:
        """Take for an axis that is unset what the other leaves. A rule refuses axes that do not give the processes."""
        replicate = self.replicate or max(1, processes // (self.shard or processes))
        shard = self.shard or max(1, processes // replicate)
        return Mesh(replicate, shard, axes={"replicate": replicate, "shard": shard})

    def problems(self, context: EngineContext) -> Iterator[Problem]:
        """Refuse meshes that do not fit the role's processes, and keys without effect."""
        role, section = context.role, context.section
        if self.mesh(section.processes).ranks != section.processes:
            yield self._mesh_problem(role, section.processes)
        if self.offload == "cpu" and not section.devices:
            yield no_effect(f"{role}.engine.offload", f"{role} runs on the CPU")
        if not context.learns and "sync_every_micro_batch" in self.model_fields_set:
            yield no_effect(f"{role}.engine.sync_every_micro_batch", f"{ROLES[role].title} has no gradients")

    def memory(self, held: HeldTrainer) -> Iterator[Part]:
        shard = self.mesh(held.ranks).shard
        host = self.offload == "cpu" and held.device != "cpu"

        def rows(parameters: Sequence[ParameterShape]) -> int:
            return sum(ceil(p.shape[0] / shard) * (p.elements // max(1, p.shape[0])) for p in parameters)

        size, mine = held.compute_bytes, rows(held.trained)
        stored = FP32_BYTES if held.optimizer is not None else size
        yield state("master weights" if stored > size else "weights", (rows(held.frozen) + mine) * stored, host=host)
        if host:
            held_bytes = [rows([p]) * stored for p in (*held.frozen, *held.trained)]
            yield state("weights, rounding of pinned memory", pinned_rounding(held_bytes), host=True)
            gradients = [rows([p]) * FP32_BYTES for p in held.trained]
            yield Part("gradients, rounding of pinned memory", pinned_rounding(gradients), LEARNING, host=True)
        if mine:
            yield Part("gradients", mine * FP32_BYTES, LEARNING, exact=True, host=host)
            yield state("Adam moments", mine * ADAM_BYTES, host=host)
            if not self.sync_every_micro_batch and held.several_micro_batches:
                waiting = elements(held.trained) * FP32_BYTES
                what, key = "gradients, whole, until the last micro-batch", "sync_every_micro_batch = true"
                yield Part(what, waiting, frozenset({"train"}), avoided_by=key)
        tensors = held.tensors
        layers = tensors.elements - tensors.outside_layers
        live = min(layers, 2 * tensors.largest_layer) if self.reshard_after_forward else layers
        yield Part("gathered layers", (tensors.outside_layers + live) * size, frozenset({"train"}))
        if mine:
            both_ways = 2 * max(tensors.largest_layer, tensors.outside_layers) * FP32_BYTES
            yield Part("gradients under way", both_ways, frozenset({"train"}))

    def _mesh_problem(self, role: RoleName, processes: int) -> Problem:
        """Describe axes that do not give the role's processes."""
        if self.shard is None:
            message = f"{processes} processes cannot be shared out to {self.replicate} groups"
            hint = f"{role}.engine.replicate = {listed(divisors(processes))} would fit"
            return Problem(f"{role}.engine.replicate", message, hint)
        mesh = self.mesh(processes)
        product = f"{mesh.shard} × {mesh.replicate} = {mesh.ranks}"
        message = f"shard × replicate = {product}, but {role} has {processes} processes"
        hint = f"{role}.processes = {mesh.ranks} would fit, or "
        if processes % self.shard == 0:
            hint += f"{role}.engine.replicate = {processes // self.shard}"
        else:
            hint += f"{role}.engine.shard = {listed(divisors(processes))}"
        return Problem(f"{role}.engine.shard", message, hint)

"""The static side of the train engine `ddp` (`backends/ddp/`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from specs.memory_parts import ADAM_BYTES, Part
from specs.model_shapes import ParameterShape
from specs.schema.engines.held_model import FP32_BYTES, HeldTrainer, elements, state
from specs.schema.engines.transformers_tables import OwnModules
from specs.schema.mesh import Mesh

if TYPE_CHECKING:
    from specs.errors import Problem
    from specs.schema.role_section import DType, Optimizer, RoleSection
    from specs.schema.roles import RoleName
    from specs.schema.spec import Spec

FLAT_ALIGN = 16  # elements: where each parameter begins in a flat buffer


class DdpTable(OwnModules):
    """Every rank holds the whole model; gradients are summed once per optimizer step."""

    kind: Literal["ddp"] = "ddp"

    engine_class: ClassVar[str | None] = "backends.ddp.engine:DdpTrainEngine"

    def mesh(self, processes: int) -> Mesh:
        return Mesh(processes, 1)

    def reported_mesh(self, processes: int) -> dict[str, int]:
        return {}

    def alone(self) -> Self:
        return self

    def problems(self, spec: Spec, role: RoleName, section: RoleSection) -> Iterable[Problem]:
        return ()

    def adds_gradients_in_place(self, dtype: DType) -> bool:
        return dtype == "fp32"

    def node_hint(self, section: RoleSection, mesh: Mesh) -> None:
        return None

    def memory_hint(self, processes: int) -> str | None:
        return 'cut the model: actor.engine.kind = "fsdp2"' if processes > 1 else None

    def library_config(self, dtype: DType, optimizer: Optimizer | None, device: str) -> Mapping[str, Mapping[str, Any]]:
        return {}

    def memory(self, held: HeldTrainer) -> Iterator[Part]:
        def flat(parameters: Sequence[ParameterShape]) -> int:
            return sum(ceil(p.elements / FLAT_ALIGN) * FLAT_ALIGN for p in parameters)

        size, whole = held.compute_bytes, flat(held.trained)
        frozen = flat(held.frozen) if held.optimizer is None else elements(held.frozen)
        yield state("weights", (frozen + whole) * size)
        if not whole:
            return
        if size < FP32_BYTES:
            yield state("master weights", whole * FP32_BYTES)
        yield state("gradients", whole * FP32_BYTES, dropped=True)
        yield state("Adam moments", whole * ADAM_BYTES)

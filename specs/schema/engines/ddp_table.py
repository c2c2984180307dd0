"""The static side of the train engine `ddp` (`backends/ddp/`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import ClassVar, Literal

from specs.memory_parts import ADAM_BYTES, Part
from specs.model_shapes import ParameterShape
from specs.schema.engines.held_model import FP32_BYTES, HeldTrainer, elements, state
from specs.schema.engines.transformers_tables import OwnModules
from specs.schema.mesh import Mesh
from specs.schema.role_section import DType

FLAT_ALIGN = 16  # elements: where each parameter begins in a flat buffer


class DdpTable(OwnModules):
    """Every rank holds the whole model; gradients are summed once per optimizer step."""

    kind: Literal["ddp"] = "ddp"

    engine_class: ClassVar[str | None] = "backends.ddp.engine:DdpTrainEngine"

    def mesh(self, processes: int) -> Mesh:
        return Mesh(processes, 1, axes={})

    def adds_gradients_in_place(self, dtype: DType) -> bool:
        return dtype == "fp32"

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

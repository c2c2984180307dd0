"""The static side of the fake engines (`backends/fake/`): a numpy model that trains and samples without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal

from specs.errors import Problem
from specs.memory_parts import Part
from specs.schema.engines.engine_table import Attends, EngineContext, EngineTable, ModelOf, RolloutTable, TrainTable
from specs.schema.engines.held_model import HeldTrainer, Replica
from specs.schema.mesh import Mesh
from specs.schema.role_section import RoleSection
from specs.schema.roles import RoleName
from specs.schema.sections import ModelSection
from specs.schema.table import no_effect


class FakeTable(EngineTable):
    """Answers that both fake engines share."""

    packages: ClassVar[tuple[str, ...] | None] = ()
    attention: ClassVar[Attends | None] = "none"
    model_of: ClassVar[ModelOf | None] = "bigram"
    negligible_memory: ClassVar[bool] = True

    def mesh(self, processes: int) -> Mesh:
        return Mesh(processes, 1, axes={})

    def problems(self, context: EngineContext) -> Iterator[Problem]:
        """Refuse a fake engine beside a real one, and what a numpy model on the CPU has no use for."""
        role, engines = context.role, context.engines
        if role == next(name for name, engine in engines.items() if engine.model_of == self.model_of):
            yield from _model_problems(context.model)
            for name, engine in engines.items():
                if engine.model_of != self.model_of:
                    message = f'cannot work with {role}.engine.kind = "{self.kind}": their models differ'
                    hint = "use the fake engine for all roles or for none"
                    yield Problem(f"{name}.engine.kind", message, hint)
        yield from _without_effect(role, context.section)


class FakeTrainTable(FakeTable, TrainTable):
    """A numpy bigram language model with exact gradients: tests the whole frame in milliseconds, without torch."""

    kind: Literal["fake"] = "fake"

    engine_class: ClassVar[str | None] = "backends.fake.fake_train:FakeTrainEngine"
    checkpoint_format: ClassVar[str | None] = "bigram"
    checkpoint_bytes: ClassVar[int | None] = 0  # next to nothing
    resumes_reshaped: ClassVar[bool | None] = True

    def problems(self, context: EngineContext) -> Iterator[Problem]:
        yield from super().problems(context)
        if context.section.processes > 1:
            yield Problem(f"{context.role}.processes", "the fake engine learns in one process", "remove the key")

    def memory(self, held: HeldTrainer) -> Iterable[Part]:
        return ()


class FakeRolloutTable(FakeTable, RolloutTable):
    """Samples from the fake trainer's bigram model."""

    kind: Literal["fake"] = "fake"

    engine_class: ClassVar[str | None] = "backends.fake.fake_rollout:FakeRolloutEngine"
    parallel_on_cpu: ClassVar[bool | None] = False
    suspends: ClassVar[bool] = True

    def memory(self, replica: Replica) -> Iterable[Part]:
        return ()


def _model_problems(model: ModelSection) -> Iterator[Problem]:
    if not model.from_scratch:
        message = "the fake engine reads no weights; it always starts from scratch"
        yield Problem("model.from_scratch", message, "set model.from_scratch = true")
    for key in ("attn_implementation", "trust_remote_code"):
        if getattr(model, key) not in ("auto", False):
            yield no_effect(f"model.{key}", "the fake engine has no such model")


def _without_effect(role: RoleName, section: RoleSection) -> Iterator[Problem]:
    unused = {
        "devices": (),
        "dtype": "fp32",
        "attn_implementation": None,
        "gradient_checkpointing": False,
        "activation_offload": False,
        "lora": None,
    }
    for key, value in unused.items():
        if getattr(section, key, None) not in (value, None, "auto"):
            yield no_effect(f"{role}.{key}", "the fake engine is a numpy model in fp32 on the CPU")

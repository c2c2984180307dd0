"""The static side of the fake engines (`backends/fake/`): a numpy model that trains and samples without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from specs.errors import Problem
from specs.memory_parts import Part
from specs.schema.engines.engine_table import EngineTable, MemoryKey, RolloutTable, TrainTable
from specs.schema.engines.held_model import HeldTrainer, Replica
from specs.schema.mesh import Mesh
from specs.schema.roles import ROLES, RoleName
from specs.schema.table import no_effect
from specs.text import show

if TYPE_CHECKING:
    from specs.model_facts import ModelFacts
    from specs.schema.role_section import DType, Optimizer, RoleSection
    from specs.schema.spec import Spec


class _Fake(EngineTable):
    """What both know of themselves."""

    packages: ClassVar[tuple[str, ...] | None] = ()
    package_aliases: ClassVar[Mapping[str, tuple[str, ...]] | None] = {}
    own_environment: ClassVar[bool | None] = False
    where_to_get: ClassVar[str | None] = ""
    attention: ClassVar[Literal["spec", "engine", "none"] | None] = "none"
    model_of: ClassVar[Literal["transformers", "bigram"] | None] = "bigram"
    negligible_memory: ClassVar[bool | None] = True

    def mesh(self, processes: int) -> Mesh:
        return Mesh(processes, 1)

    def reported_mesh(self, processes: int) -> dict[str, int]:
        return {}

    def devices_per_process(self) -> int:
        return 1

    def shared_memory_MiB(self, processes: int, *, on_gpu: bool) -> int:
        return 0

    def alone(self) -> Self:
        return self

    def warnings(self, spec: Spec, role: RoleName, section: RoleSection) -> Iterable[Problem]:
        return ()

    def problems(self, spec: Spec, role: RoleName, section: RoleSection) -> Iterator[Problem]:
        """All roles or none, and what a numpy model on the CPU has no use for."""
        held = [(name, other) for name, other in spec.sections() if ROLES[name].holds_model]
        fakes = [name for name, other in held if getattr(other, "engine").model_of == self.model_of]  # noqa: B009
        if role == fakes[0]:
            yield from _whole_spec(spec)
            for name, other in held:
                if name not in fakes:
                    message = f'cannot work with {role}.engine.kind = "{self.kind}": their models differ'
                    hint = "use the fake engine for all roles or for none"
                    kind = getattr(getattr(other, "engine", None), "kind", "")
                    yield Problem(f"{name}.engine.kind", message, hint, show(kind))
        yield from _without_effect(role, section)

    def model_problems(self, role: RoleName, section: RoleSection, facts: ModelFacts) -> Iterable[Problem]:
        return ()

    def installed_problems(
        self, role: RoleName, section: RoleSection, versions: Mapping[str, str], *, nvidia_driver: bool
    ) -> Iterable[Problem]:
        return ()


class FakeTrainTable(_Fake, TrainTable):
    """A numpy bigram language model with exact gradients: tests the whole frame in milliseconds, without torch."""

    kind: Literal["fake"] = "fake"

    engine_class: ClassVar[str | None] = "backends.fake.fake_train:FakeTrainEngine"
    checkpoint_format: ClassVar[str | None] = "bigram"
    checkpoint_bytes: ClassVar[int | None] = 0  # next to nothing
    cuts_sequences: ClassVar[bool | None] = False
    resumes_reshaped: ClassVar[bool | None] = True

    def memory(self, held: HeldTrainer) -> Iterable[Part]:
        return ()

    def node_hint(self, section: RoleSection, mesh: Mesh) -> None:
        return None

    def memory_hint(self, processes: int) -> None:
        return None

    def library_config(self, dtype: DType, optimizer: Optimizer | None, device: str) -> Mapping[str, Mapping[str, Any]]:
        return {}


class FakeRolloutTable(_Fake, RolloutTable):
    """Samples from the fake trainer's bigram model."""

    kind: Literal["fake"] = "fake"

    engine_class: ClassVar[str | None] = "backends.fake.fake_rollout:FakeRolloutEngine"
    parallel_on_cpu: ClassVar[bool | None] = False

    def memory(self, replica: Replica) -> Iterable[Part]:
        return ()

    def memory_key(self, *, on_gpu: bool) -> MemoryKey | None:
        return None


def _whole_spec(spec: Spec) -> Iterator[Problem]:
    if not spec.model.from_scratch:
        hint = "set model.from_scratch = true"
        yield Problem(
            "model.from_scratch", "the fake engine reads no weights; it always starts from scratch", hint, "false"
        )
    for key in ("attn_implementation", "trust_remote_code"):
        if getattr(spec.model, key) not in ("auto", False):
            yield no_effect(f"model.{key}", spec.model, "the fake engine has no such model")


def _without_effect(role: RoleName, section: RoleSection) -> Iterator[Problem]:
    why = "the fake engine is a numpy model in fp32 on the CPU"
    if section.devices:
        yield no_effect(f"{role}.devices", section, why)
    for key, unused in (
        ("dtype", "fp32"),
        ("attn_implementation", None),
        ("gradient_checkpointing", False),
        ("activation_offload", False),
    ):
        if getattr(section, key, None) not in (unused, None):
            yield no_effect(f"{role}.{key}", section, why)
    if getattr(section, "lora", None) is not None:
        yield no_effect(f"{role}.lora", section, "the fake engine has no linear layers")

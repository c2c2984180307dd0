"""What the engines have in common whose models are transformers' own, built by `backends/hf/hf_model.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from specs.schema.engines.engine_table import EngineTable, TrainTable
from specs.schema.engines.held_model import NCCL_SHARED_MEMORY_MIB

if TYPE_CHECKING:
    from specs.errors import Problem
    from specs.model_facts import ModelFacts
    from specs.schema.roles import RoleName
    from specs.schema.spec import RoleSection

HUGGING_FACE = ("torch", "transformers", "accelerate", "packaging")


class BuiltHere(EngineTable):
    """An engine that builds transformers' class and takes its attention from the spec."""

    packages: ClassVar[tuple[str, ...] | None] = HUGGING_FACE
    package_aliases: ClassVar[Mapping[str, tuple[str, ...]] | None] = {}
    own_environment: ClassVar[bool | None] = False
    where_to_get: ClassVar[str | None] = ""
    attention: ClassVar[Literal["spec", "engine", "none"] | None] = "spec"
    model_of: ClassVar[Literal["transformers", "bigram"] | None] = "transformers"
    negligible_memory: ClassVar[bool | None] = False

    def devices_per_process(self) -> int:
        return 1

    def model_problems(self, section: RoleSection, facts: ModelFacts) -> Iterable[Problem]:
        return ()

    def installed_problems(
        self, role: RoleName, section: RoleSection, versions: Mapping[str, str], *, nvidia_driver: bool
    ) -> Iterable[Problem]:
        return ()


class TrainedHere(BuiltHere, TrainTable):
    """A train engine on top of `backends/train/engine.py`, which computes, saves and exports."""

    checkpoint_format: ClassVar[str | None] = "tensor shards"  # backends/train/tensor_shards.py
    checkpoint_bytes: ClassVar[int | None] = 12  # the fp32 weight and both moments
    resumes_reshaped: ClassVar[bool | None] = True

    def shared_memory_MiB(self, processes: int, *, on_gpu: bool) -> int:
        return NCCL_SHARED_MEMORY_MIB if on_gpu and processes > 1 else 0

"""What is known of an engine without running it: the keys of its table in the spec, and answers to static questions.

Each engine has one file beside this one; `engine_registry.py` lists their tables. All keys of a table have defaults,
so that `--set actor.engine.kind=KIND` alone is a valid change.

The base classes below ask the questions, as class variables and methods; `QUESTIONS` lists them. Every engine of
rlctl's own answers all of them (`tests/specs/schema/engines/test_engine_registry.py`). A table of another package may
leave some to the base class: then the answer is "not known", which is None, and nothing is claimed or planned on
account of it, nor refused, but for `sequence_parallel`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from specs.schema.table import Table

if TYPE_CHECKING:
    from specs.errors import Problem
    from specs.memory_parts import Part
    from specs.model_facts import ModelFacts
    from specs.schema.engines.held_model import HeldTrainer, Replica
    from specs.schema.mesh import Mesh
    from specs.schema.role_section import DType, Optimizer, RoleSection
    from specs.schema.roles import RoleName
    from specs.schema.spec import Spec


class EngineTable(Table):
    """The table of any engine. `kind` chooses it."""

    kind: str

    engine_class: ClassVar[str | None] = None
    """`module:Class` under `backends/`. Another package names its class by an entry point instead."""
    packages: ClassVar[tuple[str, ...] | None] = None
    """Distributions that it needs in its role's interpreter, besides what every role's process imports."""
    package_aliases: ClassVar[Mapping[str, tuple[str, ...]] | None] = None
    """Package → other distributions that bring the same one."""
    own_environment: ClassVar[bool | None] = None
    """Whether `rlctl setup-engine KIND` makes an interpreter of its own for it."""
    where_to_get: ClassVar[str | None] = None
    """What brings its packages, in words that finish a hint; "": they come with rlctl."""
    attention: ClassVar[Literal["spec", "engine", "none"] | None] = None
    """Who chooses the attention: the spec's `attn_implementation`, the engine itself, or nobody: there is none."""
    model_of: ClassVar[Literal["transformers", "bigram"] | None] = None
    """Whose model it builds: that of `config.json` with the parameters of transformers' class, so that shape and number
    of parameters follow from the config; or the fake engines' table of bigrams."""
    negligible_memory: ClassVar[bool | None] = None
    """Whether it holds next to nothing, so that a plan leaves it out."""

    def mesh(self, processes: int) -> Mesh | None:
        """How the ranks of a role hold the model. None: not known."""
        return None

    def reported_mesh(self, processes: int) -> dict[str, int] | None:
        """Axis → ranks, as each rank must report it in `ModelBuilt.mesh`; {}: no axis. None: not known, or it reports
        none."""
        return None

    def devices_per_process(self) -> int:
        """GPUs that the plan gives each process. One, unless the engine says more."""
        return 1

    def shared_memory_MiB(self, processes: int, *, on_gpu: bool) -> int | None:
        """Free room in `/dev/shm` that the libraries below want, of a role with so many processes on a host. None: not
        known."""
        return None

    def alone(self) -> Self:
        """The table for a trial of one process (`check-config --probe=run`)."""
        return self

    def problems(self, spec: Spec, role: RoleName, section: RoleSection) -> Iterable[Problem]:
        """What is wrong with `section`, whose engine this is, by the spec alone."""
        return ()

    def warnings(self, spec: Spec, role: RoleName, section: RoleSection) -> Iterable[Problem]:
        """What works and is seldom meant, or is worth knowing before it runs."""
        return ()

    def model_problems(self, role: RoleName, section: RoleSection, facts: ModelFacts) -> Iterable[Problem]:
        """What of the model it cannot run."""
        return ()

    def installed_problems(
        self, role: RoleName, section: RoleSection, versions: Mapping[str, str], *, nvidia_driver: bool
    ) -> Iterable[Problem]:
        """What is wrong with the packages in the role's interpreter although they are there. `versions`: distribution
        → version."""
        return ()


class TrainTable(EngineTable):
    """The table of an engine for `[actor]` and `[ref]`."""

    checkpoint_format: ClassVar[str | None] = None
    """Name of the format of its checkpoints: engines of one format read each other's. None: only its own are read."""
    checkpoint_bytes: ClassVar[int | None] = None
    """Bytes of a checkpoint per trained parameter."""
    cuts_sequences: ClassVar[bool | None] = None
    """Whether ranks can share samples and compute a part of each row (`sequence_parallel` of the role). Where it is not
    known the key is refused: an engine that does not look at it would train on other samples without a word."""
    resumes_reshaped: ClassVar[bool | None] = None
    """Whether a resume may change its keys, the number of its processes and their nodes."""

    def memory(self, held: HeldTrainer) -> Iterable[Part] | None:
        """Parameters, gradients, optimizer state and what is gathered, on the rank that holds most; activations of
        transformers' models are added by the plan. None: not known."""
        return None

    def node_hint(self, section: RoleSection, mesh: Mesh) -> tuple[str, str, str] | None:
        """Key, its value and a hint where a shard group leaves its node. None: the engine's keys cannot help."""
        return None

    def memory_hint(self, processes: int) -> str | None:
        """Which of its keys saves the most memory, in words that finish a sentence. None: no key does."""
        return None

    def library_config(self, dtype: DType, optimizer: Optimizer | None, device: str) -> Mapping[str, Mapping[str, Any]]:
        """Name → configuration that it hands to a library, for `--dry-run`."""
        return {}


@dataclass(frozen=True)
class MemoryKey:
    """A key of a rollout engine that decides how much memory it takes: `slots` counts sequences, `share` is a share of
    the GPU, `GiB` the size of the cache itself."""

    name: str
    unit: Literal["slots", "share", "GiB"]


class RolloutTable(EngineTable):
    """The table of an engine for `[rollout]`."""

    parallel_on_cpu: ClassVar[bool | None] = None
    """Whether `devices_per_process` above one also cuts the model on the CPU."""

    def memory(self, replica: Replica) -> Iterable[Part] | None:
        """All that a replica holds, on each of its GPUs. None: not known."""
        return None

    def memory_key(self, *, on_gpu: bool) -> MemoryKey | None:
        """The key by which its memory is chosen. None: not known, or there is none."""
        return None


QUESTIONS: dict[str, str] = {
    "engine_class": "where its class is",
    "packages": "packages it needs",
    "package_aliases": "other names of its packages",
    "own_environment": "whether it has an environment of its own",
    "where_to_get": "what brings its packages",
    "attention": "attention",
    "model_of": "shape of the model it builds",
    "negligible_memory": "whether it holds next to nothing",
    "memory": "memory",
    "mesh": "mesh",
    "reported_mesh": "mesh as reported",
    "devices_per_process": "GPUs of a process",
    "shared_memory_MiB": "shared memory of its libraries",
    "alone": "its keys for a trial of one process",
    "problems": "its rules",
    "warnings": "its warnings",
    "model_problems": "models it cannot run",
    "installed_problems": "builds of its packages",
    "checkpoint_format": "checkpoint format",
    "checkpoint_bytes": "size of a checkpoint",
    "cuts_sequences": "sequence parallelism",
    "resumes_reshaped": "what a resume may change",
    "node_hint": "keys that keep its groups inside a node",
    "memory_hint": "keys that save memory",
    "library_config": "configuration of its library",
    "parallel_on_cpu": "tensor parallelism on the CPU",
    "memory_key": "key that decides its memory",
}
"""Question → what it is about, in words."""
# What check-config says of an engine that leaves it open; the other questions have no effect when they are.
_SAID = ("packages", "attention", "model_of", "mesh", "memory", "checkpoint_format")


def engine_of(section: RoleSection) -> EngineTable | None:
    """The engine's table of a role's section; None for a role without an engine."""
    engine = getattr(section, "engine", None)
    assert engine is None or isinstance(engine, EngineTable)
    return engine


def answered(table: type[EngineTable], question: str) -> bool:
    """Whether the engine answers it, rather than the base class."""
    bases = (EngineTable, TrainTable, RolloutTable, Table)
    return any(question in vars(owner) for owner in table.__mro__ if issubclass(owner, Table) and owner not in bases)


def not_known(table: EngineTable) -> list[str]:
    """What is not known of an engine because its table does not say it, in words."""
    asked = [question for question in _SAID if hasattr(table, question)]
    return [QUESTIONS[question] for question in asked if not answered(type(table), question)]

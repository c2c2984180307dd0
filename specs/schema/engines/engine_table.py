"""Everything that is known of an engine without running it: its keys in the spec, and answers to static questions.

Each engine has one file beside this one; `engine_registry.py` lists their tables. All keys of a table have defaults,
so that `--set actor.engine.kind=KIND` alone is a valid change.

The base classes ask the questions, as class variables and methods, with the answer of an engine that has nothing to
say. What stands in `ESSENTIAL` has no such answer: every engine of rlctl's own gives one
(`tests/specs/schema/engines/test_engine_registry.py`). Where a table of another package leaves it open, it is not
known, which is None: nothing is claimed, planned or refused on account of it, but for `sequence_parallel`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from specs.errors import Problem
from specs.memory_parts import Part
from specs.model_facts import ModelFacts
from specs.schema.engines.held_model import HeldTrainer, Replica
from specs.schema.eval_sets import Evaluation
from specs.schema.mesh import Mesh
from specs.schema.role_section import DType, Lora, Optimizer, RoleSection
from specs.schema.roles import RoleName
from specs.schema.sections import ModelSection
from specs.schema.table import Table

Attends = Literal["spec", "engine", "none"]
ModelOf = Literal["transformers", "bigram"]


@dataclass(frozen=True)
class EngineContext:
    """All that an engine's rules may look at besides its own keys: the section that chooses it, and what of the rest of
    the spec concerns engines."""

    role: RoleName
    section: RoleSection
    dtype: DType
    model: ModelSection
    engines: Mapping[RoleName, EngineTable]
    """The engine table of every role that holds a model."""
    max_prompt_tokens: int
    evaluations: tuple[Evaluation, ...]
    actor_lora: Lora | None

    @property
    def device(self) -> str:
        return "cuda" if self.section.devices else "cpu"

    @property
    def learns(self) -> bool:
        return getattr(self.section, "optimizer", None) is not None


class EngineTable(Table):
    """The table of any engine. `kind` chooses it."""

    kind: str

    engine_class: ClassVar[str | None] = None
    """`module:Class` under `backends/`. Another package names its class by an entry point instead."""
    packages: ClassVar[tuple[str, ...] | None] = None
    """Distributions that it needs in its role's interpreter, besides what every role's process imports."""
    package_aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Package → other distributions that bring the same one."""
    own_environment: ClassVar[bool] = False
    """Whether `rlctl setup-engine KIND` makes an interpreter of its own for it."""
    where_to_get: ClassVar[str] = ""
    """Words for where its packages come from, that finish a hint; "": they come with rlctl."""
    attention: ClassVar[Attends | None] = None
    """Who chooses the attention: the spec's `attn_implementation`, the engine itself, or nobody: there is none."""
    model_of: ClassVar[ModelOf | None] = None
    """Whose model it builds: that of `config.json` with the parameters of transformers' class, so that shape and number
    of parameters follow from the config; or the fake engines' table of bigrams."""
    negligible_memory: ClassVar[bool] = False
    """Whether it holds next to nothing, so that a plan leaves it out."""

    def mesh(self, processes: int) -> Mesh | None:
        """Return how the ranks of a role hold the model. None: not known."""
        return None

    def devices_per_process(self) -> int:
        """Return the GPUs that the plan gives each process."""
        return 1

    def problems(self, context: EngineContext) -> Iterable[Problem]:
        """Find what is wrong with the section that chooses it, by the spec alone."""
        return ()

    def model_problems(self, role: RoleName, section: RoleSection, facts: ModelFacts) -> Iterable[Problem]:
        """Find what of the model it cannot run."""
        return ()

    def installed_problems(
        self, role: RoleName, section: RoleSection, versions: Mapping[str, str], *, nvidia_driver: bool
    ) -> Iterable[Problem]:
        """Find what is wrong with the packages in the role's interpreter although they are there. `versions`:
        distribution → version."""
        return ()


class TrainTable(EngineTable):
    """The table of an engine that holds a model for a trainer."""

    checkpoint_format: ClassVar[str | None] = None
    """Name of the format of its checkpoints: engines of one format read each other's. None: only its own are read."""
    checkpoint_bytes: ClassVar[int | None] = None
    """Bytes of a checkpoint per trained parameter."""
    splits_sequences: ClassVar[bool] = False
    """Whether ranks can share samples and compute a part of each row (`sequence_parallel` of the role). Else the key is
    refused: an engine that does not look at it would train on other samples without a word."""
    resumes_reshaped: ClassVar[bool | None] = None
    """Whether a resume may change its keys, the number of its processes and their nodes."""

    def memory(self, held: HeldTrainer) -> Iterable[Part] | None:
        """Yield parameters, gradients, optimizer state and what is gathered, on the rank that holds most; activations
        of transformers' models are added by the plan. None: not known."""
        return None

    def library_config(self, dtype: DType, optimizer: Optimizer | None, device: str) -> Mapping[str, Mapping[str, Any]]:
        """Return name → configuration that it hands to a library, for `--dry-run`."""
        return {}


class RolloutTable(EngineTable):
    """The table of an engine that samples."""

    parallel_on_cpu: ClassVar[bool | None] = None
    """Whether `devices_per_process` above one also shards the model on the CPU."""
    spans_nodes: ClassVar[bool] = False
    """Whether `devices_per_process` may be on several nodes."""
    suspends: ClassVar[bool] = False
    """Whether completions continue with other weights than they began with, which `rollout.in_flight` needs."""

    def memory(self, replica: Replica) -> Iterable[Part] | None:
        """Yield all that a replica holds, on each of its GPUs. None: not known."""
        return None


class CacheKeepingTable(RolloutTable):
    """The table of a sampler whose suspended completions may keep their KV cache."""

    suspends: ClassVar[bool] = True
    keep_cache: bool = False
    """With `rollout.in_flight`: completions that continue keep the keys and values of older weights, which are else
    computed again with the new ones. That saves a prefill per sync; log-probs are then those of the mixture of weights
    that drew the tokens, which no single model gives."""


ESSENTIAL: dict[str, str] = {
    "packages": "packages it needs",
    "attention": "attention",
    "model_of": "shape of the model it builds",
    "mesh": "mesh",
    "memory": "memory",
    "checkpoint_format": "checkpoint format",
}
"""Question → what it is about, in words, where only the engine has an answer."""


def engine_of(section: RoleSection) -> EngineTable | None:
    """Return the engine's table of a role's section; None for a role without an engine."""
    engine = getattr(section, "engine", None)
    assert engine is None or isinstance(engine, EngineTable)
    return engine


def answered(table: type[EngineTable], question: str) -> bool:
    """Return whether the engine answers it, rather than the base class."""
    base = TrainTable if issubclass(table, TrainTable) else RolloutTable
    return getattr(table, question, None) is not getattr(base, question, None)


def not_known(table: EngineTable) -> list[str]:
    """Return what is not known of an engine because its table does not say it, in words."""
    asked = (question for question in ESSENTIAL if hasattr(table, question))
    return [ESSENTIAL[question] for question in asked if not answered(type(table), question)]

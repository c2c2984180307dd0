"""The run spec: one frozen pydantic model per section of the TOML. Here are the roles, and the whole.

The other sections are in `specs/schema/sections.py`, tables chosen by their `kind` in `specs/schema/engines/`,
`specs/schema/rewards.py` and `specs/schema/algorithms/algorithm_tables.py`. Every field carries the sentence that the
reference (`docs/spec.md`) prints. Unknown keys are refused at every depth. Rules that span several keys live in
`specs/rules/all_rules.py`; reading files in `specs/load/load.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from pydantic import Field

from specs.attention import Attention
from specs.schema.algorithms.algorithm import AnyLoss
from specs.schema.engines.ddp_table import DdpTable
from specs.schema.engines.engine_registry import RolloutEngineTable, TrainEngineTable
from specs.schema.engines.engine_table import TrainTable, engine_of
from specs.schema.engines.torch_rollout_table import TorchRolloutTable
from specs.schema.eval_sets import EvalSection, Evaluation
from specs.schema.rewards import MAX_SCORE, EnvironmentReward, RewardTerm, RewardTermTable
from specs.schema.role_section import DType, LearningRole, Lora, ModelRole, Restartable, RoleSection
from specs.schema.roles import ACTOR, REF, ROLES, ROLLOUT, Role, RoleName
from specs.schema.rows import RowsEval, RowsSection
from specs.schema.sections import CheckpointSection, ClusterSection, DataSection, ModelSection, RunSection
from specs.schema.table import NonEmpty, NonEmptyPath, PathText, Table
from specs.schema.tracker_tables import TrackerTable

SCHEMA_VERSION = 1

TransportKind = Literal["shm", "folder", "group", "cuda_ipc"]
# What a sync sends: the model's own weights with adapters added in; both apart; the adapters alone.
WeightForm = Literal["merged", "apart", "adapters"]


# ── roles ─────────────────────────────────────────────────────────────────────────────────────────


class ActorSection(LearningRole):
    """The model that learns."""

    engine: TrainEngineTable = DdpTable()
    """Training engine."""
    min_nodes: int | None = Field(None, ge=1)
    """Fewest nodes that an attempt begins with: where the cluster has fewer than `nodes`, all roles on the same nodes
    do with as many as there are, with as many processes on each. Unset: all are needed."""


class RefSection(ModelRole):
    """The frozen model that the actor is compared with: the KL's, or a teacher. Exists only when `algorithm.kl_coef` is
    above 0, or the algorithm has a teacher."""

    model: PathText = ""
    """Another model's path; empty: the actor's own starting weights."""
    engine: TrainEngineTable = DdpTable()
    """Engine of the reference."""


class CriticSection(LearningRole):
    """The model that predicts what a completion will still earn. Exists only where `algorithm.kind` asks for it
    (`ppo`). Without the section it is held and learns as the actor's says, by adapters where that does."""

    model: PathText = ""
    """Another model's path: its head of one output is kept (a reward model, an exported critic), and a causal
    language model gets a new one; empty: the actor's own starting weights with a new head."""
    engine: TrainEngineTable = DdpTable()
    """Training engine of the critic."""


class RewardModelSection(ModelRole):
    """A frozen sequence-classification model whose score is the reward term `kind = "model"`. It reads text through a
    tokenizer and chat template of its own."""

    model: NonEmptyPath
    """Its folder or hub id: one output (num_labels 1), with the head in its files, a tokenizer, and a chat template
    where prompts are conversations."""
    engine: TrainEngineTable = DdpTable()
    """Its engine."""
    max_sequence_tokens: int = Field(4096, gt=0)
    """Longest conversation, prompt and completion, in its own tokens. A longer one is a failed grade: nothing is
    truncated."""


class RewardLearnerSection(LearningRole):
    """The reward model that learns: a model with a head of one output, whose value at a sequence's last token is its
    score."""

    model: PathText = ""
    """Another model's path; empty: `model.path`. Its head of one output is kept; a causal language model gets a new
    one."""
    engine: TrainEngineTable = DdpTable()
    """Its engine."""


class RolloutSection(Restartable):
    """The model that samples. It always holds the actor's weights."""

    engine: RolloutEngineTable = TorchRolloutTable()
    """The engine that samples."""
    first_node: int = Field(0, ge=0, lt=512)
    """Number of its first host, where 0 is the driver's and the trainers' first. After the trainers' last host, the
    replicas have theirs to themselves."""
    allow_pickle_between_nodes: bool = False
    """Let replicas lie on several nodes each, where there are fewer `processes` than `nodes`: vLLM then sends pickled
    objects between them over connections that anybody can open, so keep them on a private network."""
    dtype: DType | None = None
    """Precision; unset: the actor's."""
    attn_implementation: Attention | None = None
    """This role's attention; unset: `model.attn_implementation`."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer divides by the same."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set with this much probability."""
    top_k: int = Field(0, ge=0)
    """Sample from the k likeliest tokens; 0: all."""
    stop: tuple[NonEmpty, ...] = ()
    """Stop strings: texts that end a completion, besides the model's own end tokens. Each must be one token of the
    tokenizer; `</answer>` usually is not, and is then refused."""
    max_probe_gap: float | None = Field(None, gt=0)
    """Largest log-prob difference the behaviour probe allows; unset: 2e-3 in fp32, 0.15 in bf16, more where
    log-probs are so large that neighbouring numbers of the dtype lie further apart."""
    warn_logprob_gap: float | None = Field(None, gt=0)
    """Mean log-prob difference between sampler and trainer on a step's sampled tokens above which the run warns;
    unset: 1e-4 in fp32, 0.03 in bf16, more with `top_p` and `max_staleness`, none with `top_k`."""
    max_logprob_gap: float | None = Field(None, gt=0)
    """The same, above which the run stops before it learns from the step and keeps the batch; unset: 1e-2 in fp32,
    0.3 in bf16, more with `top_p` and `max_staleness`, none with `top_k`."""
    max_staleness: int = Field(0, ge=0, le=64)
    """Steps that sampling may run ahead of learning; 0: each waits for the other. Else samples are drawn while the
    actor learns, with weights up to so many steps old; older ones are dropped and counted."""
    repeatable: bool | None = None
    """Whether prompts are completed in an order that follows from the spec alone, so that a run repeats to the bit:
    batch after batch, and turns of episodes in waves. Otherwise what is ready is sampled at once, in whatever slot is
    free. Unset: on the CPU, where numbers repeat."""

    in_flight: bool = False
    """Whether new weights reach completions that are being drawn, after each step, instead of waiting for them: their
    next tokens are drawn with the new weights, which recompute what is there, and each token keeps the log-prob and
    the version of the weights that drew it. Needs `max_staleness`; which token is drawn with which weights follows from
    the clock, so such a run does not repeat."""

    @property
    def in_order(self) -> bool:
        return not (self.devices or self.in_flight) if self.repeatable is None else self.repeatable

    @property
    def hosts(self) -> range:
        return range(self.first_node, self.first_node + self.nodes)


class RewardSection(Restartable):
    """Grading of the completions, in isolated processes of each of its `nodes`, from the driver's host on. Its
    `python`, `env` and `threads` hold for the role `data` too, which reads what `[data]` names."""

    terms: tuple[RewardTermTable, ...] = Field((EnvironmentReward(kind="environment"),), min_length=1)
    """Terms of the weighted sum. Needed where no environment gives a reward of its own."""
    workers: int = Field(2, ge=1, le=256)
    """Isolated processes that run the terms, on each node."""
    timeout_s: float = Field(10.0, gt=0)
    """Seconds one completion may take to grade."""
    fallback: float = Field(0.0, ge=-MAX_SCORE, le=MAX_SCORE)
    """Score of a completion whose grading raised, hung or crashed."""
    max_failed_share: float = Field(0.9, ge=0, le=1)
    """Share of a step's completions that may fail to be graded. A step that loses more ends the run, which keeps
    what it learned before; 1: none does."""


class Spec(Table):
    """The whole run spec: the sections that every recipe has, and what its sections mean together. `RECIPES` has the
    class of each recipe, which adds its own."""

    schema_: Literal[1] = Field(alias="schema")
    """Version of this format; always 1."""
    run: RunSection
    model: ModelSection
    checkpoint: CheckpointSection = CheckpointSection()
    cluster: ClusterSection | None = None
    tracking: tuple[TrackerTable, ...] = ()
    if TYPE_CHECKING:  # of every recipe, each with its own
        data: DataSection | RowsSection
        eval: EvalSection | RowsEval | None

    lead: ClassVar[RoleName] = ACTOR
    """The role whose model the run is for: it learns, and is saved and exported."""

    # What a recipe says of itself.

    @property
    def losses(self) -> Mapping[RoleName, AnyLoss]:
        """Loss of each role that learns, in the order of the updates."""
        raise NotImplementedError

    @property
    def samples_per_step(self) -> int:
        """Sequences that a step learns from."""
        raise NotImplementedError

    @property
    def max_sequence_tokens(self) -> int:
        raise NotImplementedError

    @property
    def generates(self) -> bool:
        """Whether completions are sampled and graded."""
        return False

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt that is sampled from."""
        return 0

    @property
    def max_response_tokens(self) -> int:
        """Tokens of the longest completion."""
        return self.max_sequence_tokens

    @property
    def every(self) -> int | None:
        """Steps between evaluations; None: there are none."""
        return self.eval.every if self.eval is not None else None

    @property
    def mini_batches_per_step(self) -> int:
        """Mini-batches that a step's samples are split into, each for an optimizer step."""
        return 1

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps that a step makes of each role that learns."""
        return 1

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The sets of prompts that the run is evaluated on."""
        return ()

    @property
    def reward_terms(self) -> tuple[RewardTerm, ...]:
        """The terms that grade completions."""
        return ()

    @property
    def own_functions(self) -> Mapping[str, str]:
        """Key → path of the functions that the user brings, but for rewards."""
        return {}

    def learns_after(self, role: RoleName) -> int:
        """Steps of the run before a role learns."""
        return 0

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage needs a model that predicts it."""
        return False

    @property
    def needs_ref(self) -> bool:
        """Whether the actor is compared with a reference."""
        return False

    @property
    def why_no_ref(self) -> str:
        """Why no reference is needed."""
        return "the objective compares with none"

    @property
    def needs_reward_model(self) -> bool:
        """Whether a reward model scores, or learns."""
        return False

    # Derived values: what the sections mean together. Nothing here rewrites the spec.

    def learns(self, role: RoleName) -> bool:
        """Whether a role's model learns, so that it has a state that a resume needs."""
        return getattr(self._section(ROLES[role]), "optimizer", None) is not None

    def optimizer_steps(self, role: RoleName, steps: int | None = None) -> int:
        """Return the optimizer steps of a role that learns, in the whole run or in its first `steps`."""
        return max(0, (self.run.steps if steps is None else steps) - self.learns_after(role)) * self.updates_per_step

    def weights_version(self, done: int) -> int:
        """Which weights the actor has after `done` steps: a sample's staleness is a difference of two versions. Until
        the actor learns, they are those of its first step."""
        return max(done, self.learns_after(ACTOR))

    @property
    def own_ref_model(self) -> str:
        """Path of a reference that is another model; empty: it is the actor's start."""
        return getattr(getattr(self, REF, None), "model", "")

    @property
    def ref_is_actor(self) -> bool:
        """Whether the actor itself, without its adapters, is the reference."""
        return self.needs_ref and self.lead_section.lora is not None and not self.own_ref_model

    @property
    def precomputes_ref(self) -> bool:
        """Whether the reference's log-probs are computed once, before the first step."""
        return False

    @property
    def needs_ref_role(self) -> bool:
        """Whether the reference is a model of its own; precomputed, the actor is its own reference before it learns."""
        return self.needs_ref and not self.ref_is_actor and not (self.precomputes_ref and not self.own_ref_model)

    @property
    def lead_section(self) -> LearningRole:
        section = getattr(self, self.lead)
        assert isinstance(section, LearningRole)
        return section

    @property
    def min_nodes(self) -> int | None:
        """Fewest nodes that the lead begins with; None: all of its own."""
        return getattr(self.lead_section, "min_nodes", None)

    @property
    def lead_engine(self) -> TrainTable:
        engine = engine_of(self.lead_section)
        assert isinstance(engine, TrainTable)
        return engine

    def longest_tokens(self, role: RoleName) -> int:
        """Tokens of the longest sequence that a role's model reads."""
        section = self.role(role)
        return section.max_sequence_tokens if isinstance(section, RewardModelSection) else self.max_sequence_tokens

    def gpus(self, role: RoleName) -> frozenset[tuple[int, int]]:
        """(number of the host, number of the GPU there) of each that a role names."""
        section = self.role(role)
        return frozenset((host, device) for host in section.hosts for device in section.devices)

    @property
    def colocated(self) -> bool:
        """Whether trainers and rollouts take turns on their devices."""
        if ROLLOUT not in self.roles:
            return False
        if self.run.colocate == "auto":
            return bool(self.gpus(ACTOR) & self.gpus(ROLLOUT))
        return self.run.colocate == "always"

    def dtype(self, role: RoleName) -> DType:
        """Precision of a role's model."""
        return self.dtype_of(self.role(role))

    def dtype_of(self, section: RoleSection) -> DType:
        """Precision that a section means: without one of its own the actor's; `auto` is bf16 on GPUs, fp32 on the
        CPU."""
        dtype: DType | Literal["auto"] | None = getattr(section, "dtype", None)
        if dtype is None:
            return self.dtype_of(self.lead_section)
        return dtype if dtype != "auto" else "bf16" if section.devices else "fp32"

    def attention(self, role: RoleName) -> Attention:
        """Attention asked for a role: its own key, else the model's; none where the engine chooses it."""
        section: Any = self.role(role)
        if ROLES[role].holds_model and section.engine.attention == "engine":
            return "auto"
        own = getattr(section, "attn_implementation", None)
        return own or self.model.attn_implementation

    def model_path(self, role: RoleName) -> str:
        """Path of the model that a role builds; of one that holds none, whose tokenizer it uses: the lead's."""
        role = role if ROLES[role].holds_model else self.lead
        return getattr(self._section(ROLES[role]), "model", "") or self.model.path

    # The roles: `sections` as a person wrote them, `roles` and `role` as the run has them.

    @classmethod
    def section_class(cls, role: RoleName) -> type[RoleSection]:
        """The class of a role's section; that of the keys that all roles have where it has none of its own."""
        if role not in cls.model_fields:
            return RoleSection
        annotation = cls.model_fields[role].annotation
        classes = (annotation, *get_args(annotation))
        return next((one for one in classes if isinstance(one, type) and issubclass(one, RoleSection)), RoleSection)

    def sections(self) -> list[tuple[RoleName, RoleSection]]:
        """Roles with the sections that the spec has for them, needed or not. One that is shaped like another role's is
        not among them."""
        found = ((name, getattr(self, name, None)) for name in ROLES)
        return [(name, section) for name, section in found if isinstance(section, RoleSection)]

    def adapters(self) -> list[tuple[RoleName, Lora]]:
        """Roles of this run whose own section asks for adapters."""
        found = ((role, getattr(section, "lora", None)) for role, section in self.sections() if role in self.roles)
        return [(role, lora) for role, lora in found if isinstance(lora, Lora)]

    @property
    def roles(self) -> tuple[RoleName, ...]:
        """Roles of this run, in the order in which they are started."""
        here = [role for role in ROLES.values() if self._has(role)]
        return tuple(role.name for role in sorted(here, key=lambda role: role.wave))

    def role(self, role: RoleName) -> RoleSection:
        """The section that a role of this run follows: its own, or one shaped like the role that it inherits from."""
        section = self._section(ROLES[role])
        assert section is not None, f"{role} is not part of this run"
        return section

    def _has(self, role: Role) -> bool:
        possible = role.holds == "data" or role.name in type(self).model_fields
        return possible and (not role.needed_if or bool(getattr(self, role.needed_if)))

    def _section(self, role: Role) -> RoleSection | None:
        if not self._has(role):
            return None
        own = getattr(self, role.name, None)
        if isinstance(own, RoleSection):
            return own
        if not role.inherits or not self._has(ROLES[role.inherits]):
            return RoleSection()
        like, kind = self.role(role.inherits), self.section_class(role.name)
        shared = kind.model_fields.keys() & type(like).model_fields.keys()
        if not role.spreads:  # it stays on the driver's host, wherever the other is
            shared -= {"processes", "nodes"}
        return kind(**{name: getattr(like, name) for name in shared})

    def resolved(self) -> dict[str, Any]:
        """Every key with its effective value, as written to `resolved.json`: `auto` precision by what it means here."""
        values = self.model_dump(mode="json", by_alias=True)
        for name in type(self).model_fields:
            if getattr(section := getattr(self, name), "dtype", None) == "auto":
                values[name]["dtype"] = self.dtype_of(section)
        return values

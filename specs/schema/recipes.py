"""The recipes: each is a class of spec, with the sections that it has besides those of all runs.

`run.recipe` chooses one. What a recipe does in a step is in `rlctl/recipes`, under the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from specs.schema.algorithms.algorithm import Anchor, AnyLoss, Loss
from specs.schema.algorithms.algorithm_tables import AlgorithmTable
from specs.schema.environment import EnvironmentSection, EnvironmentTables
from specs.schema.eval_sets import EvalSection, Evaluation, GenerateSection, PromptSets
from specs.schema.objectives import BradleyTerry, Nll, Objective, PreferenceObjective, RowsObjective
from specs.schema.rewards import RewardTerm
from specs.schema.role_section import RoleSection
from specs.schema.roles import ACTOR, CRITIC, REWARD_MODEL, ROLES, ROLLOUT, RoleName
from specs.schema.rows import RowsEval, RowsSection, TextEval
from specs.schema.sections import DataSection, SyncSection
from specs.schema.spec import (
    ActorSection,
    CriticSection,
    RefSection,
    RewardLearnerSection,
    RewardModelSection,
    RewardSection,
    RolloutSection,
    Spec,
)


class SamplingSpec(Spec):
    """A recipe that can sample completions and have them graded: to learn from them, or to evaluate. `lengths`: the
    section that says how long prompts and completions may be."""

    lengths: ClassVar[str] = "data"

    actor: ActorSection = ActorSection()
    reward: RewardSection | None = None
    reward_model: RewardModelSection | None = None
    rollout: RolloutSection = RolloutSection()
    sync: SyncSection = SyncSection()

    @property
    def prompt_sets(self) -> PromptSets | None:
        """The table of the prompts that the run is evaluated on."""
        raise NotImplementedError

    @property
    def answer_column(self) -> str:
        """Column that rewards compare completions with."""
        raise NotImplementedError

    @property
    def drawn_at_once(self) -> tuple[int, int]:
        """Prompts that are sampled at once to learn from, and completions of each."""
        return 0, 0

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        return self.prompt_sets.evaluations if self.prompt_sets is not None else ()

    @property
    def reward_terms(self) -> tuple[RewardTerm, ...]:
        return self.reward.terms if self.generates and self.reward is not None else ()

    @property
    def grading(self) -> RewardSection:
        """The section that grades completions; that there is one is a rule."""
        assert self.reward is not None, "nothing grades completions"
        return self.reward

    @property
    def rollout_applies_adapters(self) -> bool:
        """Whether the sampler holds the actor's adapters beside the model, instead of merged into it."""
        return self.actor.lora is not None and getattr(self.rollout.engine, "lora", "merged") == "adapters"

    @property
    def needs_reward_model(self) -> bool:
        """Whether a term is the score of a model. That there is a section for it is a rule."""
        return self.reward_model is not None and any(term.graded_by == "model" for term in self.reward_terms)

    @property
    def environments(self) -> tuple[EnvironmentSection, ...]:
        """The environments that reply to completions; none: a completion is all that there is to a rollout."""
        return ()

    @property
    def environments_by_key(self) -> dict[str, EnvironmentSection]:
        """Environments by the keys of their sections."""
        several = isinstance(getattr(self, "environment", None), tuple)
        return {f"environment.{n}" if several else "environment": one for n, one in enumerate(self.environments)}

    @property
    def environment_term(self) -> int | None:
        """Number of the reward's term that is what environments give."""
        terms = enumerate(self.reward_terms)
        return next((number for number, term in terms if term.graded_by == "environment"), None)

    def longest_tokens(self, role: RoleName) -> int:
        if role == ROLLOUT and not self.environments:
            return self.max_prompt_tokens + self.max_response_tokens
        return super().longest_tokens(role)

    def sections(self) -> list[tuple[RoleName, RoleSection]]:
        """Leave out the roles of sampling where nothing is sampled: their defaults may not suit the model."""
        return [each for each in super().sections() if self.generates or ROLES[each[0]].needed_if != "generates"]


class RlSpec(SamplingSpec):
    """Reinforcement learning: sample completions of prompts, grade them, learn."""

    data: DataSection
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmTable
    environment: EnvironmentTables | None = None
    ref: RefSection | None = None
    critic: CriticSection | None = None
    eval: EvalSection | None = None

    @property
    def samples_per_step(self) -> int:
        return self.data.prompts_per_step * self.algorithm.group_size

    @property
    def max_sequence_tokens(self) -> int:
        single_turn = self.data.max_prompt_tokens + self.data.max_response_tokens
        return max((one.max_episode_tokens for one in self.environments), default=single_turn)

    @property
    def environments(self) -> tuple[EnvironmentSection, ...]:
        given = self.environment
        return () if given is None else given if isinstance(given, tuple) else (given,)

    @property
    def turn_weight(self) -> float | None:
        """Weight of what environments give, where turns are credited with it; None: whole episodes are."""
        number = self.environment_term
        by_turn = any(one.credit == "turn" for one in self.environments) and number is not None
        return self.reward.terms[number or 0].weight if by_turn else None

    @property
    def masks_truncated(self) -> bool:
        """Whether samples that a limit ended are left out of the loss."""
        return self.algorithm.mask_truncated or any(not one.learn_truncated for one in self.environments)

    @property
    def generates(self) -> bool:
        return True

    @property
    def drawn_at_once(self) -> tuple[int, int]:
        group = self.algorithm.group_size + self.algorithm.advantage.greedy_baseline
        return self.data.prompts_per_step, group * (1 if self.rollout.in_order else 1 + self.rollout.max_staleness)

    @property
    def prompt_sets(self) -> PromptSets | None:
        return self.eval

    @property
    def answer_column(self) -> str:
        return self.data.answer_column

    @property
    def mini_batches_per_step(self) -> int:
        return self.algorithm.mini_batches_per_step

    @property
    def updates_per_step(self) -> int:
        return self.algorithm.mini_batches_per_step * self.algorithm.epochs_per_step

    @property
    def max_prompt_tokens(self) -> int:
        return self.data.max_prompt_tokens

    @property
    def max_response_tokens(self) -> int:
        return self.data.max_response_tokens

    @property
    def own_functions(self) -> Mapping[str, str]:
        return {f"algorithm.{key}": path for key, path in self.algorithm.own_functions.items()}

    def learns_after(self, role: RoleName) -> int:
        return self.algorithm.actor_starts_after if role == ACTOR else 0

    @property
    def ratio_against(self) -> Anchor:
        """Whose log-probs the loss divides by; the algorithm says."""
        return self.algorithm.ratio_against(runs_ahead=self.rollout.max_staleness > 0)

    @property
    def loss(self) -> Loss:
        """The loss of this run's updates, as it travels to the actor."""
        return self.algorithm.loss(self.ratio_against)

    @property
    def losses(self) -> Mapping[RoleName, AnyLoss]:
        """Loss of each role that the algorithm updates: the critic's first."""
        value_loss = self.algorithm.value_loss
        return {**({CRITIC: value_loss} if value_loss is not None else {}), ACTOR: self.loss}

    @property
    def needs_critic(self) -> bool:
        return "value_T" in self.columns_read

    @property
    def columns_read(self) -> frozenset[str]:
        """Columns of the batch that the advantage, the penalty in the reward, the correction or the loss reads."""
        return frozenset((*self.algorithm.columns, *self.loss.columns))

    @property
    def needs_ref(self) -> bool:
        return "ref_logprob_T" in self.columns_read

    @property
    def why_no_ref(self) -> str:
        return "algorithm.kl_coef is 0: not loaded"


class RowsSpec(Spec):
    """A recipe that learns from rows."""

    data: RowsSection
    objective: Objective
    eval: RowsEval | None = None

    @property
    def losses(self) -> Mapping[RoleName, AnyLoss]:
        return {self.lead: self.objective}

    @property
    def sequences_per_row(self) -> int:
        return 2 if self.objective.unit == "pair" else 1

    @property
    def samples_per_step(self) -> int:
        return self.data.rows_per_step * self.sequences_per_row

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_tokens


class TextSpec(RowsSpec, SamplingSpec):
    """A recipe whose model learns to write from rows; what it writes can be sampled and graded, to evaluate it."""

    lengths: ClassVar[str] = GenerateSection.key

    eval: TextEval | None = None

    @property
    def prompt_sets(self) -> GenerateSection | None:
        return self.eval.generate if self.eval is not None else None

    @property
    def generates(self) -> bool:
        return self.prompt_sets is not None

    @property
    def answer_column(self) -> str:
        return self.prompt_sets.answer_column if self.prompt_sets is not None else ""

    @property
    def max_prompt_tokens(self) -> int:
        return 0 if self.prompt_sets is None else self.prompt_sets.max_prompt_tokens or self.data.max_tokens

    @property
    def max_response_tokens(self) -> int:
        return self.data.max_tokens if self.prompt_sets is None else self.prompt_sets.max_response_tokens


class SftSpec(TextSpec):
    """Supervised fine-tuning: learn completions, conversations or text as they stand."""

    objective: RowsObjective = Field(default_factory=lambda: Nll(kind="nll"))


class PreferenceSpec(TextSpec):
    """Learn which of two completions is better, or whether one is good, against a reference or without one."""

    objective: PreferenceObjective
    ref: RefSection | None = None

    @property
    def needs_ref(self) -> bool:
        return self.objective.needs_ref

    @property
    def precomputes_ref(self) -> bool:
        return self.needs_ref and self.objective.precompute_ref


class RewardModelSpec(RowsSpec):
    """Train a reward model on pairs of a better and a worse completion."""

    lead: ClassVar[RoleName] = REWARD_MODEL

    objective: BradleyTerry = Field(default_factory=lambda: BradleyTerry(kind="bradley_terry"))
    reward_model: RewardLearnerSection = RewardLearnerSection()

    @property
    def needs_reward_model(self) -> bool:
        return True


RECIPES: Mapping[str, type[Spec]] = {
    "rl": RlSpec,
    "sft": SftSpec,
    "preference": PreferenceSpec,
    "reward_model": RewardModelSpec,
}


def sampling_of(spec: Spec) -> SamplingSpec | None:
    """Return the spec as what samples completions; None where nothing does."""
    return spec if isinstance(spec, SamplingSpec) and spec.generates else None


def spec_class(raw: Any) -> type[Spec]:
    """Return the class of the recipe that the tables of a spec name; where it is none of them, that of `rl`."""
    run = raw.get("run") if isinstance(raw, dict) else None
    recipe = run.get("recipe") if isinstance(run, dict) else None
    return RECIPES.get(recipe if isinstance(recipe, str) else "rl", RlSpec)

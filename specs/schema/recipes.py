"""The recipes: each is a class of spec, with the sections that it has besides those of all runs.

`run.recipe` chooses one. What a recipe does in a step is in `rlctl/recipes`, under the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from specs.schema.algorithms.algorithm import Anchor, AnyLoss, Loss
from specs.schema.algorithms.algorithm_tables import AlgorithmTable
from specs.schema.eval_sets import EvalSection, Evaluation
from specs.schema.objectives import BradleyTerry, Nll, Objective, PreferenceObjective, RowsObjective
from specs.schema.rewards import RewardTerm
from specs.schema.roles import ACTOR, CRITIC, REWARD_MODEL, RoleName
from specs.schema.rows import RowsEval, RowsSection
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


class RlSpec(Spec):
    """Reinforcement learning: sample completions of prompts, grade them, learn."""

    data: DataSection
    reward: RewardSection
    algorithm: AlgorithmTable
    actor: ActorSection = ActorSection()
    ref: RefSection | None = None
    critic: CriticSection | None = None
    reward_model: RewardModelSection | None = None
    rollout: RolloutSection = RolloutSection()
    eval: EvalSection | None = None
    sync: SyncSection = SyncSection()

    @property
    def samples_per_step(self) -> int:
        return self.data.prompts_per_step * self.algorithm.group_size

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.data.max_response_tokens

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The sets of prompts that the run is evaluated on."""
        return self.eval.evaluations if self.eval is not None else ()

    @property
    def every(self) -> int | None:
        return self.eval.every if self.eval is not None else None

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
    def data_section(self) -> DataSection:
        return self.data

    @property
    def reward_terms(self) -> tuple[RewardTerm, ...]:
        return self.reward.terms

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

    @property
    def rollout_applies_adapters(self) -> bool:
        """Whether the sampler holds the actor's adapters beside the model, instead of merged into it."""
        return self.actor.lora is not None and getattr(self.rollout.engine, "lora", "merged") == "adapters"

    @property
    def needs_reward_model(self) -> bool:
        """Whether a term is the score of a model. That there is a section for it is a rule."""
        return self.reward_model is not None and any(term.graded_by == "model" for term in self.reward.terms)


class RowsSpec(Spec):
    """A recipe that learns from rows."""

    data: RowsSection
    objective: Objective
    eval: RowsEval | None = None

    @property
    def data_section(self) -> RowsSection:
        return self.data

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

    @property
    def every(self) -> int | None:
        return self.eval.every if self.eval is not None else None


class SftSpec(RowsSpec):
    """Supervised fine-tuning: learn completions, conversations or text as they stand."""

    objective: RowsObjective = Field(default_factory=lambda: Nll(kind="nll"))
    actor: ActorSection = ActorSection()


class PreferenceSpec(RowsSpec):
    """Learn which of two completions is better, or whether one is good, against a reference or without one."""

    objective: PreferenceObjective
    actor: ActorSection = ActorSection()
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


def spec_class(raw: Any) -> type[Spec]:
    """Return the class of the recipe that the tables of a spec name; where it is none of them, that of `rl`."""
    run = raw.get("run") if isinstance(raw, dict) else None
    recipe = run.get("recipe") if isinstance(run, dict) else None
    return RECIPES.get(recipe if isinstance(recipe, str) else "rl", RlSpec)

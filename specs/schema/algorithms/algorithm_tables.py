"""The tables of advantages and losses, and the algorithms: presets of one of each.

An algorithm is added here: an advantage or a loss where there is none yet, then a preset of the two. Its paper stands
in its description, and numbers that a loss reports beside its table.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_origin

from pydantic import Field, TypeAdapter, ValidationError

from specs.errors import RlctlError
from specs.schema.algorithms.algorithm import (
    Advantage,
    Algorithm,
    AnyLoss,
    FunctionAdvantage,
    FunctionLoss,
    LossAggregation,
    LossMetric,
    RatioLoss,
    preset,
)
from specs.schema.objectives import Objective

Discount = Annotated[float, Field(ge=0, le=1, description="γ: what a reward one token later is worth.")]
ValueClip = Annotated[
    float | None,
    Field(
        gt=0,
        description="How far from its value before the step a value may move before it gains nothing; unset: no limit.",
    ),
]

# ── advantages ────────────────────────────────────────────────────────────────────────────────────


class GroupAdvantage(Advantage):
    """An advantage that compares the rollouts of a group."""

    min_group: ClassVar[int] = 2
    equal_is_silent: ClassVar[bool] = True
    why_min_group: ClassVar[str] = "with one completion per prompt every advantage is 0"


class GroupRelative(GroupAdvantage):
    """Score minus the mean of its group (Shao et al. 2024)."""

    kind: Literal["group_relative"] = "group_relative"
    scale: Literal["std", "none", "batch"] = "std"
    """Divide advantages by the standard deviation of the group's scores (`std`), of the whole step's (`batch`: Lite
    PPO, Zihe Liu et al. 2025), or not (`none`: Dr.GRPO, Zichen Liu et al. 2025)."""


class LeaveOneOut(GroupAdvantage):
    """Score minus the mean of the others in its group (Ahmadian et al. 2024)."""

    kind: Literal["leave_one_out"] = "leave_one_out"

    why_min_group: ClassVar[str] = (
        "the baseline is the mean score of the group's other completions, and there are none (Ahmadian et al. 2024)"
    )


class LengthWeighted(GroupAdvantage):
    """Score minus the mean of its group in which every rollout weighs as many loss tokens as it has: the baseline of
    least variance where a gradient grows with the square root of the length (OPO, Hao et al. 2025)."""

    kind: Literal["length_weighted"] = "length_weighted"


class GroupCentredWhitened(GroupAdvantage):
    """Score minus the mean of its group, then mean 0 and standard deviation 1 over all loss tokens of the step
    (REINFORCE++ with a baseline, Hu et al. 2025)."""

    kind: Literal["group_centred_whitened"] = "group_centred_whitened"

    why_min_group: ClassVar[str] = "with one completion per prompt every score is its own baseline"


class ReturnToGo(Advantage):
    """Discounted sum of the rewards from a token on, then mean 0 and standard deviation 1 over all loss tokens of the
    step (REINFORCE++, Hu et al. 2025). It needs no group."""

    kind: Literal["return_to_go"] = "return_to_go"
    discount: Discount = 1.0


class Gae(Advantage):
    """Generalised advantage estimation from a critic's values (Schulman et al. 2015), with a λ of its own for the
    critic's returns (VC-PPO, Yuan et al. 2025). It needs no group."""

    kind: Literal["gae"] = "gae"
    discount: Discount = 1.0
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """λ of the policy's advantages: 0 trusts the critic's next value alone, 1 the rewards alone."""
    gae_lambda_value: float | None = Field(None, ge=0, le=1)
    """λ of the returns that the critic learns; unset: `gae_lambda`. 1.0 is VAPO's."""
    gae_length_alpha: float | None = Field(None, gt=0)
    """α of a policy λ that grows with the completion, 1 - 1/(α·tokens), at least 0 (VAPO, Yue et al. 2025: 0.05);
    unset: `gae_lambda` for every length."""
    whiten: bool = True
    """Shift and scale advantages to mean 0 and standard deviation 1 over the step's loss tokens."""

    @property
    def lambda_value(self) -> float:
        """λ of the critic's returns."""
        return self.gae_lambda if self.gae_lambda_value is None else self.gae_lambda_value

    columns: ClassVar[tuple[str, ...]] = ("value_T",)


class GreedyBaseline(Advantage):
    """Discounted sum of the rewards from a token on, minus the score of a greedy completion of the same prompt (ReMax,
    Li et al. 2023). It needs no group."""

    kind: Literal["greedy_baseline"] = "greedy_baseline"
    discount: Discount = 1.0

    greedy_baseline: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("baseline_B",)


class Teacher(Advantage):
    """Log-prob of a teacher minus the actor's at each token that the actor sampled: minus the reverse KL, token by
    token (on-policy distillation: Agarwal et al. 2024; Gu et al. 2024; Lu et al. 2025). It needs no group."""

    kind: Literal["teacher"] = "teacher"
    reward_coef: float = Field(0.0, ge=0)
    """Weight of the reward beside the teacher: of a completion's score less the mean over the step's loss tokens.
    0: rewards are graded and shown, and nothing is learned from them."""
    whiten: bool = False
    """Mean 0 and standard deviation 1 over the step's loss tokens; else in nats, as they are."""

    needs_teacher: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("old_logprob_T", "ref_logprob_T")


# ── losses ────────────────────────────────────────────────────────────────────────────────────────


class ClippedLoss(RatioLoss):
    """A loss that bounds what its ratio does."""

    ratio_keys: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")
    metrics: ClassVar[tuple[LossMetric, ...]] = (
        *RatioLoss.metrics,
        LossMetric("actor/clip_fraction", "clipped", "token_mean", "Loss tokens that the clip decided.", "share"),
    )


class PpoClip(ClippedLoss):
    """Clipped surrogate at each token (Schulman et al. 2017), with DAPO's two bounds and the dual clip."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Probability ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """Probability ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound on the loss where the advantage is negative (3.0 is usual); unset: none."""

    ratio_keys: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "dual_clip")


class GspoLoss(ClippedLoss):
    """Clipped surrogate of whole sequences, whose ratio is the geometric mean of their tokens' (Zheng et al. 2025)."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(0.0003, gt=0, lt=1)
    """A sequence's ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.0004, gt=0)
    """A sequence's ratio is clipped above at 1 + clip_high."""
    loss_aggregation: LossAggregation = "seq-mean-token-mean"

    sequence_columns: ClassVar[tuple[str, ...]] = ("log_ratio_B",)


class CispoLoss(ClippedLoss):
    """The log-prob times the advantage and the clipped, detached ratio: every token keeps a gradient (MiniMax-M1,
    Chen et al. 2025)."""

    kind: Literal["cispo"] = "cispo"
    clip_low: float = Field(1.0, gt=0, le=1)
    """A ratio counts as at least 1 - clip_low; 1: no bound."""
    clip_high: float = Field(4.0, gt=0)
    """A token's weight is at most 1 + clip_high."""


class SapoLoss(RatioLoss):
    """A sigmoid of the ratio instead of the clip: gradients fade instead of ending (Gao et al. 2025)."""

    kind: Literal["sapo"] = "sapo"
    tau_positive: float = Field(1.0, gt=0)
    """How sharply the gate closes where the advantage is positive."""
    tau_negative: float = Field(1.05, gt=0)
    """The same where it is negative."""
    loss_aggregation: LossAggregation = "seq-mean-token-mean"

    ratio_keys: ClassVar[tuple[str, ...]] = ("tau_positive", "tau_negative")


class GmpoLoss(ClippedLoss):
    """The advantage times the geometric mean of a sequence's clipped ratios, each clipped at its token, on the side
    that the advantage pushes to (Zhao et al. 2025)."""

    kind: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(0.4, gt=0)
    """A token's log-ratio is clipped below at -clip_low."""
    clip_high: float = Field(0.4, gt=0)
    """A token's log-ratio is clipped above at clip_high."""
    loss_aggregation: LossAggregation = "seq-mean-token-mean"

    sequence_columns: ClassVar[tuple[str, ...]] = ("log_ratio_up_B", "log_ratio_down_B")


class ClipCovLoss(ClippedLoss):
    """The clipped surrogate, but for a few tokens whose covariance of log-prob and advantage lies in a band: drawn at
    random, they have no loss and no gradient (Clip-Cov, Cui et al. 2025, eq. 11 and 12, which have no clip; the bounds
    by default are those of the authors' runs)."""

    kind: Literal["clip_cov"] = "clip_cov"
    covariance_share: float = Field(0.0002, gt=0, lt=1)
    """Share of a mini-batch's loss tokens that is left out, at least one token."""
    covariance_low: float = 1.0
    """Only tokens with at least this covariance may be left out."""
    covariance_high: float = 5.0
    """Only tokens with at most this covariance may be left out."""
    clip_low: float = Field(1.0, gt=0, le=1)
    """A ratio counts as at least 1 - clip_low; 1: no bound."""
    clip_high: float = Field(1.0, gt=0)
    """Probability ratio is clipped above at 1 + clip_high."""

    selects_covariant: ClassVar[bool] = True


class KlCovLoss(ClippedLoss):
    """-A·ρ, and at the tokens with the largest covariance of log-prob and advantage a KL to the ratio's anchor, |log ρ|
    (KL-Cov, Cui et al. 2025, eq. 13 and 14)."""

    kind: Literal["kl_cov"] = "kl_cov"
    covariance_share: float = Field(0.002, gt=0, lt=1)
    """Share of a mini-batch's loss tokens that has the KL, at least one token."""
    covariance_kl_coef: float = Field(1.0, gt=0)
    """Weight of |log ρ| at these tokens."""

    selects_covariant: ClassVar[bool] = True
    ratio_keys: ClassVar[tuple[str, ...]] = ("covariance_share", "covariance_kl_coef")
    needs_ratio: ClassVar[bool] = True


class ValueLoss(AnyLoss):
    """Half the squared error of a critic's values V against returns R; with `value_clip` c the larger of it and that
    of V_old + clip(V - V_old, ±c) (Schulman et al. 2017 have it in their code; Engstrom et al. 2020, eq. 3)."""

    kind: Literal["clipped_value"] = "clipped_value"
    loss_aggregation: LossAggregation = "token-mean"
    value_clip: ValueClip = None

    metrics: ClassVar[tuple[LossMetric, ...]] = (
        LossMetric("critic/loss", "loss", "update_mean", "The loss of the values."),
        LossMetric("critic/clip_fraction", "clipped", "token_mean", "Loss tokens that the clip decided.", "share"),
        LossMetric("critic/value_mean", "value", "token_mean", "Mean value at a loss token."),
        LossMetric("critic/return_mean", "return", "token_mean", "Mean return at a loss token."),
    )

    @property
    def columns(self) -> tuple[str, ...]:
        return ("tokens_T", "loss_mask_T", "value_T", "return_T")


# ── algorithms ────────────────────────────────────────────────────────────────────────────────────


class ActorCritic(Algorithm):
    """An algorithm whose advantage comes from a critic, which learns beside the actor."""

    value_clip: ValueClip = None
    value_loss_aggregation: LossAggregation = "token-mean"
    """How the critic's token losses become one number, over the whole mini-batch."""
    critic_warmup_steps: int = Field(0, ge=0)
    """First steps in which the critic alone learns."""

    @property
    def value_loss(self) -> ValueLoss:
        return ValueLoss(value_clip=self.value_clip, loss_aggregation=self.value_loss_aggregation)

    @property
    def actor_starts_after(self) -> int:
        return self.critic_warmup_steps


_ALL = (
    preset("grpo", "Group-relative policy optimisation (Shao et al. 2024).", GroupRelative, PpoClip),
    preset(
        "dapo",
        "GRPO with the choices of DAPO (Yu et al. 2025): the clip is higher than low, the loss is a mean over tokens, "
        "no reference, and groups of equal scores are drawn again. Its overlong shaping is the reward term `overlong`.",
        GroupRelative,
        PpoClip,
        clip_high=0.28,
        dynamic_sampling=True,
    ),
    preset(
        "dr_grpo",
        "GRPO without its two biases (Zichen Liu et al. 2025): no division by the group's standard deviation, and a "
        "completion's tokens are divided by `data.max_response_tokens`, not by how many they are.",
        GroupRelative,
        PpoClip,
        scale="none",
        loss_aggregation="token-sum-constant",
    ),
    preset(
        "rloo",
        "REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024). A completion is one action: its log-probs are "
        "summed. With several updates per step the ratio of each token is clipped, as PPO's.",
        LeaveOneOut,
        PpoClip,
        loss_aggregation="seq-mean-token-sum",
    ),
    preset(
        "reinforce++",
        "REINFORCE++ (Hu et al. 2025): no critic and no groups; the step's own mean is the baseline. A KL is taken off "
        "the reward at each token.",
        ReturnToGo,
        PpoClip,
        kl_in="reward",
        kl_estimator="k1",
    ),
    preset(
        "reinforce++_baseline",
        "REINFORCE++ with the group's mean as baseline (Hu et al. 2025): advantages are normalised over the step, not "
        "in the group, where a small group's standard deviation is mostly noise.",
        GroupCentredWhitened,
        PpoClip,
    ),
    preset(
        "remax",
        "REINFORCE with the score of a greedy completion as baseline (Li et al. 2023): one more sample for each "
        "prompt, graded but not learned from. A completion is one action: its log-probs are summed.",
        GreedyBaseline,
        PpoClip,
        loss_aggregation="seq-mean-token-sum",
    ),
    preset(
        "opo",
        "On-policy optimisation with the baseline of least variance (Hao et al. 2025). A completion is one action: its "
        "log-probs are summed. The paper makes one update per step; with several, each token's ratio is clipped.",
        LengthWeighted,
        PpoClip,
        loss_aggregation="seq-mean-token-sum",
    ),
    preset(
        "gspo",
        "Group sequence policy optimisation (Zheng et al. 2025): ratio and clip are those of whole sequences. The "
        "bounds are the paper's, far narrower than a token's.",
        GroupRelative,
        GspoLoss,
    ),
    preset(
        "gmpo",
        "Geometric-mean policy optimisation (Zhao et al. 2025): a single token's ratio moves that of its sequence "
        "little, so the clip may be wide.",
        GroupRelative,
        GmpoLoss,
    ),
    preset(
        "cispo",
        "Clipped importance sampling (MiniMax-M1, Chen et al. 2025): no token is left out of the gradient.",
        GroupRelative,
        CispoLoss,
    ),
    preset(
        "sapo",
        "Soft adaptive policy optimisation (Gao et al. 2025): a gate that closes softly, a little sharper for tokens "
        "that are pushed down.",
        GroupRelative,
        SapoLoss,
    ),
    preset(
        "clip_cov",
        "GRPO without the few tokens that would cost most entropy (Cui et al. 2025). The clip is as wide as in the "
        "authors' runs: it bounds only ratios above 2.",
        GroupRelative,
        ClipCovLoss,
    ),
    preset(
        "kl_cov",
        "GRPO with a KL at the few tokens that would cost most entropy (Cui et al. 2025). The paper has no clip.",
        GroupRelative,
        KlCovLoss,
    ),
    preset(
        "ppo",
        "Proximal policy optimisation (Schulman et al. 2017): a critic, the role `critic`, predicts what is still to "
        "come at every token, and learns beside the actor from the same mini-batches. It needs no groups.",
        Gae,
        PpoClip,
        ActorCritic,
        kl_in="reward",
    ),
    preset(
        "distill",
        "On-policy distillation: the model in `ref.model` scores what the actor writes, token by token (Agarwal et al. "
        "2024; Lu et al. 2025).",
        Teacher,
        PpoClip,
    ),
)
PRESETS: Mapping[str, type[Algorithm]] = {table.__name__: table for table in _ALL}
PLAIN = PRESETS["grpo"](kind="grpo", group_size=2)  # where nothing is learned: it needs neither reference nor critic

# ── the unions ────────────────────────────────────────────────────────────────────────────────────

if TYPE_CHECKING:
    AlgorithmTable = Algorithm
else:
    AlgorithmTable = Annotated[Union[_ALL], Field(discriminator="kind")]  # noqa: UP007

ADVANTAGE_TABLES: tuple[type[Advantage], ...] = (
    *dict.fromkeys(table.advantage_table for table in _ALL),
    FunctionAdvantage,
)
LOSS_TABLES: tuple[type[AnyLoss], ...] = (*dict.fromkeys(table.loss_table for table in _ALL), FunctionLoss, ValueLoss)


@cache
def _losses() -> TypeAdapter[AnyLoss]:
    """The losses of policies and values, and every objective."""
    tables: list[type[AnyLoss]] = [Objective]
    for table in tables:  # which grows
        tables += table.__subclasses__()
    named = [table for table in tables if get_origin(table.model_fields["kind"].annotation) is Literal]
    every: Any = Annotated[Union[(*LOSS_TABLES, *named)], Field(discriminator="kind")]
    return TypeAdapter(every)


def read_loss(raw: Any) -> AnyLoss:
    """Return the loss that travelled as `raw`. Raises RlctlError for one that is not known here, or is not whole."""
    try:
        return _losses().validate_python(raw)
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}".lstrip(": ") for item in error.errors())
        raise RlctlError(
            f"the update's loss cannot be used: {found}", hint="every role must run the same version of rlctl"
        ) from None

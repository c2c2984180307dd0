"""The tables of advantages and losses, and the algorithms: named settings of one of each.

An algorithm is added here: an advantage or a loss where there is none yet, then a setting of the two. Its paper stands
in its docstring, and numbers that a loss reports beside its table.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError

from specs.errors import RlctlError
from specs.schema.algorithms.algorithm import AGGREGATION, Advantage, Aggregation, Algorithm, Loss, LossKeys, LossMetric
from specs.schema.table import Table

# ── advantages ────────────────────────────────────────────────────────────────────────────────────


class GroupRelativeKeys(Table):
    """Keys of the group-relative advantage."""

    scale: Literal["std", "none", "batch"] = Field(
        "std",
        description="Divide advantages by the standard deviation of the group's scores (`std`), of the whole step's "
        "(`batch`: Lite PPO, Zihe Liu et al. 2025), or not (`none`: Dr.GRPO, Zichen Liu et al. 2025).",
    )


class GroupRelative(GroupRelativeKeys, Advantage):
    """Score minus the mean of its group (Shao et al. 2024)."""

    kind: Literal["group_relative"] = "group_relative"

    min_group: ClassVar[int] = 2
    why_min_group: ClassVar[str] = "with one completion per prompt every advantage is 0"


class LeaveOneOut(Advantage):
    """Score minus the mean of the others in its group (Ahmadian et al. 2024)."""

    kind: Literal["leave_one_out"] = "leave_one_out"

    min_group: ClassVar[int] = 2
    why_min_group: ClassVar[str] = (
        "the baseline is the mean score of the group's other completions, and there are none (Ahmadian et al. 2024)"
    )


# ── losses ────────────────────────────────────────────────────────────────────────────────────────


class PpoClipKeys(LossKeys):
    """Keys of the clipped surrogate."""

    clip_low: float = Field(0.2, gt=0, lt=1, description="Probability ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(0.2, gt=0, description="Probability ratio is clipped above at 1 + clip_high.")
    dual_clip: float | None = Field(
        None, gt=1, description="Bound on the loss where the advantage is negative (3.0 is usual); unset: none."
    )


class PpoClip(PpoClipKeys, Loss):
    """Clipped surrogate at each token (Schulman et al. 2017), with DAPO's two bounds and the dual clip."""

    kind: Literal["ppo_clip"] = "ppo_clip"

    ratio_keys: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "dual_clip")
    metrics: ClassVar[tuple[LossMetric, ...]] = (
        *Loss.metrics,
        LossMetric("actor/clip_fraction", "clipped", "token_mean"),
        LossMetric("actor/approx_kl", "approx_kl", "token_mean"),
        LossMetric("actor/ratio", "ratio", "token_mean"),
    )


class GspoKeys(LossKeys):
    """Keys of the sequence-level clipped surrogate."""

    clip_low: float = Field(3e-4, gt=0, lt=1, description="A sequence's ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(4e-4, gt=0, description="A sequence's ratio is clipped above at 1 + clip_high.")
    loss_aggregation: Aggregation = Field("seq-mean-token-mean", description=AGGREGATION)


class GspoLoss(GspoKeys, Loss):
    """Clipped surrogate of whole sequences, whose ratio is the geometric mean of their tokens' (Zheng et al. 2025)."""

    kind: Literal["gspo"] = "gspo"

    ratio_keys: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")
    sequence_columns: ClassVar[tuple[str, ...]] = ("log_ratio_B",)
    metrics: ClassVar[tuple[LossMetric, ...]] = PpoClip.metrics

    def seldom_meant(self) -> Mapping[str, str]:
        why = "a token's bound: the ratio of a whole completion moves far less (the paper's: 3e-4 below, 4e-4 above)"
        return {key: why for key in self.ratio_keys if getattr(self, key) >= 0.1}


# ── algorithms: named settings ────────────────────────────────────────────────────────────────────


class Grpo(PpoClipKeys, GroupRelativeKeys, Algorithm):
    """Group-relative policy optimisation (Shao et al. 2024), with the choices of DAPO and Dr.GRPO."""

    kind: Literal["grpo"]

    advantage_table: ClassVar[type[Advantage]] = GroupRelative
    loss_table: ClassVar[type[Loss]] = PpoClip


class Rloo(PpoClipKeys, Algorithm):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024). A completion is one action: its log-probs are
    summed. With several updates per step the ratio of each token is clipped, as PPO's."""

    kind: Literal["rloo"]
    loss_aggregation: Aggregation = Field("seq-mean-token-sum", description=AGGREGATION)

    advantage_table: ClassVar[type[Advantage]] = LeaveOneOut
    loss_table: ClassVar[type[Loss]] = PpoClip


class Gspo(GspoKeys, GroupRelativeKeys, Algorithm):
    """Group sequence policy optimisation (Zheng et al. 2025): group-relative advantages; ratio and clip are those of
    whole sequences. The bounds are the paper's, far narrower than a token's."""

    kind: Literal["gspo"]

    advantage_table: ClassVar[type[Advantage]] = GroupRelative
    loss_table: ClassVar[type[Loss]] = GspoLoss


# ── the unions ────────────────────────────────────────────────────────────────────────────────────

AdvantageTable = Annotated[GroupRelative | LeaveOneOut, Field(discriminator="kind")]
LossTable = Annotated[PpoClip | GspoLoss, Field(discriminator="kind")]
AlgorithmTable = Annotated[Grpo | Rloo | Gspo, Field(discriminator="kind")]


@cache
def _losses() -> TypeAdapter[Loss]:
    return TypeAdapter(LossTable)


def read_loss(raw: Any) -> Loss:
    """The loss that travelled as `raw`. Raises RlctlError for one that is not known here, or is not whole."""
    try:
        return _losses().validate_python(raw)
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}".lstrip(": ") for one in error.errors())
        raise RlctlError(
            f"the update's loss cannot be used: {found}", hint="every role must run the same version of rlctl"
        ) from None

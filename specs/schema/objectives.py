"""The objectives of recipes that learn from rows: what is learned of each token, each sequence or each pair.

An objective is a loss as it travels to a trainer. Its function is in `backends/train/objective_losses.py`, by table.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from specs.schema.algorithms.algorithm import AnyLoss, LossAggregation, LossMetric

# What an objective is a mean of. The sequences of a unit are computed in one micro-batch of one rank.
Unit = Literal["token", "sequence", "pair"]


class Objective(AnyLoss):
    """A loss of rows. `kind` names it."""

    unit: ClassVar[Unit]
    of_scores: ClassVar[bool] = False  # what learns gives a score at a sequence's last token, not log-probs
    reads: ClassVar[tuple[str, ...]] = ()  # columns besides those that all have

    weight: float = Field(1.0, gt=0)
    """Factor of this term in a `mixture`."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the batch that an update with this loss reads."""
        units = ("unit_B", "chosen_B") if self.unit != "token" else ()
        return ("tokens_T", "loss_mask_T", *units, *self.reads)

    @property
    def needs_ref(self) -> bool:
        """Whether it compares with the log-probs of a reference."""
        return "ref_logprob_T" in self.columns

    @property
    def needs_kl(self) -> bool:
        """Whether it reads the KL from the reference, which completions under other rows' prompts estimate."""
        return "kl_B" in self.columns


_LOSS = LossMetric("actor/loss", "loss", "update_mean", "The objective's loss.")
_ENTROPY = LossMetric("actor/entropy", "entropy", "token_mean", "Of the policy's distribution at a token.", "nats")
_ACCURACY = LossMetric(
    "actor/token_accuracy", "correct", "token_mean", "Learned tokens that the model finds likeliest.", "share"
)


class TokenObjective(Objective):
    """A loss of each learned token."""

    unit: ClassVar[Unit] = "token"

    loss_aggregation: LossAggregation = "token-mean"

    metrics: ClassVar[tuple[LossMetric, ...]] = (
        _LOSS,
        _ENTROPY,
        _ACCURACY,
        LossMetric("actor/nll", "nll", "token_mean", "Negative log-likelihood of a learned token.", "nats"),
    )


class Nll(TokenObjective):
    """Negative log-likelihood of the learned tokens; in a preference mixture, of the chosen completion alone (RPO,
    Pang et al. 2024, with `dpo`)."""

    kind: Literal["nll"]


class Dft(TokenObjective):
    """Dynamic fine-tuning: the negative log-likelihood times the token's own probability, detached (Wu et al. 2025)."""

    kind: Literal["dft"]


_CHOSEN = "Implicit reward of the chosen completion; of `kto`, of one labelled true, where the step has one."
_BETTER = "Pairs whose chosen reward is higher; where both are the same, half."
_REJECTED = "The same of the rejected one; of `kto`, of one labelled false."


class Preference(Objective):
    """A loss of which completion is better. The implicit reward of one is β · log(π/π_ref) over its learned tokens, or
    without a reference β times its mean log-prob."""

    unit: ClassVar[Unit] = "pair"

    precompute_ref: bool = False
    """Compute the reference's log-probs of the run's rows once, before the first step, and keep them. The actor
    does it then, before it has learned, unless `ref.model` names another model: no second model is held. Not of
    `simpo` and `orpo`, which have no reference, nor of `kto`, whose KL is of other pairs in every step."""

    metrics: ClassVar[tuple[LossMetric, ...]] = (
        _LOSS,
        _ENTROPY,
        _ACCURACY,
        LossMetric("actor/chosen_reward", "chosen_reward", "chosen_mean", _CHOSEN),
        LossMetric("actor/rejected_reward", "rejected_reward", "rejected_mean", _REJECTED),
    )


class PairLoss(Preference):
    """A loss of pairs of a chosen and a rejected completion."""

    metrics: ClassVar[tuple[LossMetric, ...]] = (
        *Preference.metrics,
        LossMetric("actor/reward_accuracy", "accuracy", "unit_mean", _BETTER, "share"),
        LossMetric("actor/reward_margin", "margin", "unit_mean", "Chosen reward less rejected reward."),
    )


class RefPairLoss(PairLoss):
    """A loss of pairs against a reference. Below, h is log(π/π_ref) of the chosen completion less that of the
    rejected."""

    reads: ClassVar[tuple[str, ...]] = ("ref_logprob_T",)

    beta: float = Field(0.1, gt=0)
    """β: how far the policy may leave the reference for a better margin; a smaller one lets it go further."""


class Dpo(RefPairLoss):
    """-log σ(βh) (Rafailov et al. 2023); with `label_smoothing` ε conservative DPO, which adds -log σ(-βh) in the
    share ε (Mitchell 2023)."""

    kind: Literal["dpo"]
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of labels that are taken to be wrong."""


class Ipo(RefPairLoss):
    """(h̄ - 1/(2β))², with mean log-ratios of tokens instead of sums (Azar et al. 2023)."""

    kind: Literal["ipo"]


class Hinge(RefPairLoss):
    """max(0, 1 - βh) (SLiC, Zhao et al. 2023)."""

    kind: Literal["hinge"]


class Robust(RefPairLoss):
    """DPO that is unbiased where labels are wrong in the share ε (Chowdhury et al. 2024):
    (-(1 - ε) log σ(βh) + ε log σ(-βh)) / (1 - 2ε)."""

    kind: Literal["robust"]
    label_smoothing: float = Field(0.1, ge=0, lt=0.5)
    """Share ε of labels that are wrong."""


class ApoZero(RefPairLoss):
    """1 - σ(β·log-ratio) of the chosen completion + σ(β·log-ratio) of the rejected one (D'Oosterlinck et al. 2024)."""

    kind: Literal["apo_zero"]


class Sppo(RefPairLoss):
    """(log-ratio of the chosen - 1/(2β))² + (log-ratio of the rejected + 1/(2β))² (Wu et al. 2024, with hard
    labels)."""

    kind: Literal["sppo"]


class SimPo(PairLoss):
    """-log σ(β · difference of mean log-probs - γ): no reference (Meng et al. 2024)."""

    kind: Literal["simpo"]
    beta: float = Field(2.0, gt=0)
    """Factor of the difference."""
    gamma: float = Field(0.5, ge=0)
    """γ: the margin that is wanted."""


class Orpo(PairLoss):
    """Mean negative log-likelihood of the chosen completions' tokens - β·log σ(log odds ratio), with the odds of mean
    log-probs: no reference (Hong et al. 2024)."""

    kind: Literal["orpo"]
    beta: float = Field(0.1, gt=0)
    """Weight of the odds ratio (λ in the paper)."""


class Kto(Preference):
    """Kahneman-Tversky optimisation, of single completions with a label (Ethayarajh et al. 2024): 1 - σ(β(log-ratio -
    z)) where it is true, 1 - σ(β(z - log-ratio)) where it is false; z, the KL from the reference, is the mean log-ratio
    of completions under other rows' prompts, at least 0."""

    unit: ClassVar[Unit] = "sequence"
    reads: ClassVar[tuple[str, ...]] = ("ref_logprob_T", "kl_B")

    kind: Literal["kto"]
    beta: float = Field(0.1, gt=0)
    """β: how far the policy may leave the reference."""
    desirable_weight: float = Field(1.0, ge=0)
    """Weight of completions labelled true."""
    undesirable_weight: float = Field(1.0, ge=0)
    """Weight of completions labelled false."""


class BradleyTerry(Objective):
    """-log σ(score of the chosen - score of the rejected - margin) (Bradley & Terry 1952; the margin: Touvron et al.
    2023), and `center_coef` times the squared sum of the two scores (Eisenstein et al. 2023)."""

    unit: ClassVar[Unit] = "pair"
    of_scores: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("margin_B",)

    kind: Literal["bradley_terry"]
    center_coef: float = Field(0.0, ge=0)
    """Weight of the term that keeps scores around 0."""

    metrics: ClassVar[tuple[LossMetric, ...]] = (
        LossMetric("reward_model/loss", "loss", "update_mean", "The objective's loss."),
        LossMetric(
            "reward_model/accuracy",
            "accuracy",
            "unit_mean",
            "Pairs whose chosen score is higher; a tie is half.",
            "share",
        ),
        LossMetric("reward_model/margin", "margin", "unit_mean", "Score of the chosen less that of the rejected."),
        LossMetric("reward_model/chosen_score", "chosen_reward", "chosen_mean", "Score of a chosen completion."),
        LossMetric("reward_model/rejected_score", "rejected_reward", "rejected_mean", "Score of a rejected one."),
    )


_Pairs = Dpo | Ipo | Hinge | Robust | ApoZero | Sppo | SimPo | Orpo


class Mixture(PairLoss):
    """A weighted sum of losses of the same pairs, and of the chosen completion's likelihood. Rewards and margins are
    the first term's that has them."""

    kind: Literal["mixture"] = "mixture"
    mixture: tuple[Annotated[_Pairs | Nll, Field(discriminator="kind")], ...] = Field(min_length=2)
    """Terms: each an objective with its keys, and a `weight`."""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().columns, *(name for term in self.mixture for name in term.columns))))


def objective_kind(raw: Any) -> Any:
    """Return the tag of an objective: that of a table with `mixture` needs no `kind`."""
    if not isinstance(raw, dict):
        return getattr(raw, "kind", None)
    return raw.get("kind") or ("mixture" if "mixture" in raw else None)


def _with_kind(raw: Any) -> Any:
    """Return the table of an objective with its `kind`."""
    return {**raw, "kind": objective_kind(raw)} if isinstance(raw, dict) and objective_kind(raw) else raw


RowsObjective = Annotated[Nll | Dft, Field(discriminator="kind")]
PreferenceObjective = Annotated[_Pairs | Kto | Mixture, Field(discriminator="kind"), BeforeValidator(_with_kind)]

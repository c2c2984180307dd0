"""Base classes of advantages, losses and algorithms. The tables themselves are in `algorithm_tables.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, create_model

from specs.schema.table import FunctionPath, Table

# Whose log-probs the probability ratio divides by: the current ones, detached, so that it is 1 ("current"); the
# trainer's before the step's first update ("trainer"); those of the distribution sampled from ("sampler").
Anchor = Literal["current", "trainer", "sampler"]
# How the values of loss tokens become a step's metric: the mean or the maximum over all tokens of all ranks and
# updates; the sum over an update's tokens, averaged over the step's updates; or the mean over all units (pairs, or
# single sequences), or over those sequences that are chosen or rejected.
Reduction = Literal["token_mean", "token_max", "update_mean", "unit_mean", "chosen_mean", "rejected_mean"]
UNIT_REDUCTIONS: Mapping[Reduction, str] = {"unit_mean": "units", "chosen_mean": "chosen", "rejected_mean": "rejected"}
"""Names what an engine counts for the mean over units, or those sequences of them."""
KlEstimator = Literal["k1", "k2", "k3", "k1-straight-through", "k3-straight-through", "k3-unbiased"]

LossAggregation = Annotated[
    Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum-constant"],
    Field(description="How token losses become one number, over the whole mini-batch of all ranks."),
]
EntropyCoef = Annotated[float, Field(description="Weight of the entropy bonus.")]

T = TypeVar("T", bound=Table)


# ── advantages ────────────────────────────────────────────────────────────────────────────────────


class Advantage(Table):
    """How scores become advantages. `kind` names it. Its function is in `rlctl/loop/advantages.py` where all tokens of
    a rollout share one, else in `rlctl/loop/token_advantages.py`."""

    # Fewest rollouts of a group, and what a smaller group would mean.
    min_group: ClassVar[int] = 1
    why_min_group: ClassVar[str] = ""
    # Whether a group whose scores are all equal has advantages of 0, so that dynamic sampling may throw it away.
    equal_is_silent: ClassVar[bool] = False
    # Whether each prompt gets a greedy completion too, whose score is the column `baseline_B`.
    greedy_baseline: ClassVar[bool] = False
    # Whether it learns from another model, which `ref.model` must name.
    needs_teacher: ClassVar[bool] = False
    # Columns of the batch that it reads besides scores, groups and masks.
    columns: ClassVar[tuple[str, ...]] = ()


class FunctionAdvantage(Advantage):
    """A function of the user's, of rollouts' scores, groups and loss tokens."""

    kind: Literal["own_function"] = "own_function"
    path: str

    equal_is_silent: ClassVar[bool] = True  # whoever throws such groups away wants it so


# ── losses ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class LossMetric:
    """A number that a loss reports of each loss token, or of each unit.

    `source` names its function in `backends/token_metrics.py`. `before_learning`: only updates whose trainer log-probs
    are of the weights before the step count.
    """

    name: str  # in metrics.jsonl
    source: str
    reduce: Reduction
    meaning: str
    unit: str = ""
    before_learning: bool = False


class AnyLoss(Table):
    """A loss as it travels to a trainer: Σ weight · token loss over the mini-batch. `kind` names it.

    Its function is in `backends/train/`.
    """

    kind: str

    metrics: ClassVar[tuple[LossMetric, ...]] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the batch that an update with this loss reads."""
        raise NotImplementedError

    @classmethod
    def summed(cls) -> tuple[str, ...]:
        """Return the sources that an engine adds up over its loss tokens, in the order of its report."""
        return tuple(dict.fromkeys(metric.source for metric in cls.metrics if metric.reduce != "token_max"))

    @classmethod
    def maxima(cls) -> tuple[str, ...]:
        """Return the sources of which an engine reports the maximum over its loss tokens."""
        return tuple(dict.fromkeys(metric.source for metric in cls.metrics if metric.reduce == "token_max"))


_KL = (
    "Estimate of KL(actor ‖ ref); 0 without a reference. Of a KL in the reward, or to a teacher: before the update, "
    "at every step."
)
_MAX_GAP = "The largest of them."
_GAP = (
    "|log-prob of the sampler - of the trainer before the update| of a token that is learned from; of the first "
    "mini-batch alone where the ratio is against the sampler."
)


class Loss(AnyLoss):
    """The loss of a policy: a token's is correction · policy loss + kl_coef·KL - entropy_coef·entropy."""

    loss_aggregation: LossAggregation = "token-mean"
    entropy_coef: EntropyCoef = 0.0
    anchor: Anchor
    corrected: bool = False  # the policy loss of each token is multiplied with `correction_T`
    kl_coef: float = Field(0.0, ge=0)
    kl_estimator: KlEstimator = "k3"

    metrics: ClassVar[tuple[LossMetric, ...]] = (
        LossMetric("actor/loss", "loss", "update_mean", "The loss, with KL and entropy where they have a weight."),
        LossMetric("actor/entropy", "entropy", "token_mean", "Of the policy's distribution at a token.", "nats"),
        LossMetric("actor/kl", "kl", "token_mean", _KL, "nats per token"),
        LossMetric("rollout/logprob_gap", "logprob_gap", "token_mean", _GAP, "nats", before_learning=True),
        LossMetric("rollout/logprob_gap_max", "logprob_gap_max", "token_max", _MAX_GAP, "nats", before_learning=True),
    )
    # Keys that do nothing while the ratio is 1.
    ratio_keys: ClassVar[tuple[str, ...]] = ()
    # Whether it is the plain policy gradient while the ratio is 1, whatever its keys say.
    needs_ratio: ClassVar[bool] = False
    # Whether it treats tokens of high covariance in a way of their own: those of the column `covariant_T`, which the
    # driver makes of each mini-batch (`rlctl/loop/covariance.py`).
    selects_covariant: ClassVar[bool] = False
    # Columns that the loss's own function makes of the log-ratios of whole sequences, before any gradient.
    sequence_columns: ClassVar[tuple[str, ...]] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the batch that an update with this loss reads."""
        old = ("old_logprob_T",) if self.anchor == "trainer" else ()
        ref = ("ref_logprob_T",) if self.kl_coef > 0 else ()
        correction = ("correction_T",) if self.corrected else ()
        covariant = ("covariant_T",) if self.selects_covariant else ()
        return ("tokens_T", "loss_mask_T", "advantage_T", "rollout_logprob_T", *old, *ref, *correction, *covariant)


_APPROX_KL = "Estimate of the KL from the policy that the ratio is against to the learning one."


class RatioLoss(Loss):
    """A loss of the ratio of probabilities, policy over anchor, which it reports."""

    metrics: ClassVar[tuple[LossMetric, ...]] = (
        *Loss.metrics,
        LossMetric("actor/approx_kl", "approx_kl", "token_mean", _APPROX_KL, "nats per token"),
        LossMetric("actor/ratio", "ratio", "token_mean", "The loss's ratio of probabilities, before any clip."),
    )


class FunctionLoss(RatioLoss):
    """A function of the user's, of a token's log-prob, that of the ratio's anchor, and its advantage."""

    kind: Literal["own_function"] = "own_function"
    path: str


# ── algorithms ────────────────────────────────────────────────────────────────────────────────────


class Correction(Table):
    """Weights against the gap between the policy that sampled and the one that learns. The band bounds the ratio
    trainer / sampler, before the step's first update."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """Whose ratio: a token's own; that of all loss tokens of a sample together (their product); or its geometric
    mean."""
    mode: Literal["mask", "clip", "truncate"] = "truncate"
    """Outside the band the weight is 0 (`mask`), or the nearer bound (`clip`, and `truncate` with the upper alone);
    inside it is the ratio."""
    low: float | None = Field(None, gt=0, le=1)
    """Lower end of the band; unset: 0.5, and 0.99 for `geometric`."""
    high: float | None = Field(None, ge=1)
    """Upper end of the band; unset: 2.0, and 1.01 for `geometric`."""

    @property
    def band(self) -> tuple[float, float]:
        low, high = (0.99, 1.01) if self.level == "geometric" else (0.5, 2.0)
        return self.low or low, self.high or high


class Algorithm(Table):
    """The keys that every algorithm has. Under `[algorithm]` those of its advantage and its loss stand beside them."""

    advantage_table: ClassVar[type[Advantage]]
    loss_table: ClassVar[type[Loss]]

    kind: str
    group_size: int = Field(ge=1)
    """Completions of each prompt."""
    mini_batches_per_step: int = Field(1, ge=1)
    """Optimizer steps that one pass over the step's samples makes."""
    epochs_per_step: int = Field(1, ge=1)
    """Passes over the step's samples."""
    loss_aggregation: LossAggregation = "token-mean"
    entropy_coef: EntropyCoef = 0.0
    kl_coef: float = Field(0.0, ge=0)
    """β, weight of KL(actor ‖ ref). 0: no reference is loaded."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL stands: a term of the `loss`, or taken off the `reward` at each loss token, before advantages
    are computed."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of the KL at a token (Schulman 2020). `k1` is for the reward alone: as a loss its gradient is zero
    in expectation. `…-straight-through`, for the loss alone, has the value of its estimator and the gradient of
    k2; `k3-unbiased` is that of k3 times the ratio (DeepSeek-V3.2, 2025)."""
    kl_target: float | None = Field(None, gt=0)
    """Mean KL per loss token that β is steered to, from `kl_coef` on (Ziegler et al. 2019); unset: β stays."""
    kl_horizon: int = Field(10000, gt=0)
    """Rollouts in which β changes by at most 20 %: a larger number steers more slowly."""
    dynamic_sampling: bool = False
    """Throw away groups whose scores are all equal, and draw prompts in their place (DAPO, Yu et al. 2025)."""
    max_refills: int = Field(4, ge=0)
    """How often a step draws prompts to replace groups that were thrown away; 0: never."""
    mask_truncated: bool = False
    """Leave completions that were truncated at `data.max_response_tokens` out of the loss; their scores still count
    in their groups (overlong filtering, DAPO, Yu et al. 2025, §3.4)."""
    anchor: Literal["auto", "trainer", "sampler"] = "auto"
    """Whose log-probs the loss's ratio divides by: the `trainer`'s before the step's first update, or the
    `sampler`'s. `auto`: the sampler's with `rollout.max_staleness` and no `correction`, else the trainer's."""
    correction: Correction | None = None
    """Off-policy correction: what the policy loss of a token is multiplied with."""
    advantage_function: FunctionPath | None = None
    """A function of your own instead of the kind's advantage, `file.py:name`, relative to the spec file:
    `advantage(score_R, group_R, tokens_R)` returns one number for each rollout."""
    loss_function: FunctionPath | None = None
    """A function of your own instead of the kind's token loss, `file.py:name`, relative to the spec file:
    `loss(logprob, anchor_logprob, advantage)` returns one number with gradient for each token."""

    @property
    def own_functions(self) -> dict[str, str]:
        """Key → path of the functions that the user brings."""
        paths = {"advantage_function": self.advantage_function, "loss_function": self.loss_function}
        return {key: path for key, path in paths.items() if path is not None}

    @property
    def on_policy(self) -> bool:
        """Whether one update follows a step's samples: their old log-probs are the current ones."""
        return self.mini_batches_per_step == 1 and self.epochs_per_step == 1

    def ratio_against(self, *, runs_ahead: bool) -> Anchor:
        """Return the loss's anchor.

        Where the sampler may run ahead of learning, `auto` takes its log-probs, so that the clipped ratio corrects what
        the actor has learned since; with a `correction` that is the weights' part. The trainer's before the step are
        the current ones if one update follows.
        """
        if self.anchor == "sampler" or (self.anchor == "auto" and runs_ahead and self.correction is None):
            return "sampler"
        return "current" if self.on_policy else "trainer"

    @property
    def advantage(self) -> Advantage:
        if self.advantage_function is not None:
            return FunctionAdvantage(path=self.advantage_function)
        return _filled(self.advantage_table, self)

    def loss(self, anchor: Anchor) -> Loss:
        """Return the loss of the actor's updates, with a ratio against `anchor`."""
        more: dict[str, Any] = {"kl_coef": 0.0, "kl_estimator": "k3"} if self.kl_in == "reward" else {}
        if self.loss_function is not None:
            more["path"] = self.loss_function
        table = self.loss_table if self.loss_function is None else FunctionLoss
        return _filled(table, self, anchor=anchor, corrected=self.correction is not None, **more)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the batch that are read before the loss: by the advantage, a penalty in the reward, a
        correction."""
        penalty = ("old_logprob_T", "ref_logprob_T") if self.kl_in == "reward" and self.kl_coef else ()
        correction = ("old_logprob_T", "rollout_logprob_T") if self.correction is not None else ()
        return (*self.advantage.columns, *penalty, *correction)

    @property
    def value_loss(self) -> AnyLoss | None:
        """The loss of a critic. None: the advantage needs no values."""
        return None

    @property
    def actor_starts_after(self) -> int:
        """Steps in which a critic alone learns."""
        return 0


_NO_KEYS = ("kind", "corrected")  # of a loss: no spec writes them


def placed(table: T, spec_dir: Path) -> T:
    """Return an advantage or a loss with the path of its function made absolute."""
    path = getattr(table, "path", None)
    return table if path is None else table.model_copy(update={"path": str(spec_dir / Path(path).expanduser())})


def _filled(table: type[T], keys: Table, **more: Any) -> T:
    """Return `table` with the values that `keys` has under the same names, or `more`."""
    shared = (table.model_fields.keys() & type(keys).model_fields.keys()) - {"kind"}
    return table(**{**{name: getattr(keys, name) for name in shared}, **more})


def preset(
    kind: str,
    about: str,
    advantage: type[Advantage],
    loss: type[Loss],
    base: type[Algorithm] = Algorithm,
    **defaults: Any,
) -> type[Algorithm]:
    """Return the table of an `algorithm.kind`: the keys of `base`, of an advantage and of a loss, side by side, with
    `defaults` of its own."""
    fields = dict(base.model_fields)
    for name, field in (*advantage.model_fields.items(), *loss.model_fields.items()):
        if name not in fields and name not in _NO_KEYS:
            fields[name] = field
        elif name in fields and not field.is_required() and field.default != fields[name].default:
            defaults.setdefault(name, field.default)
    new = fields.keys() - base.model_fields.keys()
    keys: dict[str, Any] = {
        name: (Annotated[field.annotation, field], defaults.get(name, field.get_default()))
        for name, field in fields.items()
        if name in new or name in defaults
    }
    made = create_model(
        kind, __base__=base, __doc__=about, __module__=__name__, **{**keys, "kind": (Literal[kind], ...)}
    )
    made.advantage_table, made.loss_table, made.made_of = advantage, loss, (advantage, loss)
    return made

"""The algorithms: a table for each `kind` of `[algorithm]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from specs.table import Table


class Grpo(Table):
    """Group-relative policy optimisation (Shao et al. 2024), with the choices of DAPO and Dr.GRPO."""

    kind: Literal["grpo"]
    group_size: int = Field(ge=1, description="Answers to each prompt.")
    scale: Literal["std", "none"] = Field(
        "std", description="Divide advantages by the group's standard deviation, or not (Dr.GRPO, Liu et al. 2025)."
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="Probability ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(0.2, gt=0, description="Probability ratio is clipped above at 1 + clip_high.")
    dual_clip: float | None = Field(
        None, gt=1, description="Bound on the loss where the advantage is negative (3.0 is usual); unset: none."
    )
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum-constant"] = Field(
        "token-mean", description="How token losses become one number, over the whole mini-batch of all ranks."
    )
    kl_coef: float = Field(0.0, ge=0, description="Weight of KL(actor ‖ ref) in the loss. 0: no reference is loaded.")
    kl_estimator: Literal["k2", "k3", "k3-straight-through"] = Field(
        "k3",
        description="Estimator of the KL (Schulman 2020). k1 is absent: as a loss its gradient is zero in expectation. "
        "`k3-straight-through` has the value of k3 and the gradient of k2.",
    )
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus.")
    mini_batches_per_step: int = Field(
        1, ge=1, description="Optimizer steps that one pass over the step's samples makes."
    )
    epochs_per_step: int = Field(1, ge=1, description="Passes over the step's samples.")

    @property
    def on_policy(self) -> bool:
        """One update per step: the sampled tokens' old log-probs are the current ones."""
        return self.mini_batches_per_step == 1 and self.epochs_per_step == 1


AlgorithmTable = Grpo  # a discriminated union by `kind` as soon as there is a second one

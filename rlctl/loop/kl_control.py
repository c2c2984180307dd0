"""The KL between actor and reference as the driver sees it: its estimate at each sampled token, the penalty in the
reward, and the controller of its weight β."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.loop.rollouts import Rollouts
from specs.errors import CheckpointError
from specs.schema.algorithms.algorithm import Algorithm, AnyLoss, KlEstimator, Loss
from specs.schema.metric import Metric
from specs.wire.batch import Batch

MAX_LOG_RATIO, MAX_KL, MAX_ERROR = 20.0, 10.0, 0.2
STATE = "kl_coef"  # of a checkpoint's driver state


def token_kl(estimator: KlEstimator, logprob_T: NDArray[Any], ref_logprob_T: NDArray[Any]) -> NDArray[np.float64]:
    """Estimate of KL(actor ‖ ref) at each token that the actor sampled, from d = ref - logprob (Schulman 2020).

    k1: -d. k2: d²/2. k3: exp(d) - d - 1, with d clamped to ±20 in the exponential and the whole to ±10. A
    straight-through estimator has the value of its own.
    """
    d_T: NDArray[np.float64] = np.asarray(ref_logprob_T, dtype=np.float64) - logprob_T
    name = estimator.partition("-")[0]
    if name == "k1":
        return np.asarray(-d_T)
    if name == "k2":
        return np.asarray(0.5 * d_T**2)
    exp_T = np.exp(np.clip(d_T, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return np.asarray(np.clip(exp_T - d_T - 1.0, -MAX_KL, MAX_KL))


METRICS: tuple[Metric, ...] = (
    Metric(
        name="actor/kl_coef",
        meaning="Weight of the KL in this step, in the loss or in the reward; `algorithm.kl_target` moves it.",
        when="`algorithm.kl_coef` is not 0",
    ),
    Metric(
        name="reward/kl_penalty",
        meaning="What the KL takes off a completion's score: weight times its sum over the tokens, on average.",
        when='`algorithm.kl_in` is "reward" and its weight not 0',
    ),
)


class KlController:
    """β of a run: fixed, or with `kl_target` steered after each step by the KL that was measured in it:
    β ·= 1 + clip(KL / target - 1, ±0.2) · rollouts / horizon (Ziegler et al. 2019, §2.2, whose KL is of a whole
    completion; here it is the mean over loss tokens, as `actor/kl`)."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.coef = algorithm.kl_coef
        self._measured: dict[str, float] = {}

    def penalty_T(self, batch: Batch) -> NDArray[np.float64] | None:
        """β · KL at each loss token, 0 elsewhere; None where the KL is not in the reward. Measures the KL where the
        loss does not: of a penalty, or by k1 the distance to a teacher."""
        penalty = self.algorithm.kl_in == "reward" and self.algorithm.kl_coef > 0
        if not penalty and (self.algorithm.kl_coef > 0 or not self.algorithm.advantage.needs_teacher):
            return None
        mask_T = batch["loss_mask_T"] > 0
        estimator = self.algorithm.kl_estimator if penalty else "k1"
        kl_T = np.where(mask_T, token_kl(estimator, batch["old_logprob_T"], batch["ref_logprob_T"]), 0.0)
        self._measured = {"actor/kl": float(kl_T.sum() / max(int(mask_T.sum()), 1))}
        if not penalty:
            return None
        rollouts = len(Rollouts.of(batch["rollout_B"]).first_R)
        self._measured["reward/kl_penalty"] = float(self.coef * kl_T.sum() / max(rollouts, 1))
        return self.coef * kl_T

    def in_loss(self, loss: AnyLoss) -> AnyLoss:
        """The loss with the weight of now; one without a KL as it is."""
        has_kl = isinstance(loss, Loss) and loss.kl_coef > 0
        return loss.model_copy(update={"kl_coef": self.coef}) if has_kl else loss

    def after_step(self, metrics: Mapping[str, Any], rollouts: int, *, learned: bool = True) -> dict[str, float]:
        """Steer by the step's KL, if the actor `learned` in it; what it adds to the metrics, with the weight that
        the step had."""
        if not self.coef:
            return dict(self._measured)
        found = {**self._measured, "actor/kl_coef": self.coef}
        target = self.algorithm.kl_target
        if target is not None and learned:
            error = float(np.clip(found.get("actor/kl", metrics["actor/kl"]) / target - 1.0, -MAX_ERROR, MAX_ERROR))
            self.coef *= 1.0 + error * rollouts / self.algorithm.kl_horizon
        return found

    def save(self) -> dict[str, float]:
        """Return the state that a checkpoint keeps."""
        return {} if self.algorithm.kl_target is None else {STATE: self.coef}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `save` returned. Raises CheckpointError where it is not there."""
        if self.algorithm.kl_target is not None:
            try:
                self.coef = float(state[STATE])
            except (KeyError, TypeError, ValueError):
                raise CheckpointError(
                    f"the checkpoint's driver state has no {STATE}, which algorithm.kl_target steers",
                    hint="it was written without algorithm.kl_target: start a new run with --run-dir",
                ) from None

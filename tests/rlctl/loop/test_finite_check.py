"""A NaN or an infinity in what a step learns from ends it before anything is learned, and names the sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from local_group import LocalGroup
from told_actor import rl_driver

from rlctl.loop.finite_check import check_batch
from specs.errors import NotFiniteError
from specs.wire.batch import Batch
from specs.wire.messages import Verb

IDS = [40, 41, 42]


def batch_of(**columns: np.ndarray) -> Batch:
    """Three samples of a prompt token and three loss tokens, of which a tool wrote the middle one."""
    zeros_T = np.zeros(12, np.float32)
    return Batch(
        {
            "tokens_T": np.arange(12),
            "loss_mask_T": np.tile([0, 1, 0, 1], 3).astype(np.uint8),
            "length_B": np.array([4, 4, 4]),
            **{name: np.array(IDS) for name in ("id_B", "rollout_B", "group_B")},
            **{name: zeros_T for name in ("rollout_logprob_T", "old_logprob_T", "ref_logprob_T", "advantage_T")},
            **columns,
        }
    )


def spoiled(value: float, *tokens: int) -> np.ndarray:
    column_T = np.zeros(12, np.float32)
    column_T[list(tokens)] = value
    return column_T


@pytest.mark.parametrize(
    ("column", "whose"),
    [
        ("rollout_logprob_T", "the rollout's log-prob"),
        ("old_logprob_T", "the actor's log-prob"),
        ("ref_logprob_T", "the reference's log-prob"),
        ("advantage_T", "the advantage"),
    ],
)
def test_a_column_names_its_first_sample(column: str, whose: str) -> None:
    for value in (np.nan, np.inf, -np.inf):
        with pytest.raises(NotFiniteError) as caught:
            check_batch(batch_of(**{column: spoiled(value, 7, 11)}), np.zeros(3, np.float32), 5)
        said = f"step 5: {whose} of sample id 41 is {value} at loss token 1 (so it is in 2 samples)."
        assert caught.value.message.startswith(said)


def test_what_is_not_learned_from_may_be_anything() -> None:
    check_batch(batch_of(advantage_T=spoiled(np.nan, 0, 2, 4)), np.zeros(3, np.float32), 5)


def test_a_score_names_its_sample() -> None:
    with pytest.raises(NotFiniteError, match="step 2: the score of sample id 42 is inf"):
        check_batch(batch_of(), np.array([0, 1, np.inf], np.float32), 2)


@pytest.mark.parametrize("ratio", [np.nan, 9.0])
def test_a_loss_that_is_not_a_number_stops_before_the_optimizer_step(tmp_path: Path, ratio: float) -> None:
    """The actor is asked for its log-probs, which say whose tokens it was."""

    def update(call, emit):
        return {"sums": {"tokens": 6.0, "loss": float("nan"), "logprob_gap": 0.0, "logprob_gap_max": 0.0}}, {}

    def logprobs(call, emit):
        return {}, {"logprob_T": spoiled(ratio, 9)}

    actor = LocalGroup("actor", [{Verb.UPDATE: update, Verb.LOGPROBS: logprobs}])  # no STEP: it would raise
    driver = rl_driver(tmp_path, {"actor": actor})
    with pytest.raises(NotFiniteError, match=r"step 3: loss is nan in the update\. Worst sample: id 42"):
        driver.update(batch_of(), 3)
    assert actor.verbs == [Verb.UPDATE, Verb.LOGPROBS]
    assert not driver.window.is_open, "the last finished step can still be saved"

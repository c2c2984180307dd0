"""ReMax: a greedy completion of each prompt rides along; its score is the baseline, and it is not learned from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from local_run import local_run
from running import preset

from rlctl.loop.sampling import Drawn, Scored
from specs.wire.batch import Batch
from specs.wire.role_config import Sampling

REMAX = ("algorithm.kind=remax", "run.steps=6")
KEYS = ("reward/mean", "reward/greedy_mean", "rollout/greedy_tokens", "actor/loss", "actor/grad_norm")


def test_scores_of_greedy_completions_become_a_column() -> None:
    """Two groups of 2; the greedy completion of the second could not be graded, that of the first has two samples."""
    greedy_B = np.array([False, False, True, False, False, True, True])
    ids_B, length_B = np.arange(7), np.array([1, 2, 2, 1, 1, 2, 1])
    rollout_B, group_B = np.array([0, 1, 2, 3, 4, 5, 2]), np.array([0, 0, 0, 1, 1, 1, 0])
    columns = {"length_B": length_B, "group_B": group_B, "rollout_B": rollout_B, "id_B": ids_B}
    batch = Batch({**columns, "loss_mask_T": np.array([1, 0, 1, 0, 1, 1, 1, 0, 1, 1], np.uint8)})
    reward_B, scored_B = np.array([0, 1, 2, 3, 4, 5, 2], np.float32), np.array([1, 1, 1, 1, 1, 0, 1], dtype=bool)
    drawn = Drawn(batch, Scored(reward_B, scored_B, {}, [])).with_baseline(greedy_B)
    assert drawn.batch["id_B"].tolist() == [0, 1, 3, 4]
    assert drawn.batch["baseline_B"].tolist() == [2.0, 2.0, 5.0, 5.0], "the fallback is the fallback"
    assert drawn.scored.reward_B.tolist() == [0.0, 1.0, 3.0, 4.0]
    assert drawn.scored.scored_B.tolist() == [True, True, False, False], "nothing to compare with"
    assert drawn.scored.greedy is not None
    assert drawn.scored.greedy.metrics() == {
        "reward/greedy_mean": 2.0,
        "rollout/greedy_samples": 2,
        "rollout/greedy_tokens": 3,
    }


def test_means_of_terms_are_of_the_completions_that_the_mean_reward_is_of() -> None:
    """The second of three groups is too old, and goes; so does its part of each term."""
    columns = {name: np.arange(6) for name in ("rollout_B", "id_B")} | {"version_B": np.array([4, 4, 4, 1, 4, 4])}
    batch = Batch({**columns, "group_B": np.repeat([0, 1, 2], 2), "length_B": np.ones(6, np.int64)})
    term_B = {"term_0_B": np.array([1, 0, 9, 9, 1, 9], np.float32), "term_1_B": np.full(6, -1, np.float32)}
    graded_B = np.array([1, 1, 1, 1, 1, 0], dtype=bool)
    reward_B = (term_B["term_0_B"] + 0.5 * term_B["term_1_B"]) * graded_B
    left = Drawn(batch, Scored(reward_B, graded_B, {}, [], term_B=term_B)).fresh(4, 1)
    rollout_B = left.batch["rollout_B"]
    assert left.scored.mean_terms(rollout_B) == {"term_0": pytest.approx(2 / 3), "term_1": -1.0}
    assert left.scored.by_rollout(rollout_B).mean() == pytest.approx(2 / 3 - 0.5)


@pytest.mark.parametrize("size", [1, 4])
def test_a_step_compares_with_what_a_greedy_call_writes(tmp_path: Path, size: int) -> None:
    with local_run(preset("fake", tmp_path), tmp_path / "run", *REMAX, f"algorithm.group_size={size}") as run:
        driver = run.driver
        driver.begin(0)
        prompts = driver.queue.prompts_of(driver.queue.ask(8, 1).result()[0])
        alone = prompts.select(np.flatnonzero(prompts.batch["greedy_B"]))
        plain = {name: column for name, column in alone.batch.columns.items() if name != "greedy_B"}
        once = Sampling(seed=run.spec.run.seed, greedy=True, max_response_tokens=run.spec.data.max_response_tokens)
        greedy = driver.sampler.start(type(alone)(Batch(plain), alone.rows), once, 1, "train").finish()
        drawn = driver.queue.take(1)
        assert len(drawn.batch) == 8 * size
        assert drawn.batch["baseline_B"].tolist() == np.repeat(greedy.scored.reward_B, size).tolist()
        learned = driver.add_advantages(drawn.batch, drawn.scored)
        want_B = drawn.scored.reward_B - drawn.batch["baseline_B"]
        for want, got_T, mask_T in zip(
            want_B, learned.sequences("advantage_T"), learned.sequences("loss_mask_T"), strict=True
        ):
            np.testing.assert_allclose(got_T, want * mask_T, atol=1e-6)
        assert want_B.any()


def test_replicas_and_a_resume_change_nothing(tmp_path: Path) -> None:
    file, options = preset("fake", tmp_path), (*REMAX, "rollout.max_staleness=1")

    def trajectory(records) -> list[list[object]]:
        return [[*(record.metrics[key] for key in KEYS), record.samples] for record in records]

    with local_run(file, tmp_path / "whole", *options) as run:
        whole = trajectory(run.steps(4))
    with local_run(file, tmp_path / "cut", *options, "rollout.processes=3") as run:
        first = trajectory(run.steps(2, save=[2]))
    with local_run(file, tmp_path / "cut", *options, "rollout.processes=3", resume=True) as run:
        assert [*first, *trajectory(run.steps(4))] == whole
    assert whole[0][2] > 0
    assert [len(samples) for *_, samples in whole] == [4] * 4

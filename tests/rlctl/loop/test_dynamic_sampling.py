"""Groups whose scores are all equal are thrown away and drawn anew: by themselves, and in whole runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from local_run import local_run
from running import preset

from rlctl.loop.dynamic_sampling import missing_groups, signal_of, with_signal
from rlctl.loop.sample_queue import SampleQueue
from rlctl.loop.sampling import Drawn, Generation, Scored
from specs.wire.batch import Batch

# A group of 4 has a 7 in some completions and not in others about half the time.
SOME = (
    "algorithm.kind=dapo",
    "algorithm.max_refills=12",
    'reward.terms=[{kind="regex", pattern="7"}]',
    "data.max_response_tokens=2",
)
NONE = ("algorithm.kind=dapo", 'reward.terms=[{kind="regex", pattern="x"}]')
KEYS = ("reward/mean", "reward/silent_groups", "rollout/refills", "rollout/thrown_groups", "actor/loss")


def drawn_of(groups: list[list[float | None]]) -> Drawn:
    """Groups of scores; None: not graded."""
    reward_B = np.array([score or 0.0 for group in groups for score in group], dtype=np.float32)
    scored_B = np.array([score is not None for group in groups for score in group])
    group_B = np.repeat(np.arange(len(groups)) + 10, [len(group) for group in groups])
    ids_B, ones = np.arange(len(reward_B)), np.ones(len(reward_B), dtype=np.int64)
    batch = Batch({"tokens_T": ids_B, "length_B": ones, "group_B": group_B, "rollout_B": ids_B, "id_B": ids_B})
    term_B = {"term_0_B": 2 * reward_B}
    return Drawn(batch, Scored(reward_B, scored_B, {}, [], term_B=term_B))


DRAWN = drawn_of([[0, 0], [0, 1], [1, 1], [None, 1], [None, None], [2, 1]])


def test_a_group_has_signal_when_scores_that_count_differ() -> None:
    batch = DRAWN.batch
    signal_B = signal_of(batch["group_B"], batch["rollout_B"], DRAWN.scored)
    assert np.unique(batch["group_B"][signal_B]).tolist() == [11, 15]
    assert (missing_groups(DRAWN, 5), missing_groups(DRAWN, 2), missing_groups(DRAWN, 1)) == (3, 0, 0)
    of_one_rollout = np.repeat(batch["rollout_B"][::2], 2)
    assert not signal_of(batch["group_B"], of_one_rollout, DRAWN.scored).any(), "samples of a rollout share its score"


@pytest.mark.parametrize(("least", "kept"), [(0, [11, 15]), (2, [11, 15]), (4, [10, 11, 12, 15])])
def test_groups_without_signal_go_as_far_as_every_mini_batch_has_a_rollout(least: int, kept: list[int]) -> None:
    left = with_signal(DRAWN, least, 3)
    thrown = left.scored.thrown
    assert thrown is not None
    assert np.unique(left.batch["group_B"]).tolist() == kept
    assert left.scored.reward_B.tolist() == [DRAWN.scored.reward_B[i] for i in left.batch["id_B"].tolist()]
    assert (thrown.refills, thrown.groups, thrown.signal) == (3, 6 - len(kept), 2)
    gone = set(range(12)) - set(left.batch["id_B"].tolist())
    assert sorted(thrown.reward_R) == sorted(DRAWN.scored.reward_B[i] for i in gone if DRAWN.scored.scored_B[i])
    assert sorted(left.scored.by_rollout(left.batch["rollout_B"])) == [0, 0, 0, 1, 1, 1, 1, 1, 2], "all graded ones"
    assert left.scored.mean_terms(left.batch["rollout_B"]) == {"term_0": pytest.approx(2 * 7 / 9)}, "of the same"


def test_scores_are_those_of_what_was_thrown_away_where_nothing_else_was_graded() -> None:
    left = with_signal(drawn_of([[None, None], [1, 1]]), 1, 0)
    assert left.batch["group_B"].tolist() == [10, 10]
    assert left.scored.by_rollout(left.batch["rollout_B"]).tolist() == [1, 1]


def test_a_step_learns_from_groups_with_signal_alone(tmp_path: Path) -> None:
    with local_run(preset("fake", tmp_path), tmp_path / "run", *SOME) as run:
        run.driver.begin(0)
        drawn = run.driver.queue.take(1)
        group_B = drawn.batch["group_B"]
        assert signal_of(group_B, drawn.batch["rollout_B"], drawn.scored).all()
        thrown = drawn.scored.thrown
        assert thrown is not None
        assert thrown.refills > 0
        assert len(np.unique(group_B)) == 8, "as many as there are prompts in a step"
        assert run.driver.queue.position == 8 + thrown.groups, "a prompt for each that was thrown away"
        assert (np.diff(drawn.batch["id_B"]) > 0).all()
        assert len(thrown.reward_R) == 4 * thrown.groups


def test_a_run_without_any_signal_goes_on_and_says_so_once(tmp_path: Path) -> None:
    more = ("algorithm.mini_batches_per_step=4", "algorithm.max_refills=2")
    with local_run(preset("fake", tmp_path), tmp_path / "run", *NONE, *more) as run:
        actor = run.spec.actor.model_copy(update={"processes": 4})  # which changes nothing of what is learned from
        run.driver.queue.spec = run.spec.model_copy(update={"actor": actor})
        records = run.steps(2)
    for record in records:
        assert record.metrics["rollout/refills"] == 2
        assert record.metrics["rollout/thrown_groups"] == 3 * 8 - 1, "one group of 4 is left, for 4 mini-batches"
        assert record.metrics["reward/silent_groups"] == 1.0
        assert record.metrics["actor/loss"] == 0.0
    assert [line for line in run.said.warnings if "nothing to learn" in line] == [
        "step 1: in every group all scores are equal, after 2 refills too: nothing to learn. Said once; "
        "reward/silent_groups counts on"
    ]


def trajectory(records) -> list[list[float]]:
    return [[record.metrics[key] for key in KEYS] for record in records]


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path, ahead: int) -> None:
    """Refills of batches in line move the cursor that later batches are drawn from."""
    cut, options = 3, (*SOME, "run.steps=7", f"rollout.max_staleness={ahead}")
    file = preset("fake", tmp_path)
    with local_run(file, tmp_path / "whole", *options) as run:
        whole, end = trajectory(run.steps(7)), run.driver.queue.position
    with local_run(file, tmp_path / "cut", *options) as run:
        first = trajectory(run.steps(cut, save=[cut]))
    with local_run(file, tmp_path / "cut", *options, resume=True) as run:
        rest = trajectory(run.steps(7))
        assert run.driver.queue.position == end
    assert [*first, *rest] == whole
    assert any(step[2] for step in rest), "refilled after the resume"


@pytest.mark.parametrize("broken", [2, 3])
def test_a_refill_that_is_broken_off_goes_on_in_the_checkpoint_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    """As at a Ctrl-C, which keeps the batches in line."""
    file, options = preset("fake", tmp_path), (*SOME, "rollout.max_staleness=2")
    with local_run(file, tmp_path / "whole", *options) as run:
        whole = trajectory(run.steps(4))

    with local_run(file, tmp_path / "cut", *options) as run:
        run.steps(1)
        run.break_off(monkeypatch, Generation, "finish", broken)
    with local_run(file, tmp_path / "cut", *options, resume=True) as run:
        assert trajectory(run.steps(4)) == whole[1:]


@pytest.mark.parametrize("shorter", [0, 1])
def test_no_prompt_comes_twice_when_a_resume_leaves_batches_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shorter: int
) -> None:
    """The refills of a batch that stays lie behind the batches that are left out."""
    file, ids, take = preset("fake", tmp_path), list[int](), SampleQueue.take

    def watched(queue: SampleQueue, step: int) -> Drawn:
        drawn = take(queue, step)
        ids.extend(drawn.batch["id_B"].tolist())
        return drawn

    monkeypatch.setattr(SampleQueue, "take", watched)
    options = (*SOME, "run.steps=7")
    with local_run(file, tmp_path / "run", *options, "rollout.max_staleness=3") as run:
        run.steps(1, save=[1])
    with local_run(file, tmp_path / "run", *options, f"rollout.max_staleness={shorter}", resume=True) as run:
        run.steps(7)
    assert len(ids) == len(set(ids))

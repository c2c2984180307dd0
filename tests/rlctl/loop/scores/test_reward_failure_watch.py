"""Answers that could not be graded: what is said of them, and what they leave of the terms' means."""

from __future__ import annotations

import numpy as np
import pytest
from local_run import local_run
from running import preset

from rlctl.loop.sampling import Scored
from rlctl.loop.scores.reward_failure_watch import RewardFailureWatch
from specs.errors import GradingError

TERM = 'reward.terms=[{kind="function", path="rewards.py:score"}]'


def scored(failures, completions=8, first="ValueError: four (rows.jsonl:3)"):
    nothing = np.zeros(0)
    return Scored(nothing, nothing, failures, [], completions=completions, first_failure=first)


def said_of(*steps, max_failed_share=1.0):
    said = []
    watch = RewardFailureWatch(max_failed_share, said.append)
    for number, failures in enumerate(steps, start=1):
        watch.see(scored(failures), f"step {number}")
    return [line.partition(":")[0] for line in said], said


def test_the_first_and_the_first_that_loses_most_are_told():
    steps, said = said_of({"timeouts": 0}, {"timeouts": 1, "bad_values": 1}, {"timeouts": 4}, {"timeouts": 5}, {"x": 8})
    assert steps == ["step 2", "step 4"]
    assert (
        "2 of 8 completions could not be graded (1 timeouts, 1 bad values): ValueError: four (rows.jsonl:3)" in said[0]
    )
    assert said_of({"exceptions": 8}, {"exceptions": 8}, {"timeouts": 1})[0] == ["step 1"]
    assert said_of({}, {"crashes": 0})[0] == []


def test_a_step_that_loses_more_than_its_share_ends_the_run():
    assert said_of({"exceptions": 6}, max_failed_share=0.75)[0] == ["step 1"]
    with pytest.raises(GradingError, match=r"7 of 8 .* more than reward.max_failed_share = 75%: ValueError: four"):
        said_of({"exceptions": 7}, max_failed_share=0.75)
    with pytest.raises(GradingError):
        said_of({"judge_errors": 1}, max_failed_share=0.0)


def test_a_broken_reward_is_told_in_the_run(tmp_path):
    (tmp_path / "rewards.py").write_text(
        "def score(prompt, completion, row):\n    return 1.0 if len(completion) > 4 else oops\n"
    )
    with local_run(preset("fake", tmp_path), tmp_path / "run", TERM) as run:
        first = run.steps(1)[0].metrics
    assert 0 < first["reward/failed_exceptions"] < 32
    said = "\n".join(run.said.warnings)
    assert f"step 1: {first['reward/failed_exceptions']} of 32 completions could not be graded" in said
    assert (first["reward/mean"], first["reward/term_0"]) == (1.0, 1.0)
    assert first["reward/silent_groups"] == 1.0, "what was graded scores the same everywhere"
    assert 0 < first["reward/lone_groups"] <= 8
    assert f"groups with fewer than 2 completions that could be graded: {first['reward/lone_groups']}." in said
    assert "name 'oops' is not defined" in (tmp_path / "run" / "reward_failures.jsonl").read_text()


def test_a_reward_that_always_raises_ends_the_run_before_it_learns(tmp_path):
    (tmp_path / "rewards.py").write_text("def score(prompt, completion, row):\n    return row['answr'] in completion\n")
    with local_run(preset("fake", tmp_path), tmp_path / "run", TERM) as run:
        with pytest.raises(GradingError, match=r"step 1: 32 of 32 completions could not be graded \(32 exc") as caught:
            run.steps(1)
        assert not run.driver.window.is_open
    assert "KeyError: 'answr' (builtin:sort-digits row " in caught.value.message

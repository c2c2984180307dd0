"""What is said of scores that teach nothing, and of completions that never end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from corpus import base

from rlctl.loop.sampling import Scored, Thrown
from rlctl.loop.scores.signal_watch import SignalWatch
from specs.load.load import spec_from
from specs.schema.environment import STOP_REASONS

GRADED = Scored(np.zeros(8, np.float32), np.ones(8, bool), {}, [], completions=8)
USUAL = {
    "rollout/finished": 0.9,
    "rollout/repeated": 0.5,
    "reward/mean": 0.4,
    "reward/std": 0.3,
    "reward/silent_groups": 0.5,
}


def said_of(*steps: dict, scored: Scored = GRADED, **sections: dict) -> list[str]:
    raw = base()
    for name, keys in sections.items():
        raw.setdefault(name, {}).update(keys)
    said: list[str] = []
    watch = SignalWatch(spec_from(raw), said.append)
    for number, metrics in enumerate(steps, start=1):
        watch.see({**USUAL, **metrics}, scored, number)
    return said


def test_equal_scores_are_told_once_at_the_first_step() -> None:
    (line,) = said_of({"reward/std": 0.0, "reward/mean": 0.0, "reward/silent_groups": 1.0}, {"reward/std": 0.0})
    assert line.startswith("step 1: all completions score 0, which tells none from another")
    assert said_of({}, {"reward/std": 0.0}) == []


def test_silent_groups_are_told_where_groups_are_compared() -> None:
    (line,) = said_of({"reward/silent_groups": 1.0})
    assert "in every group all completions score the same" in line
    assert said_of({"reward/silent_groups": 1.0}, algorithm={"kind": "reinforce++"}) == []
    some, none = (replace(GRADED, thrown=Thrown(1, 4, signal, [])) for signal in (1, 0))
    assert said_of({"reward/silent_groups": 1.0}, scored=some) == []
    (line,) = said_of({"reward/silent_groups": 1.0}, {}, scored=none)
    assert line.startswith(
        "step 1: in every group all scores are equal, after 1 refills too: nothing to learn. Said once"
    )


def test_a_term_that_never_scores_is_named_unless_zero_is_its_best() -> None:
    terms = [{"kind": "exact_match"}, {"kind": "regex", "pattern": "x"}, {"kind": "overlong", "buffer_tokens": 2}]
    (line,) = said_of({}, scored=replace(GRADED, zero_terms=(1, 2)), reward={"terms": terms})
    assert line == "step 1: reward.terms.1 (regex) gives every completion 0"


def test_a_collapsed_run_is_named_while_it_lasts() -> None:
    """After 10 steps in a row, 20 and 40; one step that teaches begins the count anew, without saying it again."""
    silent, teaches = {"reward/silent_groups": 0.95}, {"reward/silent_groups": 0.5}
    (_,) = said_of(*[*[silent] * 12, teaches] * 5)
    said = said_of(teaches, *[silent] * 9, teaches, *[silent] * 45)
    assert [line.partition(":")[0] for line in said] == ["step 21", "step 31", "step 51"]
    assert "for 10 steps in a row all completions score the same in 90% of the groups or more" in said[0]
    assert said_of(*[silent] * 12, algorithm={"kind": "reinforce++"}) == []


@pytest.mark.parametrize(("finished", "told"), [(0.1, 0), (0.0999, 1), (0.0, 1)])
def test_completions_that_never_end_are_told_once_at_any_step(finished: float, told: int) -> None:
    said = said_of({}, {"rollout/finished": finished}, {"rollout/finished": finished})
    assert len(said) == told
    if said:
        assert said[0].startswith("step 2: ")
        assert f"data.max_response_tokens = {base()['data']['max_response_tokens']}" in said[0]


def test_episodes_that_a_limit_ends_are_told_by_that_limit() -> None:
    """Not all are truncated at `data.max_response_tokens`."""
    stops = {f"episode/stop_{reason}": 0.0 for reason in STOP_REASONS} | {"episode/stop_max_turns": 0.75}
    few = {"rollout/finished": 0.05, "episode/stop_completed": 0.05, "episode/stop_context_overflow": 0.2}
    (line,) = said_of(stops | few, environment={"path": "talk.py:Talk"})
    assert "5.0% of the episodes end by themselves; max_turns 75%, context_overflow 20%." in line


def test_what_was_left_out_is_told_once_with_the_metric_that_counts_on() -> None:
    step = {"actor/skipped_updates": 2, "correction/not_finite": 3}
    assert said_of({"actor/skipped_updates": 0}, step, step) == [
        "step 2: 2 optimizer steps of the actor left out: the gradient was not finite. Said once; "
        "actor/skipped_updates counts on",
        "step 2: 3 tokens left out: the actor's log-prob is not finite. Said once; correction/not_finite counts on",
    ]

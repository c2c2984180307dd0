"""The table of rank states: what each report leads to in each state, and how restarts are counted."""

from __future__ import annotations

import pytest

from rlctl.processes.failures import Evidence
from rlctl.processes.launch import Place
from rlctl.processes.rank_states import RankState, RankStates, RestartPolicy
from specs.errors import Cause

S = RankState
RANK: Place = ("rollout", 1)
ENDED = Evidence(*RANK, Cause.ENDED, "it ended")


def ranks_in(state: RankState) -> RankStates:
    """Two ranks; the second is in this state, and the first runs unless both start."""
    ranks = RankStates()
    ranks.started("rollout", 2)
    ranks._states = {("rollout", 0): S.STARTING if state is S.STARTING else S.RUNNING, RANK: state}
    if state is S.FAILING:
        ranks._failing[RANK] = ENDED, 0.0
    return ranks


def ranks_that_run(policy: RestartPolicy | None = None) -> RankStates:
    ranks = ranks_in(S.RUNNING)
    ranks.allow_restarts(policy or RestartPolicy("rollout", 3))
    return ranks


REPORTS = {
    "joined": lambda ranks: ranks.joined(RANK),
    "ended": lambda ranks: ranks.fail(ENDED),
    "silent": lambda ranks: ranks.fail(Evidence(*RANK, Cause.SILENT, "")),
    "engine died": lambda ranks: ranks.fail(Evidence(*RANK, Cause.ENGINE_DIED, "")),
    "stalled": lambda ranks: ranks.fail(Evidence(*RANK, Cause.STALLED, "")),
    "raised": lambda ranks: ranks.fail(Evidence(*RANK, Cause.RAISED, "")),
    "not built": lambda ranks: ranks.fail(Evidence(*RANK, Cause.RAISED, ""), unbuilt=True),
    "grace over": lambda ranks: ranks.newly_failed(),
}
# Where a report moves the rank, with two restarts left. Everywhere else it stays where it is.
MOVES = {
    (S.STARTING, "joined"): S.RUNNING,
    (S.STARTING, "ended"): S.FATAL,  # it would end at once again
    (S.STARTING, "silent"): S.FATAL,
    (S.RUNNING, "ended"): S.FAILING,
    (S.RUNNING, "silent"): S.FAILING,
    (S.RUNNING, "engine died"): S.FAILING,
    (S.RUNNING, "stalled"): S.FAILING,
    (S.FAILING, "grace over"): S.FAILED,
    (S.RESTARTING, "ended"): S.FAILING,
    (S.RESTARTING, "silent"): S.FAILING,
    (S.RESTARTING, "engine died"): S.FAILING,
    (S.RESTARTING, "stalled"): S.FAILING,
    **{
        (state, failure): S.FAILING
        for state in (S.LATE, S.JOINING)
        for failure in ("ended", "silent", "engine died", "stalled", "not built")
    },
}


@pytest.mark.parametrize("report", REPORTS)
def test_what_a_report_leads_to(report: str) -> None:
    for state in S:
        ranks = ranks_in(state)
        ranks.allow_restarts(RestartPolicy("rollout", 3))
        REPORTS[report](ranks)
        assert ranks[RANK] is MOVES.get((state, report), state), state
        assert ranks["rollout", 0] is (S.STARTING if state is S.STARTING else S.RUNNING), "the other one is left alone"


@pytest.mark.parametrize(("before", "during"), [(S.FAILED, S.RESTARTING), (S.LATE, S.JOINING)])
def test_what_is_built_runs_then_or_is_as_before(before: RankState, during: RankState) -> None:
    ranks = ranks_in(before)
    with ranks.building("rollout", [1], during):
        assert ranks[RANK] is during
    assert (ranks[RANK], ranks.restarts["rollout"]) == (S.RUNNING, during is S.RESTARTING)
    ranks = ranks_in(before)
    with pytest.raises(KeyboardInterrupt), ranks.building("rollout", [1], during):
        raise KeyboardInterrupt
    assert (ranks[RANK], ranks.restarts["rollout"]) == (before, 0)
    ranks.allow_restarts(RestartPolicy("rollout", 3))
    with ranks.building("rollout", [1], during):
        assert ranks.fail(ENDED)
    assert ranks[RANK] is S.FAILING, "it has failed meanwhile"


def test_a_run_begins_without_some_as_long_as_enough_come() -> None:
    ranks = RankStates()
    ranks.started("rollout", 4)
    assert not ranks.let_be_late(RANK), "nothing allows it"
    ranks.allow_restarts(RestartPolicy("rollout", 0, least=2))
    for rank in (0, 3):
        ranks.joined(("rollout", rank))
    assert ranks.fail(ENDED), "it never took part: it is not started again, and left out"
    assert ranks.let_be_late(("rollout", 2))
    assert not ranks.let_be_late(("rollout", 3)), "two are needed"
    assert not ranks.fail(Evidence("rollout", 3, Cause.RAISED, ""), unbuilt=True)
    ranks.newly_failed()
    assert (ranks.dropped("rollout"), ranks.late("rollout"), ranks.absent("rollout")) == ([1], [2], [1, 2])
    with ranks.building("rollout", [2], S.JOINING):
        assert ranks.absent("rollout") == [1, 2], "not yet built"
    assert ranks.absent("rollout") == [1]
    assert ranks.fail(Evidence("rollout", 0, Cause.ENDED, "")), "now one may go"


@pytest.mark.parametrize(
    ("host_lost", "limit", "least", "after"),
    [
        (True, 3, 1, S.DROPPED),
        (False, 3, 1, S.FAILED),
        (True, 3, 2, S.FAILED),
        (True, 3, None, S.FAILED),
        (False, 0, 1, S.DROPPED),
        (False, 0, 2, S.FATAL),
    ],
)
def test_who_is_dropped(host_lost: bool, limit: int, least: int | None, after: RankState) -> None:
    ranks = ranks_that_run(RestartPolicy("rollout", limit, least=least))
    ranks.fail(Evidence(*RANK, Cause.ENDED, "", host_lost=host_lost))
    ranks.newly_failed()
    assert ranks[RANK] is after
    assert ranks.restarts_used("rollout") == (after is S.FAILED), "what is dropped is no restart"


@pytest.mark.parametrize("policy", [RestartPolicy(), RestartPolicy("actor", 3), RestartPolicy("rollout", 0)])
def test_a_rank_that_may_not_be_restarted_is_gone(policy: RestartPolicy) -> None:
    ranks = ranks_that_run(policy)
    assert not ranks.fail(Evidence(*RANK, Cause.ENGINE_DIED, ""))
    assert ranks[RANK] is S.RUNNING, "its process lives, and can close"
    assert not ranks.fail(ENDED)
    assert not ranks.fail(ENDED)
    assert (ranks[RANK], ranks.failed("rollout"), ranks.newly_failed()) == (S.FATAL, [], [])


def test_restarts_are_counted_and_run_out() -> None:
    ranks = ranks_that_run()
    ranks.fail(ENDED)
    assert ranks.newly_failed() == [ENDED]
    other = Evidence("rollout", 0, Cause.SILENT, "")
    assert ranks.fail(other, grace_s=60)
    assert (ranks.restarts_used("rollout"), ranks.restarts["rollout"], ranks.newly_failed()) == (2, 0, []), (
        "in its grace it counts already"
    )
    with pytest.raises(KeyboardInterrupt), ranks.building("rollout", [1], S.RESTARTING):
        raise KeyboardInterrupt
    assert (ranks.restarts_used("rollout"), ranks.restarts["rollout"], ranks.remark("rollout")) == (2, 0, "")
    with ranks.building("rollout", [1], S.RESTARTING):
        assert ranks.fail(ENDED), "lost again: the third of three"
    assert (ranks[RANK], ranks.restarts["rollout"]) == (S.FAILING, 1), "it was lost by itself, and that restart counts"
    ranks.newly_failed()
    with ranks.building("rollout", [1], S.RESTARTING):
        pass
    assert not ranks.fail(ENDED)
    assert ranks.remark("rollout") == " (rollout ranks were started again 2 times before; rollout.max_restarts = 3)"
    assert ranks.remark("actor") == ""


def test_a_rank_on_another_host_is_started_again_like_any_other() -> None:
    """Also where it was dropped with its host before."""
    ranks = ranks_that_run(RestartPolicy("rollout", 3, least=1))
    ranks.fail(Evidence(*RANK, Cause.ENDED, "", host_lost=True))
    ranks.newly_failed()
    assert ranks[RANK] is S.DROPPED
    ranks.await_host(RANK)
    with ranks.building("rollout", [1], S.JOINING):
        pass
    ranks.fail(ENDED)
    assert ranks.restarts_used("rollout") == 1
    ranks.newly_failed()
    assert ranks[RANK] is S.FAILED

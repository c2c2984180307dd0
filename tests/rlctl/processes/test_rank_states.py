"""The table of rank states: every pair of states, what each report leads to in each, and how restarts are counted."""

from __future__ import annotations

import itertools

import pytest

from rlctl.processes.failures import Evidence
from rlctl.processes.rank_states import TRANSITIONS, Place, RankState, RankStates, RestartPolicy
from specs.errors import Cause

S = RankState
LEGAL = {
    (S.STARTING, S.RUNNING), (S.STARTING, S.LATE), (S.STARTING, S.LEAVING), (S.STARTING, S.GONE),
    (S.RUNNING, S.LATE), (S.RUNNING, S.LEAVING), (S.RUNNING, S.GONE),
    (S.LATE, S.TAKEN_IN), (S.LATE, S.LEAVING),
    (S.TAKEN_IN, S.RUNNING), (S.TAKEN_IN, S.LATE), (S.TAKEN_IN, S.LEAVING),
    (S.LEAVING, S.LOST), (S.LEAVING, S.DROPPED),
    (S.LOST, S.RESTARTING),
    (S.RESTARTING, S.RUNNING), (S.RESTARTING, S.LATE), (S.RESTARTING, S.LEAVING), (S.RESTARTING, S.LOST),
    (S.RESTARTING, S.GONE),
}  # fmt: skip
RANK: Place = ("rollout", 1)
ENDED = Evidence(*RANK, Cause.ENDED, "it ended")


def start() -> RankStates:
    ranks = RankStates()
    ranks.started("rollout", 2)
    return ranks


def run() -> RankStates:
    ranks = start()
    for rank in range(2):
        ranks.joined(("rollout", rank))
    return ranks


def leave() -> RankStates:
    ranks = run()
    ranks.allow_restarts(RestartPolicy("rollout", 3))
    assert ranks.failed(ENDED)
    return ranks


def lose() -> RankStates:
    ranks = leave()
    assert ranks.newly_lost() == [ENDED]
    return ranks


def drop() -> RankStates:
    ranks = run()
    ranks.allow_restarts(RestartPolicy("rollout", 0, least=1))
    assert ranks.failed(ENDED)
    assert ranks.newly_lost() == [ENDED]
    return ranks


def restart() -> RankStates:
    ranks = lose()
    assert ranks.begin_restart("rollout") == [1]
    return ranks


def late() -> RankStates:
    ranks = start()
    ranks.joined(("rollout", 0))
    ranks.allow_restarts(RestartPolicy("rollout", 0, least=1))
    assert ranks.let_be_late(RANK)
    return ranks


def take_in() -> RankStates:
    ranks = late()
    ranks.begin_taking_in("rollout", [1])
    return ranks


def go() -> RankStates:
    ranks = run()
    assert not ranks.failed(ENDED)
    return ranks


WAYS = {
    **{S.STARTING: start, S.RUNNING: run, S.LEAVING: leave, S.LOST: lose},
    **{S.RESTARTING: restart, S.DROPPED: drop, S.GONE: go, S.LATE: late, S.TAKEN_IN: take_in},
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(S, S)))
def test_each_transition_is_legal_or_refused_by_name(before: RankState, after: RankState) -> None:
    ranks = WAYS[before]()
    assert ranks[RANK] is before
    assert (after in TRANSITIONS[before]) == ((before, after) in LEGAL)
    if (before, after) in LEGAL:
        ranks._move(RANK, after)
        assert ranks[RANK] is after
    else:
        with pytest.raises(AssertionError, match=f"rollout rank 1 cannot go from {before} to {after}"):
            ranks._move(RANK, after)
        assert ranks[RANK] is before


REPORTS = {
    "joined": lambda ranks: ranks.joined(RANK),
    "ended": lambda ranks: ranks.failed(ENDED),
    "silent": lambda ranks: ranks.failed(Evidence(*RANK, Cause.SILENT, "")),
    "engine died": lambda ranks: ranks.failed(Evidence(*RANK, Cause.ENGINE_DIED, "")),
    "stalled": lambda ranks: ranks.failed(Evidence(*RANK, Cause.STALLED, "")),
    "raised": lambda ranks: ranks.failed(Evidence(*RANK, Cause.RAISED, "")),
    "not built": lambda ranks: ranks.failed(Evidence(*RANK, Cause.RAISED, ""), unbuilt=True),
    "taken in": lambda ranks: ranks.begin_taking_in("rollout", ranks.late("rollout")),
    "built late": lambda ranks: ranks.end_taking_in("rollout", [1], finished=True),
    "taking in broken off": lambda ranks: ranks.end_taking_in("rollout", [1], finished=False),
    "grace over": lambda ranks: ranks.newly_lost(),
    "restart begins": lambda ranks: ranks.begin_restart("rollout"),
    "restart finished": lambda ranks: ranks.end_restart("rollout", [1], finished=True),
    "restart broken off": lambda ranks: ranks.end_restart("rollout", [1], finished=False),
}
# Where a report moves the rank, with two restarts left. Everywhere else it stays where it is.
MOVES = {
    (S.STARTING, "joined"): S.RUNNING,
    (S.STARTING, "ended"): S.GONE,  # it would end at once again
    (S.STARTING, "silent"): S.GONE,
    (S.RUNNING, "ended"): S.LEAVING,
    (S.RUNNING, "silent"): S.LEAVING,
    (S.RUNNING, "engine died"): S.LEAVING,
    (S.RUNNING, "stalled"): S.LEAVING,
    (S.LEAVING, "grace over"): S.LOST,
    (S.LOST, "restart begins"): S.RESTARTING,
    (S.RESTARTING, "ended"): S.LEAVING,
    (S.RESTARTING, "silent"): S.LEAVING,
    (S.RESTARTING, "engine died"): S.LEAVING,
    (S.RESTARTING, "stalled"): S.LEAVING,
    (S.RESTARTING, "restart finished"): S.RUNNING,
    (S.RESTARTING, "restart broken off"): S.LOST,
    **{
        (state, failure): S.LEAVING
        for state in (S.LATE, S.TAKEN_IN)
        for failure in ("ended", "silent", "engine died", "stalled", "not built")
    },
    (S.LATE, "taken in"): S.TAKEN_IN,
    (S.TAKEN_IN, "built late"): S.RUNNING,
    (S.TAKEN_IN, "taking in broken off"): S.LATE,
}


@pytest.mark.parametrize(("state", "report"), list(itertools.product(S, REPORTS)))
def test_what_a_report_leads_to(state: RankState, report: str) -> None:
    ranks = WAYS[state]()
    ranks.allow_restarts(RestartPolicy("rollout", 3))
    REPORTS[report](ranks)
    assert ranks[RANK] is MOVES.get((state, report), state)
    assert ranks["rollout", 0] is (S.STARTING if state is S.STARTING else S.RUNNING), "the other one is left alone"


def test_each_move_is_one_of_the_table() -> None:
    assert {(state, after) for (state, _), after in MOVES.items()} <= LEGAL
    without_restarts = {(S.RUNNING, S.GONE), (S.RESTARTING, S.GONE), (S.LEAVING, S.DROPPED)}
    with_fewer = {(state, S.LATE) for state in (S.STARTING, S.RUNNING, S.RESTARTING)} | {(S.STARTING, S.LEAVING)}
    assert {(state, after) for (state, _), after in MOVES.items()} | without_restarts | with_fewer == LEGAL


def test_a_run_begins_without_some_as_long_as_enough_come() -> None:
    ranks = RankStates()
    ranks.started("rollout", 4)
    assert not ranks.let_be_late(RANK), "nothing allows it"
    ranks.allow_restarts(RestartPolicy("rollout", 0, least=2))
    for rank in (0, 3):
        ranks.joined(("rollout", rank))
    assert ranks.failed(ENDED), "it never took part: it is not started again, and left out"
    assert ranks.let_be_late(("rollout", 2))
    assert not ranks.let_be_late(("rollout", 3)), "two are needed"
    assert not ranks.failed(Evidence("rollout", 3, Cause.RAISED, ""), unbuilt=True)
    ranks.newly_lost()
    assert (ranks.dropped("rollout"), ranks.late("rollout"), ranks.absent("rollout")) == ([1], [2], [1, 2])
    ranks.begin_taking_in("rollout", [2])
    assert ranks.absent("rollout") == [1, 2], "not yet built"
    ranks.end_taking_in("rollout", [2], finished=True)
    assert ranks.absent("rollout") == [1]
    assert ranks.failed(Evidence("rollout", 0, Cause.ENDED, "")), "now one may go"


@pytest.mark.parametrize(
    ("cause", "far", "limit", "least", "after"),
    [
        (Cause.SILENT, {1}, 3, 1, S.DROPPED),  # its host may be gone
        (Cause.SILENT, {0}, 3, 1, S.LOST),
        (Cause.SILENT, {1}, 3, 2, S.LOST),
        (Cause.SILENT, {1}, 3, None, S.LOST),
        (Cause.ENDED, {1}, 3, 1, S.LOST),
        (Cause.ENDED, {1}, 0, 1, S.DROPPED),
        (Cause.ENDED, {1}, 0, 2, S.GONE),
    ],
)
def test_who_is_dropped(cause: Cause, far: set[int], limit: int, least: int | None, after: RankState) -> None:
    ranks = run()
    ranks.allow_restarts(RestartPolicy("rollout", limit, least=least, far=frozenset(far)))
    ranks.failed(Evidence(*RANK, cause, ""))
    ranks.newly_lost()
    assert ranks[RANK] is after
    assert ranks.restarts_used("rollout") == (after is S.LOST), "what is dropped is no restart"


@pytest.mark.parametrize("message", ["Connection closed by peer", "timed out", "SamplerDied", "ok", ""])
@pytest.mark.parametrize("cause", Cause)
def test_the_cause_decides_what_may_be_restarted_and_no_wording_does(message: str, cause: Cause) -> None:
    ranks = run()
    ranks.allow_restarts(RestartPolicy("rollout", 1))
    expected = cause in (Cause.ENDED, Cause.SILENT, Cause.ENGINE_DIED, Cause.STALLED)
    assert ranks.failed(Evidence(*RANK, cause, message)) is expected


@pytest.mark.parametrize("policy", [RestartPolicy(), RestartPolicy("actor", 3), RestartPolicy("rollout", 0)])
def test_a_rank_that_may_not_be_restarted_is_gone(policy: RestartPolicy) -> None:
    ranks = run()
    ranks.allow_restarts(policy)
    assert not ranks.failed(Evidence(*RANK, Cause.ENGINE_DIED, ""))
    assert ranks[RANK] is S.RUNNING, "its process lives, and can be asked to leave"
    assert not ranks.failed(ENDED)
    assert not ranks.failed(ENDED)
    assert (ranks[RANK], ranks.lost("rollout"), ranks.newly_lost()) == (S.GONE, [], [])


def test_restarts_are_counted_and_run_out() -> None:
    ranks = lose()
    other = Evidence("rollout", 0, Cause.SILENT, "")
    assert ranks.failed(other, grace_s=60)
    assert (ranks.restarts_used("rollout"), ranks.restarts["rollout"], ranks.newly_lost()) == (2, 0, []), (
        "in its grace it counts already"
    )
    assert ranks.begin_restart("rollout") == [1]
    ranks.end_restart("rollout", [1], finished=False)
    assert (ranks.restarts_used("rollout"), ranks.restarts["rollout"], ranks.remark("rollout")) == (2, 0, "")
    ranks.begin_restart("rollout")
    assert ranks.failed(ENDED), "lost again: the third of three"
    ranks.end_restart("rollout", [1], finished=False)
    assert (ranks[RANK], ranks.restarts["rollout"]) == (S.LEAVING, 1), "it was lost by itself, and that restart counts"
    ranks.newly_lost()
    ranks.begin_restart("rollout")
    ranks.end_restart("rollout", [1], finished=True)
    assert not ranks.failed(ENDED)
    assert ranks.remark("rollout") == " (rollout ranks were started again 2 times before; rollout.max_restarts = 3)"
    assert ranks.remark("actor") == ""


def test_a_role_is_started_once() -> None:
    with pytest.raises(AssertionError, match="rollout rank 0 was started before"):
        run().started("rollout", 2)

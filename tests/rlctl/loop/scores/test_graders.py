"""Samples go to whichever process of the reward role has nothing to do, also when one of them is lost."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from probe_groups import probe_groups, role_plan, wait_until

from rlctl.loop.recovery import FailureWarnings, RankRecovery, SteadyGrading, TimeSpent
from rlctl.loop.scores.graders import Graders, Grading
from rlctl.processes.rank_states import RestartPolicy
from specs.wire import bodies
from specs.wire.as_built import AsBuilt


def part(graders: Graders, number: int) -> Grading:
    ones = np.ones(2, dtype=np.uint8)
    columns = {"tokens_T": ones, "loss_mask_T": ones, "rollout_B": ones, "row_B": ones, "finished_B": ones}
    request = bodies.Score(what="train", samples=[], rows={})
    return graders.grade(request, {**columns, "id_B": np.array([number, number])}, 1)


def scores(parts: Sequence[Grading]) -> list[int]:
    return [int(one.result().tensors["reward_B"][0]) for one in parts]


def graded_by(folder: Path, rank: int) -> list[int]:
    file = folder / f"graded_by_{rank}"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize(("lost", "other"), [(0, 1), (1, 0)])
def test_what_a_lost_one_had_goes_to_others(lost: int, other: int, tmp_path: Path) -> None:
    """The third is slow with its first part: the others grade what there is. One dies at its second part, and is back
    at the next step. When it dies once more there is no restart left, and the run goes on with two."""
    said: list[str] = []
    plan = replace(role_plan("reward", 3), nodes=3)
    plan = replace(plan, env={**plan.env, "PROBE_FOLDER": str(tmp_path), "PROBE_LOST": str(lost)})
    with probe_groups(tmp_path, plan, factory="graders") as groups:
        reward = groups["reward"]
        policy = RestartPolicy("reward", 1, FailureWarnings(groups, said.append), least=2)
        built = [AsBuilt.model_construct(role="reward", rank=rank, pid=0) for rank in range(3)]
        recovery = RankRecovery(groups, policy, body={}, built=built, start_timeout_s=60)
        recovery.begin()
        recovery._reports = lambda ranks, step, after: [built[rank] for rank in ranks]
        spent = TimeSpent()
        steady, graders = SteadyGrading(recovery, spent), Graders(reward)

        parts = [part(graders, number) for number in range(12)]
        assert scores([*parts[:2], *parts[3:]]) == [0, 1, *range(3, 12)]
        assert parts[2].answer is None, "the third is at it"
        assert groups.ranks.failed("reward") == [lost]
        died_at = int((tmp_path / "died").read_text())
        assert died_at in graded_by(tmp_path, other), "by the only one that had nothing to do"
        host = socket.gethostname()
        assert f"reward rank {lost} on {host} failed: its process was ended by SIGKILL" in said[0]
        assert "(restart 1 of at most 1, reward.max_restarts)" in said[0]
        assert steady.metrics() == {"reward/restarts": 0, "reward/processes": 3}

        more = [part(graders, number) for number in range(12, 24)]
        assert spent.take() == 0
        assert steady.restore(2), "while the others grade"
        assert spent.take() > 0
        assert spent.take() == 0
        graders.hand_out()
        (tmp_path / "gate").touch()
        assert scores([parts[2], *more]) == [2, *range(12, 24)]
        assert steady.metrics() == {"reward/restarts": 1, "reward/processes": 3}

        (tmp_path / "died").unlink()
        last = [part(graders, number) for number in range(24, 36)]
        assert wait_until(lambda: (groups.tick(), groups.ranks.dropped("reward"))[1])
        assert scores(last) == [*range(24, 36)]
        assert f"reward rank {lost} on {host} failed for good" in said[1]
        assert "The run continues with 2 of them (reward.min_processes = 2)" in said[1]
        assert steady.metrics() == {"reward/restarts": 1, "reward/processes": 2, "reward/dropped": 1}
        assert not steady.restore(3)
        of_all = [graded_by(tmp_path, rank) for rank in range(3)]
        assert sorted(number for of_one in of_all for number in of_one) == [*range(36)], "each once"


def test_while_judges_are_asked_a_rank_is_at_several_parts() -> None:
    sent: list[int] = []

    class TwoRanks:
        ready = (0, 1)

        def post(self, *_: object, ranks: Sequence[int], **__: object) -> None:
            sent.extend(ranks)

    graders = Graders(TwoRanks(), at_once=2)  # type: ignore[arg-type]
    for number in range(6):
        part(graders, number)
    assert sent == [0, 1, 0, 1], "the others wait"

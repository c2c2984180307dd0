"""Episodes of a rank: what travels to the driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from workers.episodes.episode_runner import _Batch
from workers.episodes.trajectory import Sample, Task, Trajectory


async def test_the_record_of_a_rollout_travels_once() -> None:
    """It holds the whole conversation, and rollouts of agents that render every turn anew have many samples."""
    sent: list[Any] = []
    runner: Any = SimpleNamespace(rank=0)
    batch = _Batch(runner, lambda body, columns: sent.append((body, columns)))
    task = Task(7, 2, 5, 1, False, 11, [1], {}, (), "environment")
    trajectory = Trajectory(task, [Sample([1]), Sample([1, 2])])

    async def played(*_: object) -> Trajectory:
        return trajectory

    runner.play = played
    await batch.run([task])
    ((body, columns),) = [one for one in sent if one[0]["kind"] == "samples"]
    assert body["episodes"] == {"7": trajectory.record()}
    assert columns["id_B"].tolist() == [task.sample_id(0), task.sample_id(1)]

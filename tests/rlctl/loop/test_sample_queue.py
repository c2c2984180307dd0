"""Sampling ahead of learning: the schedule by itself, and what the driver does with it. Whole runs:
`test_train_run_ahead.py`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from local_group import LocalGroup
from local_run import local_run
from running import preset
from told_actor import rl_driver

from rlctl.loop.clock import Clock
from rlctl.loop.sample_queue import Planned, SampleQueue, _read, _write
from rlctl.loop.sampling import Drawn, Sampler, Scored, Thrown
from rlctl.loop.scores.graders import Grading
from rlctl.loop.scores.reward_failure_watch import RewardFailureWatch
from specs.errors import GradingError
from specs.load.load import load_spec
from specs.wire.batch import Batch
from specs.wire.messages import Verb

PROMPTS, GROUP, STEPS = 8, 4, 9  # the preset `fake`: 8 prompts × 4 completions


def row_of(draw: int) -> dict[str, object]:
    return {"where": f"row {draw}", "prompt": str(draw), "values": {}, "messages": None, "tools": None}


class Roles:
    """A rollout that stamps its version on what it is sent, and a role with data and grade, behind the real wire
    format. `log` is what happened, in order."""

    def __init__(self) -> None:
        self.version = 0
        self.log: list[tuple[str, int]] = []
        self.shown: list[int] = []
        self.rollout = LocalGroup("rollout", [{Verb.GENERATE: self.generate}])
        self.reward = LocalGroup("reward", [{Verb.SCORE: self.score}])
        self.data = LocalGroup("data", [{Verb.PROMPTS: self.prompts}])

    def prompts(self, call, emit):
        first, count, size = (call.body[key] for key in ("position", "count", "group_size"))
        draw_B = np.repeat(np.arange(first, first + count), size)
        ids_B = draw_B * size + np.tile(np.arange(size), count)
        columns = {"tokens_T": ids_B, "length_B": np.ones_like(ids_B), "group_B": draw_B, "id_B": ids_B}
        rows = {str(draw): row_of(draw) for draw in range(first, first + count)}
        return {"position": first + count, "rows": rows}, {
            **columns,
            "prefix_B": draw_B,
            "position_B": np.zeros_like(ids_B),
            "rollout_B": ids_B,
            "row_B": draw_B,
        }

    def generate(self, call, emit):
        ids_B = call.tensors["id_B"]
        self.log.append(("sample", int(ids_B[0]) // (PROMPTS * GROUP) + 1))
        half = len(ids_B) // 2
        for part in (slice(half, None), slice(0, half)):
            given = {name: column[part] for name, column in call.tensors.items()}
            more = {"loss_mask_T": np.ones(half, np.int8), "rollout_logprob_T": np.zeros(half, np.float32)}
            emit({}, {**given, **more, "finished_B": np.ones(half, np.int8), "version_B": np.full(half, self.version)})
        return {}, {}

    def score(self, call, emit):
        ids_B = call.tensors["id_B"]
        assert call.body["rows"] == {str(row): row_of(row) for row in call.tensors["row_B"]}, "its rows, and no others"
        self.shown += call.body["samples"]
        graded_B = ids_B.astype(np.float32)
        scores = {"reward_B": graded_B, "term_0_B": graded_B, "scored_B": np.ones(len(ids_B), np.uint8)}
        return {"failures": {}, "samples": [{"id": int(ids_B[0])}]}, scores


def queue_of(folder: Path, most: int, steps: int = STEPS) -> tuple[SampleQueue, Roles]:
    spec = load_spec(preset("fake", folder), [f"rollout.max_staleness={most}", f"run.steps={steps}"])
    roles = Roles()
    return SampleQueue(spec, Sampler(spec, roles.data, roles.rollout, roles.reward, Clock(), SimpleNamespace())), roles


def go(queue: SampleQueue, roles: Roles, first: int, last: int) -> list[list[int]]:
    """Steps `first` to `last` as the driver makes them. Returns the versions and ids of each step's samples."""
    seen = []
    for step in range(first, last + 1):
        drawn = queue.take(step)
        assert (drawn.scored.reward_B == drawn.batch["id_B"]).all(), "scores stay with their samples"
        roles.log.append(("train", step))
        seen.append([*np.unique(drawn.batch["version_B"]).tolist(), *drawn.batch["id_B"].tolist()])
        if queue.needs_weights(step):
            roles.version = step
            roles.log.append(("sync", step))
        queue.trained()
    return seen


def test_samples_kept_as_text_are_spread_over_the_step_whatever_ends_first(tmp_path: Path) -> None:
    queue, roles = queue_of(tmp_path, 0)
    go(queue, roles, 1, 1)
    assert sorted(roles.shown) == [0, 10, 20, 31]


def planned_version(number: int, most: int) -> int:
    """In words: batch 1 is drawn with the first weights; then batches go out n at a time, when one is left."""
    version, sent = 0, 1 + most
    while sent < number:
        version, sent = (sent - 1, sent + most) if most else (sent, sent + 1)
    return version


@pytest.mark.parametrize("most", [0, 1, 2, 3, 20])
def test_versions_follow_from_the_step_alone(tmp_path: Path, most: int) -> None:
    queue, roles = queue_of(tmp_path, most)
    seen = go(queue, roles, 1, STEPS)
    assert [versions for versions, *_ in seen] == [planned_version(number, most) for number in range(1, STEPS + 1)]
    assert all(0 <= number - 1 - versions <= most for number, (versions, *_) in enumerate(seen, start=1))
    ids = [sample for _, *batch in seen for sample in batch]
    assert ids == list(range(STEPS * PROMPTS * GROUP)), "every prompt once, in order"
    assert queue.cursor == STEPS * PROMPTS


def test_two_ahead_keeps_this_order(tmp_path: Path) -> None:
    queue, roles = queue_of(tmp_path, 2, steps=6)
    go(queue, roles, 1, 6)
    assert [f"{what} {number}" for what, number in roles.log] == [
        *("sample 1", "sample 2", "sample 3", "train 1", "train 2", "sync 2"),
        *("sample 4", "sample 5", "train 3", "train 4", "sync 4"),
        *("sample 6", "train 5", "train 6", "sync 6"),  # nothing to draw after step 5: its weights stay at home
    ]


@pytest.mark.parametrize(("most", "stop"), [(1, 1), (2, 3), (3, 2)])
def test_a_checkpoint_keeps_the_line(tmp_path: Path, most: int, stop: int) -> None:
    queue, roles = queue_of(tmp_path, most)
    whole = go(queue, roles, 1, STEPS)
    queue, roles = queue_of(tmp_path, most)
    go(queue, roles, 1, stop)
    state = json.loads(json.dumps(queue.save(tmp_path)))
    assert state["position"] == stop * PROMPTS
    queue, roles = queue_of(tmp_path, most)
    assert not queue.restore(tmp_path, state)
    roles.version = stop  # a resume syncs first
    assert go(queue, roles, stop + 1, STEPS) == whole[stop:]


def test_too_old_for_a_resume_is_dropped_and_drawn_again(tmp_path: Path) -> None:
    queue, roles = queue_of(tmp_path, 3)
    go(queue, roles, 1, 4)  # 5, 6 and 7 were drawn with version 3: 1, 2 and 3 steps old
    state = queue.save(tmp_path)
    assert [entry["step"] for entry in state["ahead"]] == [5, 6, 7]
    for most, kept in ((0, 0), (1, 1), (2, 2)):
        shorter, roles = queue_of(tmp_path, most)
        dropped = shorter.restore(tmp_path, state)
        assert dropped == dict.fromkeys(range(5 + kept, 8), PROMPTS * GROUP)
        roles.version = 4
        seen = go(shorter, roles, 5, STEPS)
        assert all(0 <= number - 1 - versions <= most for number, (versions, *_) in enumerate(seen, start=5))
        ids = [sample for _, *batch in seen for sample in batch]
        assert ids == list(range(4 * PROMPTS * GROUP, STEPS * PROMPTS * GROUP)), "no prompt is lost or comes twice"


def test_a_group_with_an_old_sample_goes_as_a_whole(tmp_path: Path) -> None:
    queue, _ = queue_of(tmp_path, 1)
    drawn = queue.take(1)
    version_B = drawn.batch.columns["version_B"] = drawn.batch["version_B"].copy()
    version_B[:] = 5
    version_B[GROUP + 1] = 3  # one answer of the second prompt
    assert len(drawn.fresh(5, 2).batch) == len(version_B)  # in step 6 it is 5 - 3 = 2 steps old
    queue.line[0].step = 6
    fresh = queue.take(6)
    assert fresh.batch["group_B"].tolist() == [group for group in range(PROMPTS) if group != 1 for _ in range(GROUP)]
    assert (fresh.scored.reward_B == fresh.batch["id_B"]).all()
    told = queue.take_metrics(fresh.batch, 6, (0.0, 0.0))
    assert [told[f"rollout/{name}"] for name in ("staleness_mean", "staleness_max", "dropped_stale")] == [0, 0, GROUP]


def test_an_evaluation_measures_the_weights_of_now(tmp_path: Path) -> None:
    """In a step after which none were due, too."""
    roles, sent = Roles(), [2]

    def sync(step: int) -> None:
        roles.log.append(("sync", step))
        sent.append(step)

    weights = SimpleNamespace(holds=lambda step: sent[-1] == step)
    steady = SimpleNamespace(weights=weights, run=sync, resend_if_asleep=lambda step: None)
    groups = {"actor": LocalGroup("actor", [{}]), "rollout": roles.rollout, "data": roles.data, "reward": roles.reward}
    options = ("rollout.max_staleness=2", "eval.every=3", "eval.prompts=8")
    driver = rl_driver(tmp_path, groups, *options, steady=steady)
    driver.evaluate(3)
    driver.evaluate(3)
    assert [what for what, _ in roles.log] == ["sync", "sample", "sample"]
    assert roles.log[0] == ("sync", 3)


def test_what_grading_said_of_samples_drawn_ahead_outlives_a_checkpoint(tmp_path: Path) -> None:
    """How many were graded, too: a share of failures is taken of it."""
    columns = {name: np.zeros(4, np.int64) for name in ("id_B", "group_B", "version_B")}
    batch = Batch({**columns, "tokens_T": np.arange(4), "length_B": np.ones(4, np.int64)})
    said = {
        "completions": 6,
        "first_failure": "KeyError: 'x'",
        "zero_terms": (1,),
        "thrown": Thrown(1, 1, 1, [0.5, 0.0], {"term_0_B": [0.5, 0.0]}),
    }
    term_B = {"term_0_B": np.array([1, 2, 3, 4], np.float32)}
    scored = Scored(np.zeros(4, np.float32), np.ones(4, bool), {"exceptions": 2}, [], **said, term_B=term_B)
    entry = json.loads(json.dumps(_write(tmp_path, Planned(7, 0, 2), Drawn(batch, scored))))
    back = _read(tmp_path, entry).drawn.scored
    assert {name: getattr(back, name) for name in said} == said
    assert back.mean_terms(np.arange(4)) == {"term_0": 10.5 / 6}
    RewardFailureWatch(0.5, lambda text: None).see(back, "step 7")


@pytest.mark.parametrize("broken", [1, 3])
def test_a_wait_for_scores_that_is_broken_off_costs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    """A Ctrl-C ends it, and the checkpoint that follows keeps the batch that was waited for."""
    file, options = preset("fake", tmp_path), ("rollout.max_staleness=1",)
    with local_run(file, tmp_path / "whole", *options) as run:
        whole = run.steps(2)[1].metrics["reward/mean"]

    with local_run(file, tmp_path / "cut", *options) as run:
        run.steps(1)
        run.break_off(monkeypatch, Grading, "result", broken)
    with local_run(file, tmp_path / "cut", *options, resume=True) as run:
        assert run.steps(2)[0].metrics["reward/mean"] == whole


def test_what_was_drawn_ahead_and_not_graded_is_drawn_again_at_a_resume(tmp_path: Path) -> None:
    """It would end the run again, though the reward works by now."""
    down, function = tmp_path / "down", tmp_path / "rewards.py"
    function.write_text(
        f"def score(completion):\n    assert not __import__('os').path.exists({str(down)!r})\n    return 1.0\n"
    )
    term = f'reward.terms=[{{kind="function", path="{function}:score"}}]'
    file, options = preset("fake", tmp_path), ("rollout.max_staleness=2", term)
    with local_run(file, tmp_path / "run", *options) as run:
        run.steps(2)
        down.touch()  # while 4 and 5 are drawn
        run.driver.step(3)
        run.saver.save(run.driver, 3)
        with pytest.raises(GradingError):
            run.driver.step(4)
    down.unlink()
    with local_run(file, tmp_path / "run", *options, resume=True) as run:
        records = run.steps(6)
    assert [record.metrics["reward/failed_exceptions"] for record in records] == [0, 0, 0]
    assert run.said.warnings[1] == (
        "64 samples drawn ahead for step 4 to 5 are dropped: older than rollout.max_staleness allows, or not graded. "
        "Others are drawn in their place"
    )

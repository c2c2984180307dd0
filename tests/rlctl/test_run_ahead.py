"""Sampling ahead of learning: the schedule by itself, and what the driver does with it. Whole runs:
`test_train_run_ahead.py`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from local_group import LocalGroup
from running import preset

from rlctl import ahead_files
from rlctl.driver import Driver
from rlctl.residency import Residency
from rlctl.run_ahead import RunAhead
from rlctl.sampling import Sampler
from rlctl.step_metrics import Clock
from specs.errors import CheckpointError
from specs.load import load_spec
from specs.messages import Verb

PROMPTS, GROUP, STEPS = 8, 4, 9  # the preset `fake`: 8 prompts × 4 answers


class Roles:
    """A rollout that stamps its version on what it is sent, and a role with data and judge, behind the real wire
    format. `log` is what happened, in order."""

    def __init__(self) -> None:
        self.version = 0
        self.log: list[tuple[str, int]] = []
        self.rollout = LocalGroup("rollout", [{Verb.GENERATE: self.generate}])
        self.reward = LocalGroup("reward", [{Verb.PROMPTS: self.prompts, Verb.SCORE: self.score}])

    def prompts(self, call, emit):
        first, count, size = (call.body[key] for key in ("position", "count", "group_size"))
        draw_B = np.repeat(np.arange(first, first + count), size)
        ids_B = draw_B * size + np.tile(np.arange(size), count)
        columns = {"tokens_T": ids_B, "length_B": np.ones_like(ids_B), "group_B": draw_B, "id_B": ids_B}
        return {"position": first + count}, {**columns, "row_B": draw_B}

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
        scores = {"reward_B": ids_B.astype(np.float32), "scored_B": np.ones(len(ids_B), np.uint8)}
        return {"failures": {}, "samples": [{"id": int(ids_B[0])}]}, scores


def ahead_of(folder: Path, most: int, steps: int = STEPS) -> tuple[RunAhead, Roles]:
    spec = load_spec(preset("fake", folder), [f"rollout.max_staleness={most}", f"run.steps={steps}"])
    roles = Roles()
    return RunAhead(spec, Sampler(spec, roles.rollout, roles.reward, lambda step: None)), roles


def go(ahead: RunAhead, roles: Roles, first: int, last: int) -> list[list[int]]:
    """Steps `first` to `last` as the driver makes them. Returns the versions and ids of each step's samples."""
    seen = []
    for number in range(first, last + 1):
        ahead.fill(number)
        drawn = ahead.take(number, Clock())
        assert (drawn.scored.reward_B == drawn.batch["id_B"]).all(), "scores stay with their samples"
        roles.log.append(("learn", number))
        seen.append([*np.unique(drawn.batch["version_B"]).tolist(), *drawn.batch["id_B"].tolist()])
        if ahead.due(number):
            roles.version = number
            roles.log.append(("sync", number))
        ahead.learned()
    return seen


def planned_version(number: int, most: int) -> int:
    """In words: batch 1 is drawn with the first weights; then batches go out n at a time, when one is left."""
    version, sent = 0, 1 + most
    while sent < number:
        version, sent = (sent - 1, sent + most) if most else (sent, sent + 1)
    return version


@pytest.mark.parametrize("most", [0, 1, 2, 3, 20])
def test_versions_follow_from_the_step_alone(tmp_path: Path, most: int) -> None:
    ahead, roles = ahead_of(tmp_path, most)
    seen = go(ahead, roles, 1, STEPS)
    assert [versions for versions, *_ in seen] == [planned_version(number, most) for number in range(1, STEPS + 1)]
    assert all(0 <= number - 1 - versions <= most for number, (versions, *_) in enumerate(seen, start=1))
    ids = [sample for _, *batch in seen for sample in batch]
    assert ids == list(range(STEPS * PROMPTS * GROUP)), "every prompt once, in order"
    assert ahead.cursor == STEPS * PROMPTS


def test_order_of_work() -> None:
    assert [planned_version(number, 2) for number in range(1, 8)] == [0, 0, 0, 2, 2, 4, 4]


def test_two_ahead_keeps_this_order(tmp_path: Path) -> None:
    ahead, roles = ahead_of(tmp_path, 2, steps=6)
    go(ahead, roles, 1, 6)
    assert [f"{what} {number}" for what, number in roles.log] == [
        *("sample 1", "sample 2", "sample 3", "learn 1", "learn 2", "sync 2"),
        *("sample 4", "sample 5", "learn 3", "learn 4", "sync 4"),
        *("sample 6", "learn 5", "learn 6", "sync 6"),  # nothing to draw after step 5: its weights stay at home
    ]


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_checkpoint_keeps_the_line(tmp_path: Path, most: int, stop: int) -> None:
    ahead, roles = ahead_of(tmp_path, most)
    whole = go(ahead, roles, 1, STEPS)
    ahead, roles = ahead_of(tmp_path, most)
    go(ahead, roles, 1, stop)
    said = json.loads(json.dumps(ahead_files.write(tmp_path, ahead.drain(Clock()))))
    cursor = ahead.cursor
    assert cursor == stop * PROMPTS
    ahead, roles = ahead_of(tmp_path, most)
    assert not ahead.restore(cursor, ahead_files.read(tmp_path, said))
    roles.version = stop  # a resume syncs first
    assert go(ahead, roles, stop + 1, STEPS) == whole[stop:]


def test_too_old_for_a_resume_is_dropped_and_drawn_again(tmp_path: Path) -> None:
    ahead, roles = ahead_of(tmp_path, 3)
    go(ahead, roles, 1, 4)  # 5, 6 and 7 were drawn with version 3: 1, 2 and 3 steps old
    said = ahead_files.write(tmp_path, ahead.drain(Clock()))
    assert [entry["step"] for entry in said] == [5, 6, 7]
    for most, kept in ((0, 0), (1, 1), (2, 2)):
        shorter, roles = ahead_of(tmp_path, most)
        dropped = shorter.restore(ahead.cursor, ahead_files.read(tmp_path, said))
        assert dropped == dict.fromkeys(range(5 + kept, 8), PROMPTS * GROUP)
        roles.version = 4
        seen = go(shorter, roles, 5, STEPS)
        assert all(0 <= number - 1 - versions <= most for number, (versions, *_) in enumerate(seen, start=5))
        ids = [sample for _, *batch in seen for sample in batch]
        assert ids == list(range(4 * PROMPTS * GROUP, STEPS * PROMPTS * GROUP)), "no prompt is lost or comes twice"


def test_a_group_with_an_old_sample_goes_as_a_whole(tmp_path: Path) -> None:
    ahead, _ = ahead_of(tmp_path, 1)
    ahead.fill(1)
    drawn = ahead.take(1, Clock())
    version_B = drawn.batch.columns["version_B"] = drawn.batch["version_B"].copy()
    version_B[:] = 5
    version_B[GROUP + 1] = 3  # one answer of the second prompt
    assert len(drawn.fresh(6, 2).batch) == len(version_B)  # in step 6 it is 5 - 3 = 2 steps old
    ahead.line[0].number = 6
    fresh = ahead.take(6, Clock())
    assert fresh.batch["group_B"].tolist() == [group for group in range(PROMPTS) if group != 1 for _ in range(GROUP)]
    assert (fresh.scored.reward_B == fresh.batch["id_B"]).all()
    told = ahead.take_metrics(fresh.batch, 6, 0.0)
    assert [told[f"rollout/{name}"] for name in ("staleness_mean", "staleness_max", "dropped_stale")] == [0, 0, GROUP]


def test_an_evaluation_measures_the_weights_of_now(tmp_path: Path) -> None:
    """In a step after which none were due, too."""
    spec = load_spec(preset("fake", tmp_path), ["rollout.max_staleness=2", "eval.every=3", "eval.prompts=8"])
    roles, weights = Roles(), SimpleNamespace(sent=2)

    def sync(done: int) -> None:
        roles.log.append(("sync", done))
        weights.sent = done

    steady = SimpleNamespace(weights=weights, run=sync, ready=lambda step: None, restore=None)
    groups = {"actor": LocalGroup("actor", [{}]), "rollout": roles.rollout, "reward": roles.reward}
    progress = SimpleNamespace(phase=lambda name: None)
    driver = Driver(spec, groups, Residency(False, [], roles.rollout), steady, None, progress)
    driver.evaluate(3)
    driver.evaluate(3)
    assert [what for what, _ in roles.log] == ["sync", "sample", "sample"]
    assert roles.log[0] == ("sync", 3)


@pytest.mark.parametrize("most", [0, 1])
def test_only_samples_drawn_ahead_are_compared_with_their_sampler(tmp_path: Path, most: int) -> None:
    """`version_B` in an update is what says so (backends/protocol.py)."""
    one = ("algorithm.mini_batches_per_step=1", f"rollout.max_staleness={most}")
    spec, roles, sent = load_spec(preset("fake", tmp_path), [*one]), Roles(), []

    def update(call, emit):
        sent.append("version_B" in call.tensors)
        return {"sums": {"tokens": 1.0, "logprob_gap": 0.0, "logprob_gap_max": 0.0}}, {}

    actor = LocalGroup("actor", [{Verb.UPDATE: update, Verb.STEP: lambda call, emit: ({}, {})}])
    groups = {"actor": actor, "rollout": roles.rollout, "reward": roles.reward}
    budget = SimpleNamespace(broken_by=lambda gap: False)
    steady = SimpleNamespace(restore=None)
    driver = Driver(spec, groups, Residency(False, [], roles.rollout), steady, budget, None)
    driver.ahead.fill(1)
    batch = driver.ahead.take(1, Clock()).batch
    driver.update(batch.with_columns(advantage_T=np.zeros(batch.num_tokens, np.float32)), 1)
    assert sent == [bool(most)]


def test_a_file_of_the_line_that_is_broken_is_named(tmp_path: Path) -> None:
    ahead, roles = ahead_of(tmp_path, 1)
    go(ahead, roles, 1, 2)
    said = ahead_files.write(tmp_path, ahead.drain(Clock()))
    path = tmp_path / "ahead_000003.safetensors"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CheckpointError, match="ahead_000003"):
        ahead_files.read(tmp_path, said)

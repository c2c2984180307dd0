"""Checkpoints: atomic, found only when whole, pruned by age."""

import json

import pytest

from rlctl import checkpoints
from specs.errors import CheckpointError


def save(root, step, keep=5, text="weights"):
    def write_actor(folder):
        (folder / "model.safetensors").write_text(f"{text} {step}")

    return checkpoints.save(root, step, state={"position": step * 10}, about={}, write_actor=write_actor, keep=keep)


def test_round_trip(tmp_path):
    path = save(tmp_path, 20)
    found = checkpoints.newest(tmp_path, warn=pytest.fail)
    assert (found.path, found.step, found.state["position"]) == (path, 20, 200)
    assert "actor/model.safetensors" in found.manifest["files"]


def test_keeps_the_newest(tmp_path):
    for step in (1, 2, 3, 10):
        save(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000003", "step_000010"]


@pytest.mark.parametrize(
    "tear",
    [
        lambda path: (path / "actor/model.safetensors").write_text("short"),
        lambda path: (path / "actor/model.safetensors").write_text("weights X"),  # same size, other bytes
        lambda path: (path / "actor/model.safetensors").unlink(),
        lambda path: (path / "manifest.json").write_text('{"files": '),
        lambda path: (path / "manifest.json").unlink(),
    ],
)
def test_torn_newest_is_skipped_with_a_warning(tmp_path, tear):
    save(tmp_path, 1)
    tear(save(tmp_path, 2))
    warnings = []
    assert checkpoints.newest(tmp_path, warnings.append).step == 1
    assert len(warnings) == 1
    assert "step_000002" in warnings[0]
    checkpoints.set_aside_after(tmp_path, 1)
    save(tmp_path, 2, keep=2)
    assert checkpoints.newest(tmp_path, pytest.fail).step == 2
    assert (tmp_path / "step_000001").is_dir()


def test_failing_save_leaves_the_older_and_no_debris(tmp_path):
    save(tmp_path, 1)

    def full_disk(folder):
        (folder / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        checkpoints.save(tmp_path, 2, state={}, about={}, write_actor=full_disk, keep=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def test_leftover_of_a_killed_save_is_ignored(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".tmp_step_000002" / "actor").mkdir(parents=True)
    assert checkpoints.newest(tmp_path, pytest.fail).step == 1
    checkpoints.set_aside_after(tmp_path, 1)
    assert not (tmp_path / ".tmp_step_000002").exists()


def test_read_names_the_damage(tmp_path):
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["actor/model.safetensors"]["bytes"] += 1
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"model\.safetensors has 9 bytes, 10 were written"):
        checkpoints.read(path)

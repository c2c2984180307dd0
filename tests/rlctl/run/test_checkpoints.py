"""Checkpoints: atomic, found only when whole, pruned by age."""

import json
import threading

import pytest
import xxhash

from rlctl import __version__
from rlctl.run import checkpoints
from specs.errors import CheckpointError
from workers.saved_files import settle


def save(root, step, keep=None, text="weights", proven=True):
    """Save a step and prove it; with `keep`, drop older ones."""

    def write_actor(folder):
        written = [folder / f"model.rank{rank}" for rank in range(2)]
        for path in written:
            path.write_text(f"{text} {step}")
        return [settle(folder, [path]) for path in written]

    path = checkpoints.save(
        root,
        step,
        about={},
        write_roles={"actor": write_actor},
        write_driver=lambda folder: {"position": step * 10},
    )
    if keep:
        checkpoints.add_files(path, {}, {"proven": proven})
        checkpoints.prune(root, keep)
    return path


def test_round_trip(tmp_path):
    path = save(tmp_path, 20)
    found = checkpoints.newest(tmp_path, warn=pytest.fail)
    assert (found.path, found.step, found.state["position"]) == (path, 20, 200)
    assert found.manifest["files"].keys() == {"actor/model.rank0", "actor/model.rank1", "driver/state.json"}
    assert found.manifest["files"]["actor/model.rank1"] == {
        "bytes": 10,
        "xxh3": xxhash.xxh3_64_hexdigest(b"weights 20"),
    }


def test_keeps_the_newest(tmp_path):
    for step in (1, 2, 3, 10):
        save(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000003", "step_000010"]


def test_the_newest_proven_one_stays_until_a_newer_one_is_proven(tmp_path):
    for step, proven in ((1, True), (2, True), (3, False), (4, False)):
        save(tmp_path, step, keep=1, proven=proven)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000004"]
    save(tmp_path, 5, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]


def test_what_somebody_reads_is_not_removed(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    read = checkpoints.read(tmp_path / "step_000001")
    checkpoints.add_files(tmp_path / "step_000001", {}, {"proven": True})  # as after a save that was not proven yet
    save(tmp_path, 3, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000003"]
    read.pin.release()
    save(tmp_path, 4, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000004"]


def test_a_proof_comes_when_the_checkpoint_is_whole(tmp_path):
    path = save(tmp_path, 1)
    assert checkpoints.read(path).step == 1
    (path / "actor" / "proof.json").write_text("{}")
    written = settle(path / "actor", [path / "actor" / "proof.json"])
    checkpoints.add_files(path, {f"actor/{name}": mark for name, mark in written.items()}, {"proven": True})
    manifest = checkpoints.read(path).manifest
    assert manifest["proven"]
    assert {"actor/proof.json", "actor/model.rank0"} <= manifest["files"].keys()


@pytest.mark.parametrize(
    "tear",
    [
        lambda path: (path / "actor/model.rank1").write_text("weights X"),  # one rank's file: same size, other bytes
        lambda path: (path / "actor/model.rank1").unlink(),
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


def test_a_manifest_of_another_format_is_named_and_who_wrote_it(tmp_path):
    path = save(tmp_path, 1)
    manifest = path / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 2, "rlctl": "9.0"}))
    told = f"its manifest.json, of rlctl 9.0, has another format than rlctl {__version__} reads"
    with pytest.raises(CheckpointError) as caught:
        checkpoints.read(path)
    assert caught.value.message == f"{path}: {told}"
    assert "use the rlctl that wrote it" in caught.value.hint
    with pytest.raises(CheckpointError, match=rf"\n  - step_000001: {told}\n"):
        checkpoints.newest(tmp_path, pytest.fail)
    newer = save(tmp_path, 2) / "manifest.json"
    manifest.rename(newer)
    save(tmp_path, 1)
    newer.write_text(newer.read_text().replace('"step": 1', '"step": 2'))
    with pytest.raises(CheckpointError, match=rf"written by another version of rlctl:\n  - step_000002: {told}\n"):
        checkpoints.newest(tmp_path, pytest.fail)  # step 1 is whole, but not what the run had come to


def test_failing_save_leaves_the_older_and_no_debris(tmp_path):
    save(tmp_path, 1)

    def full_disk(folder):
        (folder / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        checkpoints.save(tmp_path, 2, about={}, write_roles={"actor": full_disk}, write_driver=lambda folder: {})
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


# ── ranks on other hosts ──────────────────────────────────────────────────────────────────────────


def save_as_told(root, step, marks, arrive=lambda folder: None):
    def write_actor(folder):
        arrive(folder)
        return marks

    return checkpoints.save(root, step, about={}, write_roles={"actor": write_actor}, write_driver=lambda folder: {})


def test_the_manifest_holds_what_the_rank_wrote_not_what_arrived(tmp_path):
    """A block that a file system lost on the way is found when the checkpoint is read."""
    save(tmp_path, 1)
    meant = {"bytes": 7, "xxh3": xxhash.xxh3_64_hexdigest(b"meant it")}
    save_as_told(tmp_path, 2, [{"w": meant}], lambda folder: (folder / "w").write_bytes(b"mea\0\0\0\0"))
    warnings = []
    assert checkpoints.newest(tmp_path, warnings.append).step == 1
    assert "actor/w was changed or damaged" in warnings[0]


def test_a_file_that_shows_up_late_is_waited_for(tmp_path):
    late = {"w": {"bytes": 4, "xxh3": xxhash.xxh3_64_hexdigest(b"late")}}
    timers = []

    def arrive(folder):
        timers.append(threading.Timer(0.5, (folder / "w").write_bytes, [b"late"]))
        timers[0].start()

    assert checkpoints.read(save_as_told(tmp_path, 1, [late], arrive)).manifest["files"]["actor/w"] == late["w"]


def test_a_file_that_never_comes_fails_the_save_and_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "ARRIVAL_TIMEOUT_S", 0.3)
    with pytest.raises(CheckpointError, match=r"actor/w, of which a rank wrote 4 bytes, is not here") as caught:
        save_as_told(tmp_path, 1, [{"w": {"bytes": 4, "xxh3": "0" * 16}}])
    assert "share" in caught.value.hint
    assert list(tmp_path.iterdir()) == []

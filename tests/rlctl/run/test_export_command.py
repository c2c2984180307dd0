"""`rlctl export-checkpoint` around the export itself: how far it is, and what is left when it ends early."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys

import psutil
import pytest
from process_ends import ended
from running import REPO, start, wait_for

from rlctl.models.paths import BUILTIN_FOLDER
from rlctl.run import checkpoints
from rlctl.run.export import _follow, _remove_what_was_killed, _run, export, own_dtype
from specs.errors import CheckpointError, ExportError, UsageError
from workers.offline import export_model
from workers.saved_files import settle


@pytest.fixture
def run(tmp_path):
    """A run whose checkpoint is whole by its manifest, but holds no weights."""

    def write_actor(folder):
        (folder / "greedy_proof.json").write_text("{}")
        return [settle(folder, [folder / "greedy_proof.json"])]

    actor = {"python": sys.executable, "model_path": str(BUILTIN_FOLDER / "tiny-digits")}
    about = {"run": "none", "trust_remote_code": False, "roles": {"actor": actor}}
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    checkpoints.save(
        tmp_path / "run" / "checkpoints",
        1,
        about=about,
        write_roles={"actor": write_actor},
        write_driver=lambda folder: {"position": 0},
    )
    return tmp_path / "run"


def test_ending_it_leaves_nothing(run, tmp_path):
    command = start("export-checkpoint", run, tmp_path / "out")
    try:
        wait_for(lambda: psutil.Process(command.pid).children(), 150, "the export process")
        (child,) = psutil.Process(command.pid).children()
        command.send_signal(signal.SIGTERM)
        output = command.communicate(timeout=200)[0]
        assert command.returncode == 130, output
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    finally:
        command.kill()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("there", [False, True])
def test_what_a_killed_one_left_goes_with_the_next_to_the_same_place(run, tmp_path, there):
    """But not before it is killed."""
    out = tmp_path / "out"
    within = out if there else tmp_path
    within.mkdir(exist_ok=True)
    command = start("export-checkpoint", run, out)
    try:
        request = ".out-*/rlctl_export_request.json"
        wait_for(lambda: [file for file in within.glob(request) if file.stat().st_size], 150, "the export's request")
        command.send_signal(signal.SIGSTOP)
        _remove_what_was_killed(out)
        (left,) = within.glob(".out-*")
        children = psutil.Process(command.pid).children()
    finally:
        command.kill()
        command.communicate()
    assert all(ended(child.pid) for child in children), "until it ends it may write there, or still hold the lock"
    with pytest.raises(UsageError, match="only with --push-to-hub"):
        export(run, out, None, "actor", "fp32", public=True)
    assert not left.exists()


@pytest.mark.usefixtures("warm_children")
def test_a_failure_leaves_nothing_and_says_why(run, tmp_path):
    with pytest.raises(ExportError, match=r"actor has no model-\*\.safetensors"):
        export(run, tmp_path / "out", None, "actor", "fp32")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_export_into_the_present_folder_is_named_after_it(run, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("mine"))
    monkeypatch.setattr("rlctl.run.export._export", lambda exported, *_: {}[exported.name])
    with pytest.raises(KeyError, match="mine0"):
        export(run, run.relative_to(run), None)


def test_the_process_sees_what_pythonpath_adds(tmp_path, monkeypatch):
    """As the ranks do: clusters have packages there."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf %s "$PYTHONPATH" >{tmp_path}/seen\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", "/of/a/module")
    with pytest.raises(ExportError, match="ended with code 1"):
        _run(str(python), tmp_path, print)
    assert (tmp_path / "seen").read_text() == f"{REPO}:/of/a/module"


@pytest.mark.parametrize(
    ("base", "trained", "exported", "why"),
    [
        ({"dtype": "float32"}, "bf16", "fp32", "as the base model"),
        ({"torch_dtype": "bfloat16"}, "fp32", "bf16", "as the base model"),
        ({"torch_dtype": "float16"}, "fp32", "bf16", "the base model is fp16"),
        ({}, "bf16", "bf16", "as it was trained"),
        (None, "bf16", "bf16", "as it was trained"),
    ],
)
def test_the_precision_that_nobody_chose(tmp_path, base, trained, exported, why):
    """The base model's own, where its config.json names one; else that of the training. Never one without a word."""
    if base is not None:
        shape = {"model_type": "qwen2", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        (tmp_path / "config.json").write_text(json.dumps({**shape, **base}))
    dtype, said = own_dtype({"model_path": str(tmp_path), "dtype": trained})
    assert dtype == exported
    assert why in said


def test_a_full_disk_is_told_and_makes_room_for_the_telling(tmp_path, monkeypatch):
    def write_model(source, out, shard_bytes, progress):
        (out / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "no")

    monkeypatch.setattr("backends.export.model_export.write_model", write_model)
    monkeypatch.setattr(export_model, "die_with_parent", lambda: None)
    names = ("checkpoint", "out", "model_path", "proof_file", "answer", "progress")
    request = {name: str(tmp_path / name) for name in names}
    request |= {
        "head": "lm",
        "dtype": "fp32",
        "trust_remote_code": False,
        "adapter_only": False,
        "shard_bytes": 1,
        "memory_bytes": 1,
    }
    (tmp_path / "out").mkdir()
    (tmp_path / "request.json").write_text(json.dumps(request))
    assert export_model.main(str(tmp_path / "request.json")) == 1
    assert json.loads((tmp_path / "answer").read_text())["error"] == "the disk is full"
    assert not (tmp_path / "out").exists()


def test_a_disk_without_room_for_a_word_is_full(tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n: >{tmp_path}/answer.json\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(ExportError, match="the disk is full"):
        _run(str(python), tmp_path, print)


def test_getting_nowhere_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr("rlctl.run.export.STALL_S", 0.5)
    (tmp_path / "progress.json").write_text('{"what": "writing", "done": 1000000000, "total": 4000000000}')
    lines, process = [], subprocess.Popen(["sleep", "60"])
    try:
        with pytest.raises(ExportError, match="made no progress"):
            _follow(process, tmp_path / "progress.json", lines.append)
    finally:
        process.kill()
        process.wait()
    assert lines == ["writing 1.00 of 4.00 GB"]


def test_what_cannot_be_exported_is_said_at_once(run, tmp_path):
    manifest = run / "checkpoints" / "step_000001" / "manifest.json"
    content = json.loads(manifest.read_text())
    mark = content["files"].pop("actor/greedy_proof.json")
    for more, error, told in (
        ({"proven": False}, CheckpointError, "step 1 was saved without the proof"),
        ({"engine": "fake"}, UsageError, "engine is fake: there is no model to export"),
        ({"roles": {}}, UsageError, "the run has no actor"),
        ({"roles": {"actor": {"python": 3}}}, CheckpointError, "every checkpoint in .* is damaged"),
    ):
        manifest.write_text(json.dumps({**content, **more}))
        with pytest.raises(error, match=told):
            export(run, tmp_path / "out", None, "actor")
    content["files"]["actor/greedy_proof.json"] = mark
    moved = {"actor": {**content["roles"]["actor"], "model_path": str(tmp_path / "moved")}}
    manifest.write_text(json.dumps({**content, "roles": moved}))
    with pytest.raises(CheckpointError, match=r"the actor began with, .*moved, is not there") as caught:
        export(run, tmp_path / "out", None, "actor")
    assert str(manifest) in caught.value.hint
    manifest.write_text(json.dumps(content))
    (link := tmp_path / "link").symlink_to("nowhere")
    for out, told in ((tmp_path, "already exists"), (link, "already exists"), (manifest / "o", "cannot be written: ")):
        with pytest.raises(UsageError, match=told):
            export(run, out, None, "actor")

"""Whatever lies in a run directory is input: each command that reads one says what is wrong with which file, and what
was good stays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import environment, preset, warm_rlctl

from rlctl.cli import main
from rlctl.run import export, train
from rlctl.show.report import write_report
from specs.errors import RlctlError

STEPS, SAVED = 4, ("step_000002", "step_000004")
OPTIONS = ("--set", f"run.steps={STEPS}", "--set", "checkpoint.every=2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run beside its spec."""
    folder = tmp_path_factory.mktemp("finished")
    done = warm_rlctl("train", preset("fake", folder), "--run-dir", folder / "run", *OPTIONS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir()) == list(SAVED)
    return folder


# ── messes ────────────────────────────────────────────────────────────────────────────────────────


def write(name: str, content: bytes | str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def cut(name: str, nbytes: int) -> Callable[[Path], object]:
    """Take so many bytes from the end."""
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[:-nbytes])


def append(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes((run / name).read_bytes() + content)


def copy(name: str, to: str) -> Callable[[Path], object]:
    def do(run: Path) -> None:
        (shutil.copytree if (run / name).is_dir() else shutil.copy)(run / name, run / to)

    return do


def remove(name: str) -> Callable[[Path], object]:
    def do(run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return do


def replace(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def do(run: Path) -> None:
        if (run / name).exists():
            remove(name)(run)
        make(run / name)

    return do


def folder(name: str) -> Callable[[Path], object]:
    return replace(name, lambda path: path.mkdir())


def file(name: str) -> Callable[[Path], object]:
    return replace(name, lambda path: path.write_text("a file"))


def loop(name: str) -> Callable[[Path], object]:
    return replace(name, lambda path: path.symlink_to(path.name))


def pipe(name: str) -> Callable[[Path], object]:
    return replace(name, os.mkfifo)


def edit(name: str, change: Callable[[Any], Any]) -> Callable[[Path], object]:
    """Read JSON, change it, write it."""

    def do(run: Path) -> None:
        content = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps(change(content)))

    return do


def manifest(**keys: Any) -> Callable[[Path], object]:
    """Of the newest checkpoint; None takes a key away."""
    return edit(NEWEST, lambda now: {key: value for key, value in {**now, **keys}.items() if value is not None})


def line(name: str, number: int, content: bytes) -> Callable[[Path], object]:
    def do(run: Path) -> None:
        lines = (run / name).read_bytes().split(b"\n")
        lines[number] = content
        (run / name).write_bytes(b"\n".join(lines))

    return do


def every(*messes: Callable[[Path], object]) -> Callable[[Path], object]:
    def do(run: Path) -> None:
        for mess in messes:
            mess(run)

    return do


NEWEST = "checkpoints/step_000004/manifest.json"
WEIGHTS = "checkpoints/step_000004/actor/model.safetensors"
TORN_CHARACTER = "é".encode()[:1]
DEEP = b"[" * 100_000

# Messes that change nothing: name → (mess, step that a resume goes on from)
HARMLESS: dict[str, tuple[Callable[[Path], object], int]] = {
    "nothing": (lambda run: None, 4),
    "a backup beside the checkpoints": (copy("checkpoints/step_000002", "checkpoints/backup"), 4),
    "a copy under a later step": (copy("checkpoints/step_000004", "checkpoints/step_000009"), 4),
    "a file that looks like a later step": (write("checkpoints/step_000008", "notes"), 4),
    "a torn one that is a file": (
        every(folder("checkpoints/step_000006"), write("checkpoints/torn_step_000006", "")),
        4,
    ),
    "a checkpoint elsewhere, by link": (
        every(
            lambda run: (run / "checkpoints/step_000004").rename(run / "elsewhere"),
            lambda run: (run / "checkpoints/step_000004").symlink_to(run / "elsewhere"),
        ),
        4,
    ),
    "a backup of logs": (folder("logs/attempt_backup"), 4),
    "no as_built.json": (remove("as_built.json"), 4),
    "no samples": (remove("samples.jsonl"), 4),
    "samples torn within a character": (append("samples.jsonl", b'{"step": 4, "prompt": "' + TORN_CHARACTER), 4),
    "samples of another shape": (line("samples.jsonl", 0, b'["step", 1]'), 4),
    "metrics torn within a line": (cut("metrics.jsonl", 9), 4),
    "metrics that end in zeros": (append("metrics.jsonl", b"\0" * 4096), 4),
    "metrics beyond floats": (
        line(
            "metrics.jsonl",
            1,
            b'{"step": 2, "reward/mean": 1' + b"0" * 400 + b', "actor/loss": NaN, "mem/_GiB": 1e308}',
        ),
        4,
    ),
    "memory.json of another shape": (
        write("memory.json", '{"actor": [], "ref": {"planned_GiB": "x", "used_GiB": 1}}'),
        4,
    ),
    "report.html is a folder": (folder("report.html"), 4),
    "a damaged newest": (cut(WEIGHTS, 3), 2),
    "weights that are a pipe": (pipe(WEIGHTS), 2),
    "a newest without a manifest": (remove(NEWEST), 2),
    "a manifest cut short": (cut(NEWEST, 40), 2),
    "a manifest that is a list": (write(NEWEST, "[]"), 2),
    "a manifest that is a pipe": (pipe(NEWEST), 2),
    "a manifest of another version": (manifest(format=2), 2),
    "a manifest without files": (manifest(files=None), 2),
    "a manifest without its actor": (
        edit(NEWEST, lambda now: {**now, "files": {k: v for k, v in now["files"].items() if k.startswith("driver")}}),
        2,
    ),
    "a manifest that leads outside": (manifest(files={"../../samples.jsonl": {"bytes": 1, "xxh3": "0"}}), 2),
    "a manifest of another step": (manifest(step=2), 2),
    "no state": (remove("checkpoints/step_000004/driver/state.json"), 2),
}

# Messes that a resume refuses: name → (mess, what it says)
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "every checkpoint damaged": (
        every(cut(WEIGHTS, 3), remove("checkpoints/step_000002/manifest.json")),
        "step_000004: actor/model.safetensors has",
    ),
    "no checkpoint left": (
        every(*(remove(f"checkpoints/{name}") for name in SAVED)),
        "checkpoints holds no checkpoint",
    ),
    "checkpoints is a file": (file("checkpoints"), "checkpoints cannot be used: File exists"),
    "resolved.json cut short": (
        cut("resolved.json", 20),
        "resolved.json, which says what this run was started with, is",
    ),
    "resolved.json is a list": (write("resolved.json", "[]"), "holds a list"),
    "resolved.json is gone": (remove("resolved.json"), "resolved.json, which says what this run was started with"),
    "as_built.json cut short": (cut("as_built.json", 20), "as_built.json is cut short"),
    "as_built.json is a folder": (folder("as_built.json"), "as_built.json is not a file"),
    "as_built.json without ranks": (
        edit("as_built.json", lambda now: {**now, "actor": []}),
        "as_built.json does not say",
    ),
    "a bad line of metrics": (line("metrics.jsonl", 1, b'{"step": ' + TORN_CHARACTER), "metrics.jsonl:2 is not a line"),
    "metrics is a folder": (folder("metrics.jsonl"), "metrics.jsonl is not a file"),
    "samples is a folder": (folder("samples.jsonl"), "samples.jsonl is not a file"),
    "the lock is a pipe": (pipe(".lock"), ".lock is not a file"),
    "a folder where metrics are rewritten": (folder("metrics.jsonl.partial"), "metrics.jsonl.partial cannot be used"),
    "a folder where the spec is copied": (folder("spec.attempt_2.toml"), "spec.attempt_2.toml cannot be used"),
}
# What a mess may cost: the run's own files that a reader replaces.
OF_THE_RUN = ("metrics.jsonl", "samples.jsonl", "report.html", ".lock")


class Reached(RlctlError):
    """A resume got as far as starting processes, from this step."""

    exit_code = 0


@pytest.fixture
def resume(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], tuple[int, list[Any]]]:
    """Resume a run until its processes would be started: exit code, and the checkpoint that it found."""
    found: list[Any] = []
    find = train.find_checkpoint

    def noted(*args: Any) -> Any:
        found.append(find(*args))
        return found[-1]

    def start(*args: Any) -> None:
        raise Reached("here")

    monkeypatch.setattr(train, "find_checkpoint", noted)
    monkeypatch.setattr(train, "start", start)

    def run(run_dir: Path) -> tuple[int, list[Any]]:
        spec = str(run_dir.parent / "fake.toml")
        return main(["train", spec, "--run-dir", str(run_dir), "--resume", *OPTIONS]), found

    return run


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def inventory(run: Path) -> dict[str, bytes]:
    """Every file but those that a reader replaces."""
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and not path.name.startswith(OF_THE_RUN)
    }


def aside(name: str) -> str:
    """Where a damaged checkpoint is moved."""
    return name.replace("checkpoints/step", "checkpoints/torn_step")


def assert_nothing_lost(before: dict[str, bytes], run: Path) -> None:
    after = inventory(run)
    kept = {name: content for name, content in before.items() if ".tmp_" not in name and "/torn_" not in name}
    if "journal.jsonl" in kept:  # it only grows
        assert after["journal.jsonl"].startswith(kept.pop("journal.jsonl"))
    gone = [name for name, content in kept.items() if after.get(name, after.get(aside(name))) != content]
    assert gone == []


@pytest.mark.parametrize("mess", [*HARMLESS, *REFUSED])
def test_resume(run_dir, resume, capfd, mess):
    do, expected = (HARMLESS | REFUSED)[mess]
    do(run_dir)
    before = inventory(run_dir)
    steps = (run_dir / "metrics.jsonl").read_bytes() if (run_dir / "metrics.jsonl").is_file() else b""
    code, found = resume(run_dir)
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    assert_nothing_lost(before, run_dir)
    if mess in HARMLESS:
        assert code == 0, out + err
        assert found[0].path.name == f"step_{expected:06d}"
        kept = [json.loads(each)["step"] for each in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert kept[-1] <= expected
        return
    assert code == 2, out + err
    assert expected in err.replace("\n", " "), err
    assert "hint: " in err
    assert not steps or (run_dir / "metrics.jsonl").read_bytes() == steps, "no line of metrics is cut off"


@pytest.mark.parametrize("mess", [*HARMLESS, *REFUSED])
def test_report_check_and_export(run_dir, tmp_path, monkeypatch, capfd, mess):
    do, _ = (HARMLESS | REFUSED)[mess]
    do(run_dir)
    before = inventory(run_dir)
    page = write_report(run_dir)
    if page is not None:
        assert "</html>" in page.read_text()
    spec = str(tmp_path / "fake.toml")
    placed = ("--set", f'run.dir="{tmp_path}"', "--set", 'run.name="run"')
    assert main(["check-config", spec, *placed, *OPTIONS]) == 0
    proof = {"tensors": 1, "parameters": 1, "greedy_tokens": 1, "values": 0, "undecided_tokens": 0, "loaded": "memory"}
    monkeypatch.setattr(export, "_run", lambda *args: proof)
    code = main(["export-checkpoint", str(run_dir), str(tmp_path / "out")])
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    assert code == 0 or (code == 2 and "hint: " in err), out + err
    assert_nothing_lost(before, run_dir)


READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || exit 77; shift; exec "$@"'


def test_a_directory_that_became_read_only_is_named(finished):
    run = finished / "run"
    new_mounts = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    resume = [sys.executable, "-m", "rlctl", "train", finished / "fake.toml", "--run-dir", run, "--resume", *OPTIONS]
    command = [*new_mounts, "sh", "-c", READ_ONLY, "sh", run, *resume]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400, check=False)
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip(f"no mounts of its own: {done.stderr}")
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"{run}/.lock cannot be used: Read-only file system" in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr

"""Whatever lies in a run directory is input: each command that reads one says what is wrong with which file, and what
was good stays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import finish, preset, settings

from rlctl.cli import main
from rlctl.run import export, train
from rlctl.show.report import render
from specs.errors import RlctlError

STEPS, SAVED = 4, ("step_000002", "step_000004")
OPTIONS = settings(f"run.steps={STEPS}", "checkpoint.every=2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run beside its spec."""
    folder = tmp_path_factory.mktemp("finished")
    finish("train", preset("fake", folder), "--run-dir", folder / "run", *OPTIONS)
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir()) == list(SAVED)
    return folder


# ── messes ────────────────────────────────────────────────────────────────────────────────────────

Mess = Callable[[Path], object]
NEWEST = "checkpoints/step_000004/manifest.json"
WEIGHTS = "checkpoints/step_000004/actor/model.safetensors"
TORN_CHARACTER = "é".encode()[:1]


def change(name: str, make: Callable[[bytes], bytes]) -> Mess:
    return lambda run: (run / name).write_bytes(make((run / name).read_bytes()))


def cut(name: str, nbytes: int) -> Mess:
    """Take so many bytes from the end."""
    return change(name, lambda content: content[:-nbytes])


def append(name: str, content: bytes) -> Mess:
    return change(name, lambda before: before + content)


def retyped(name: str, **keys: Any) -> Mess:
    return change(name, lambda content: json.dumps({**json.loads(content), **keys}).encode())


def remove(*names: str) -> Mess:
    def do(run: Path) -> None:
        for path in (run / name for name in names):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return do


# Messes that change nothing: name → (mess, step that a resume continues from)
HARMLESS: dict[str, tuple[Mess, int]] = {
    "a copy under a later step": (
        lambda run: shutil.copytree(run / "checkpoints/step_000004", run / "checkpoints/step_000009"),
        4,
    ),
    "no as_built.json": (remove("as_built.json"), 4),
    "samples torn within a character": (append("samples.jsonl", b'{"step": 4, "prompt": "' + TORN_CHARACTER), 4),
    "metrics torn within a line": (cut("metrics.jsonl", 9), 4),
    "a damaged newest": (cut(WEIGHTS, 3), 2),
    "a manifest cut short": (cut(NEWEST, 40), 2),
    "a manifest with a number for a role": (retyped(NEWEST, roles={"actor": 4}), 2),
    "a journal with a number for a folder": (append("journal.jsonl", b'{"event": "start", "spec_dir": 4}\n'), 4),
    "a journal with a list for an attempt": (append("journal.jsonl", b'{"event": "end", "attempt": []}\n'), 4),
}

# Messes that a resume refuses: name → (mess, what it says)
REFUSED: dict[str, tuple[Mess, str]] = {
    "every checkpoint damaged": (
        remove(WEIGHTS, "checkpoints/step_000002/manifest.json"),
        "step_000004: actor/model.safetensors cannot be read: No such file",
    ),
    "no checkpoint left": (remove(*(f"checkpoints/{name}" for name in SAVED)), "checkpoints holds no checkpoint"),
    "resolved.json cut short": (cut("resolved.json", 20), "resolved.json is cut short"),
    "inputs.json of another make": (change("inputs.json", lambda content: b"{}"), "inputs.json has no files"),
    "inputs.json with a number for a file": (
        retyped("inputs.json", files={"data.train": 4}),
        "inputs.json has another files than rlctl writes",
    ),
    "a table as the run in forked_from.json": (
        lambda run: (run / "forked_from.json").write_text('{"run": {}, "step": 2}'),
        "forked_from.json has another run than rlctl writes",
    ),
    "forked_from.json cut short": (
        lambda run: (run / "forked_from.json").write_text('{"run": "'),
        "forked_from.json is cut short",
    ),
    "a bad line of metrics": (
        change("metrics.jsonl", lambda content: content.replace(b"\n", b'\n{"step": ' + TORN_CHARACTER + b"\n", 1)),
        "metrics.jsonl:2 is not a line",
    ),
    "a folder where the spec is copied": (
        lambda run: (run / "spec.attempt_2.toml").mkdir(),
        "spec.attempt_2.toml cannot be used",
    ),
}
OF_THE_RUN = ("metrics.jsonl", "samples.jsonl", "report.html", ".lock")  # files that a reader may replace


class Reached(RlctlError):
    """A resume got as far as starting processes."""

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


def inventory(run: Path) -> dict[str, bytes]:
    """Return every file but those that a reader may replace."""
    files = (path for path in run.rglob("*") if path.is_file() and not path.name.startswith(OF_THE_RUN))
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def assert_nothing_lost(before: dict[str, bytes], run: Path) -> None:
    after = inventory(run)
    assert after.pop("journal.jsonl").startswith(before["journal.jsonl"]), "it only grows"
    aside = {name: name.replace("checkpoints/step", "checkpoints/torn_step") for name in before}
    kept = {name: content for name, content in before.items() if name != "journal.jsonl"}
    assert [name for name, content in kept.items() if after.get(name, after.get(aside[name])) != content] == []


@pytest.mark.parametrize("mess", [*HARMLESS, *REFUSED])
def test_every_reader_says_what_is_wrong_and_what_was_good_stays(finished, tmp_path, resume, monkeypatch, capfd, mess):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    run, (do, expected) = tmp_path / "run", (HARMLESS | REFUSED)[mess]
    do(run)
    before, steps = inventory(run), (run / "metrics.jsonl").read_bytes()
    assert "</html>" in render(run)
    placed = settings(f'run.dir="{tmp_path}"', 'run.name="run"')
    assert main(["check-config", str(tmp_path / "fake.toml"), *placed, *OPTIONS]) == 0
    proof = {"tensors": 1, "parameters": 1, "greedy_tokens": 1, "values": 0, "undecided_tokens": 0, "loaded": "memory"}
    monkeypatch.setattr(export, "_run", lambda *args: proof)
    code = main(["export-checkpoint", str(run), str(tmp_path / "out")])
    out, err = capfd.readouterr()
    assert code == 0 or (code == 2 and "hint: " in err), out + err
    assert_nothing_lost(before, run)

    code, found = resume(run)
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    assert_nothing_lost(before, run)
    if mess in HARMLESS:
        assert code == 0, out + err
        assert found[0].path.name == f"step_{expected:06d}"
        kept = [json.loads(each)["step"] for each in (run / "metrics.jsonl").read_text().splitlines()]
        assert kept[-1] <= expected
        return
    assert code == 2, out + err
    assert expected in err.replace("\n", " "), err
    assert "hint: " in err
    assert (run / "metrics.jsonl").read_bytes() == steps, "no line of metrics is cut off"

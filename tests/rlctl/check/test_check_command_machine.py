"""What `check-config` finds beyond the spec: references, the run directory, disk."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from corpus import base, edited, write_case

from rlctl.check.check_command import check
from rlctl.check.findings import examine
from rlctl.check.meaning import as_dict
from rlctl.models.paths import BUILTIN_FOLDER
from rlctl.preflight.file_problems import file_problems
from rlctl.preflight.machine import checkpoint_bytes
from specs.load.load import spec_from


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ── the reference ─────────────────────────────────────────────────────────────────────────────────


ADAPTERS_OFF = "the actor without its adapters: no second model is loaded"
KL = {"algorithm.kl_coef": 0.1}
LORA = {"actor.lora": {}, "model.path": "./model", "model.from_scratch": False}


@pytest.mark.parametrize(
    ("sets", "wanted"),
    [
        ({}, {"needed": False, "loaded": False, "model": "", "why": "algorithm.kl_coef is 0: not loaded"}),
        (KL, {"needed": True, "loaded": True, "model": "builtin:tiny-digits", "why": "the actor's starting weights"}),
        ({**KL, **LORA}, {"needed": True, "loaded": False, "model": "", "why": ADAPTERS_OFF}),
        (
            {**KL, "ref": {"model": "./model", "devices": [2, 3], "processes": 2, "engine": {"kind": "fsdp2"}}},
            {"loaded": True, "model": "./model", "why": "set by ref.model", "engine": "fsdp2", "devices": [2, 3]},
        ),
    ],
)
def test_the_reference_is_named_with_the_reason(
    folder: Path, sets: dict[str, Any], wanted: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write_case({"set": sets, "model": {}}, folder)
    found = examine(spec, ())
    assert found.problems == []
    reference = as_dict(found, spec)["reference"]
    assert {name: reference[name] for name in wanted} == wanted
    assert found.spec is not None
    assert ("ref" in found.spec.roles) == reference["loaded"]
    assert check(spec, (), as_json=False) == 0
    assert f"ref    {wanted['model'] or wanted['why']}" in capsys.readouterr().out


# ── the run directory, ports, disk ────────────────────────────────────────────────────────────────


def test_a_run_that_is_going_on_is_named(folder: Path) -> None:
    spec = write_case({"files": {"runs/test/.lock": "4711", "runs/test/resolved.json": "{}"}}, folder)
    with (folder / "runs/test/.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (warning,) = examine(spec, ()).warnings
    assert "in use by another rlctl (process 4711)" in warning.message
    (warning,) = examine(spec, ()).warnings
    assert "it has no checkpoint yet" in warning.message


@pytest.mark.parametrize("times", [1.1, 0.9])
def test_room_for_checkpoints(folder: Path, monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    spec = spec_from(edited(base(), {"run.steps": 100}))
    each = checkpoint_bytes(spec, json.loads((BUILTIN_FOLDER / "tiny-digits" / "config.json").read_text()))
    assert each == 12 * 299_904  # what the quickstart says the tiny model has; weights and two moments in fp32
    usage = shutil.disk_usage(folder)._replace(free=int(3 * each * times))
    monkeypatch.setattr("rlctl.preflight.machine.shutil.disk_usage", lambda _: usage)
    errors, warnings = file_problems(spec, folder)
    assert (len(errors), warnings) == (times < 1, [])
    assert all("3 checkpoints of 0.00335 GiB take 0.0101 GiB" in str(problem) for problem in errors)
    (folder / "other/checkpoints/step_000005").mkdir(parents=True)  # those of a run to resume are there already
    assert file_problems(spec, folder, starting=True, run_dir=folder / "other") == ([], [])
    monkeypatch.setattr("rlctl.preflight.machine.shutil.disk_usage", lambda _: usage._replace(free=1))
    assert file_problems(spec, folder, saves=False) == ([], [])  # an evaluation writes none
    for keep, can_be_lowered in ((2, True), (1, False)):
        ((error,), _) = file_problems(spec_from(edited(base(), {"checkpoint.keep": keep})), folder)
        assert ("lower it" in error.hint) == can_be_lowered


# ── strict ────────────────────────────────────────────────────────────────────────────────────────


def test_strict_makes_warnings_errors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = write_case({"set": {"actor.optimizer.lr": 0.0}}, folder)
    assert check(spec, (), as_json=False) == 0
    assert "warning: actor.optimizer.lr = 0.0" in capsys.readouterr().out
    assert check(spec, (), as_json=True, strict=True) == 2
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["warnings"]) == (False, [])
    assert [problem["key"] for problem in found["problems"]] == ["actor.optimizer.lr"]

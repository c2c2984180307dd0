"""What `check-config` finds beyond the spec: references, the run directory, disk, ports; that it changes nothing."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpus import base, edited, write_case, write_model

from rlctl.check.check_command import check
from rlctl.check.findings import examine
from rlctl.check.meaning import as_dict
from rlctl.models.paths import BUILTIN_FOLDER
from rlctl.preflight.file_problems import file_problems
from rlctl.preflight.machine import checkpoint_bytes
from rlctl.presets import presets, write_preset
from rlctl.processes.placement import make_plan
from specs.load.load import spec_from


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listing(folder: Path) -> dict[str, float]:
    return {str(file): file.stat().st_mtime_ns for file in sorted(folder.rglob("*"))}


# ── the reference ─────────────────────────────────────────────────────────────────────────────────


ADAPTERS_OFF = "the actor without its adapters: no second model is loaded"
KL = {"algorithm.kl_coef": 0.1}
LORA = {"actor.lora": {}, "model.path": "./model", "model.from_scratch": False}


@pytest.mark.parametrize(
    ("sets", "wanted"),
    [
        ({}, {"needed": False, "loaded": False, "model": "", "why": "algorithm.kl_coef is 0: not loaded"}),
        (KL, {"needed": True, "loaded": True, "model": "builtin:tiny-digits", "why": "the actor's starting weights"}),
        (
            {**KL, **LORA},
            {"needed": True, "loaded": False, "model": "", "why": ADAPTERS_OFF},
        ),
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


def test_a_larger_reference_has_its_own_devices_and_engine(folder: Path) -> None:
    ref = {"model": "./model", "devices": [2, 3], "processes": 2, "launcher": "torchrun", "engine": {"kind": "fsdp2"}}
    spec = spec_from(edited(base(), {**KL, "actor.devices": [0], "rollout.devices": [0], "ref": ref}))
    plan = make_plan(spec, folder)
    assert (plan.role("ref").devices, plan.role("actor").devices) == ((2, 3), (0,))
    assert plan.role("ref").env["CUDA_VISIBLE_DEVICES"] == "2,3"


# ── the run directory, ports, disk ────────────────────────────────────────────────────────────────


def test_a_run_that_is_going_on_is_named(folder: Path) -> None:
    spec = write_case({"files": {"runs/test/.lock": "4711", "runs/test/resolved.json": "{}"}}, folder)
    with (folder / "runs/test/.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (warning,) = examine(spec, ()).warnings
    assert "in use by another rlctl (process 4711)" in warning.message
    (warning,) = examine(spec, ()).warnings
    assert "it has no checkpoint yet" in warning.message


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_in_use_is_a_warning_and_refuses_a_start(folder: Path, taken_port: int) -> None:
    (folder / "hosts").write_text("a slots=1\nb slots=1\n")
    nodes = {"actor": {"nodes": 2, "processes": 2, "launcher": "torchrun"}, "cluster": {"hostfile": "hosts"}}
    spec = spec_from(edited(edited(base(), nodes), {"cluster.port": taken_port}))
    errors, (warning,) = file_problems(spec, folder)
    assert errors == []
    assert (warning.key, warning.value) == ("cluster.port", str(taken_port))
    assert file_problems(spec, folder, starting=True)[0] == [warning]


@pytest.mark.parametrize(("times", "errors"), [(1.1, 0), (0.9, 1)])
def test_room_for_checkpoints(folder: Path, monkeypatch: pytest.MonkeyPatch, times: float, errors: int) -> None:
    spec = spec_from(edited(base(), {"run.steps": 100}))
    config = json.loads((BUILTIN_FOLDER / "tiny-digits" / "config.json").read_text())
    each = checkpoint_bytes(spec, config)
    assert each == 12 * 299_904  # what the quickstart says the tiny model has; weights and two moments in fp32
    usage = shutil.disk_usage(folder)._replace(free=int(3 * each * times))
    monkeypatch.setattr("rlctl.preflight.machine.shutil.disk_usage", lambda _: usage)
    found = file_problems(spec, folder)
    assert (len(found[0]), len(found[1])) == (errors, 0)
    assert all("3 checkpoints of 0.00335 GiB take 0.0101 GiB" in str(problem) for problem in found[0])


def test_checkpoints_of_a_run_to_resume_are_there_already(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_from(edited(base(), {"run.steps": 100}))
    usage = shutil.disk_usage(folder)._replace(free=2 * 12 * 299_904)
    monkeypatch.setattr("rlctl.preflight.machine.shutil.disk_usage", lambda _: usage)
    (problem,) = file_problems(spec, folder)[0]
    assert problem.message.startswith("3 checkpoints of")
    for step in (5, 10):
        (folder / "other/checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    assert file_problems(spec, folder, starting=True, run_dir=folder / "other") == ([], [])


# ── strict, and nothing changes ───────────────────────────────────────────────────────────────────


def test_strict_makes_warnings_errors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = write_case({"set": {"actor.optimizer.lr": 0.0}}, folder)
    assert check(spec, (), as_json=False) == 0
    assert "warning: actor.optimizer.lr = 0.0" in capsys.readouterr().out
    assert check(spec, (), as_json=True, strict=True) == 2
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["warnings"]) == (False, [])
    assert [problem["key"] for problem in found["problems"]] == ["actor.optimizer.lr"]
    assert found["roles"]
    (folder / "fine").mkdir()
    assert check(write_case({}, folder / "fine"), (), as_json=True, strict=True) == 0


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_preset_gives_no_problem_and_warns_of_this_machine_only(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    spec = folder / "spec.toml"
    write_preset(name, spec, force=False)
    (folder / "data/gsm8k").mkdir(parents=True)
    rows = [json.dumps({"question": f"1+{n}?", "answer": f"#### {n + 1}"}) for n in range(100)]
    (folder / "data/gsm8k/train.jsonl").write_text("\n".join(rows))
    if name == "distill-cpu":
        write_model(folder / "teacher", {}, "tiny-digits", {})
    nodes = max(map(int, re.findall(r"^nodes = (\d+)", spec.read_text(), re.MULTILINE)), default=1)
    (folder / "hosts").write_text("".join(f"host{number} slots=8\n" for number in range(nodes)))
    before = listing(folder)
    found = examine(spec, (), elsewhere=True)
    assert found.problems == []
    of_this_machine = (
        "this machine has no NVIDIA driver",
        "will be downloaded",
        "no such interpreter",
        "not installed",
    )
    others = [str(one) for one in found.warnings if not any(words in one.message for words in of_this_machine)]
    assert others == []
    assert listing(folder) == before

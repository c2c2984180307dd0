"""An engine that another package brings: checked, explained, planned and trained with, as rlctl's own are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import running
from foreign_package import install
from running import REPO, metrics, preset
from running import warm_rlctl as rlctl

SHOUT = ("--set", "actor.engine.kind=shout")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH with the package on it."""
    return f"{REPO}{os.pathsep}{install(tmp_path_factory.mktemp('site'))}"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    return preset("fake", tmp_path)


def check(site: str, spec: Path, *sets: str) -> tuple[int, dict[str, object]]:
    options = [part for key in sets for part in ("--set", key)]
    done = rlctl("check-config", spec, "--json", *options, PYTHONPATH=site)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_it_trains(site: str, spec: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("--set", 'actor.engine.words=["now", "learn"]', "--set", "actor.engine.times=2")
    steps = ("--set", "run.steps=2", "--run-dir", run)
    done = running.rlctl("train", spec, *SHOUT, *words, *steps, PYTHONPATH=site)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in metrics(run) if line["step"] > 0] == [1, 2]
    assert "now learn now learn\n" in (run / "logs" / "attempt_1" / "actor" / "rank0.log").read_text()
    resolved = json.loads((run / "resolved.json").read_text())
    assert resolved["actor"]["engine"] == {"kind": "shout", "words": ["now", "learn"], "times": 2}
    assert json.loads((run / "as_built.json").read_text())["actor"][0]["engine"] == "shout"


def plan(site: str, spec: Path, *options: str | Path) -> Any:
    done = rlctl("plan", spec, "--json", "--host-GiB", "100", *options, PYTHONPATH=site)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_a_table_answers_for_its_engine(site: str, spec: Path) -> None:
    """Checked, shown and planned by what `ToyTable` says."""
    toy = ("--set", "actor.engine.kind=toy")
    _, found = check(site, spec, "actor.engine.kind=toy", "actor.processes=2", "actor.launcher=torchrun")
    role: Any = found["roles"]
    assert role["actor"]["not_known"] == []
    assert role["actor"]["attn_implementation"] is None
    mesh: Any = found["placement"]
    assert (mesh["actor"]["replicate"], mesh["actor"]["shard"]) == (1, 2)

    planned = plan(site, spec, *toy)["roles"]["actor"]
    lean = plan(site, spec, *toy, "--set", "actor.engine.lean=true")["roles"]["actor"]
    (whole,), (less,) = ([part["bytes"] for part in role["parts"] if part["exact"]] for role in (planned, lean))
    assert whole > 0
    assert less * 16 == whole * 12
    assert planned["not_known"] == []


def test_what_a_table_leaves_open_is_not_known(site: str, tmp_path: Path) -> None:
    """No zeros, no claim that it fits, none about attention, mesh or packages."""
    spec = preset("quickstart", tmp_path)
    silent = ("--set", "actor.engine.kind=plain")
    code, found = check(site, spec, "actor.engine.kind=plain", "actor.processes=2", "actor.launcher=torchrun")
    assert code == 0
    actor: Any = found["roles"]
    open_ = ["packages it needs", "attention", "shape of the model it builds", "mesh", "memory", "checkpoint format"]
    assert actor["actor"]["not_known"] == open_
    assert actor["actor"]["attn_implementation"] is None
    assert "not known" in actor["actor"]["attn_why"]
    assert actor["rollout"]["not_known"] == []
    mesh: Any = found["placement"]
    assert mesh["actor"] == {"replicate": None, "shard": None, "sequence": None, "ranks": []}
    shown = rlctl("check-config", spec, *silent, PYTHONPATH=site).stdout
    assert "not known of the engine plain (actor)" in shown

    planned = plan(site, spec, *silent)
    assert planned["fits"] is None
    assert planned["problems"] == []
    about = planned["roles"]["actor"]
    assert about["not_known"] == ["weights and all that follows from them", "activations"]
    assert (about["phases"], about["host_phases"], about["measurable_peak"]) == (None, None, None)
    (host,) = planned["places"]
    assert (host["not_known"], host["fits"]) == (["actor"], None)
    said = rlctl("plan", spec, *silent, "--host-GiB", "100", PYTHONPATH=site).stdout
    assert "not known whether it fits: at least" in said
    assert "node 0: fits" not in said
    too_small = rlctl("plan", spec, *silent, "--host-GiB", "0.5", PYTHONPATH=site).stdout
    assert "does not fit" in too_small


@pytest.mark.parametrize(
    ("kind", "changes", "key", "words"),
    [
        ("shout", ["actor.engine.word=[]"], "actor.engine.word", "did you mean `words`?"),
        ("shout", ["actor.engine.times=0"], "actor.engine.times", "must be greater than 0"),
        ("plain", ["actor.engine.words=[]"], "actor.engine.words", "unknown key"),
        (
            "toy",
            ["algorithm.kl_coef=0.1", "ref.engine.kind=toy", "ref.engine.lean=true"],
            "ref.engine.lean",
            "nothing learns",
        ),
        (
            "plain",
            ["actor.processes=2", "actor.launcher=torchrun", "actor.sequence_parallel=2"],
            "actor.sequence_parallel",
            "the ranks of the engine plain cannot share samples",
        ),
        ("broken", [], "actor.engine", "'shout_engine.nowhere:Table' of the package shout-engine cannot be imported"),
        ("stranger", [], "actor.engine", "of the package shout-engine has no `kind: Literal['stranger']`"),
    ],
)
def test_what_is_wrong_with_it_is_named(
    site: str, tmp_path: Path, kind: str, changes: list[str], key: str, words: str
) -> None:
    """Its own model, its rules, what it leaves open, or a broken package say so."""
    spec = preset("quickstart" if kind == "plain" else "fake", tmp_path)
    code, found = check(site, spec, f"actor.engine.kind={kind}", *changes)
    (problem,) = found["problems"]  # type: ignore[misc]
    assert (code, problem["key"]) == (2, key)
    assert words in f"{problem['message']} {problem['hint']}"


def test_nobody_looks_for_packages_who_needs_none(site: str, spec: Path) -> None:
    """Reading a spec of rlctl's own engines does not import the package; its table brings no torch."""
    code = (
        "import sys; from pathlib import Path; from specs.load.load import load_spec; path = Path(sys.argv[1]);"
        "load_spec(path); assert 'shout_engine' not in sys.modules;"
        "load_spec(path, ['actor.engine.kind=shout']); assert 'shout_engine.table' in sys.modules;"
        "assert 'shout_engine.engine' not in sys.modules and 'torch' not in sys.modules"
    )
    env = {**os.environ, "PYTHONPATH": site}
    done = subprocess.run([sys.executable, "-c", code, spec], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr

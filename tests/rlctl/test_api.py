"""`import rlctl`: what it costs, and what its functions are beside the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import REPO, preset

import rlctl
from specs.errors import RlctlError, UsageError
from specs.load.overrides import assignments, parse_value


def test_the_import_costs_nothing() -> None:
    code = "import sys, rlctl; print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'pydantic', "
    code += "'numpy', 'rich', 'typer', 'specs'}), 'train' in dir(rlctl))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, check=True)
    assert done.stdout.split("\n")[0] == "[] True"
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = rlctl.trian


@pytest.mark.parametrize(
    "value",
    [3, 1e-06, True, "a b", 'quote " and \\', "new\nline", "Ü\x7f", [1, 2], ["a", 2.5], {"every": 2, "a b": ["x"]}, {}],
)
def test_values_arrive_as_they_are(value: Any) -> None:
    (text,) = assignments({"eval__sets": value})
    key, _, written = text.partition("=")
    assert (key, parse_value(written)) == ("eval.sets", value)


@pytest.mark.parametrize(
    "value", [np.int64(3), np.float64(1e-6), np.float32(0.5), np.bool_(True), [np.int64(1), 2], np.array([1, 2])]
)
def test_numpys_numbers_are_numbers(value: Any) -> None:
    (text,) = assignments({"eval__sets": value})
    assert text == f"eval.sets={json.dumps(np.array(value).tolist())}"


def test_what_toml_cannot_say_is_refused() -> None:
    with pytest.raises(UsageError, match="run__steps: NoneType is nothing that a spec can hold"):
        assignments({"run__steps": None})


@pytest.mark.usefixtures("warm_children")
def test_a_script_checks_trains_and_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """With engines that need no torch."""
    preset("fake", tmp_path).rename(tmp_path / "sort.toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    checked = rlctl.check_config("sort.toml", run__steps=4)
    assert checked.ok, checked.problems
    run = rlctl.train("sort.toml", run__steps=4, eval={"every": 4, "prompts": 4})
    assert "result: " not in capsys.readouterr().out, "that line is for programs that call the command"
    assert run == tmp_path / "runs" / "fake"
    assert [line["step"] for line in rlctl.load_metrics(run)] == [0, 1, 2, 3, 4]
    assert {sample["step"] for sample in rlctl.load_samples(run)} == {1, 2, 3, 4}
    found = rlctl.evaluate(run, eval__samples_per_prompt=2, eval__temperature=1.0)
    assert (found.step, found.sets["heldout"].keys() >= {"reward_mean", "length_mean"}) == (4, True)
    assert (found.folder / "eval.jsonl").is_file()
    assert rlctl.report(run) == run / "report.html"
    assert rlctl.report(run, found.folder, out="both.html").is_file()
    assert "engine is fake" in rlctl.check_config("sort.toml", model__path=str(run)).problems[0].message
    with pytest.raises(RlctlError):
        rlctl.export(run, tmp_path / "out", step=3)
    for call in (rlctl.report, lambda: rlctl.export(run, tmp_path / "out", dtype="fp16")):
        with pytest.raises(UsageError, match=r"no run is named|dtype is one of bf16, fp32"):
            call()
    with pytest.raises(UsageError, match="only with --resume"):
        rlctl.train("sort.toml", accept_changed_files=True)
    assert [problem.key for problem in rlctl.check_config("sort.toml", run__stepz=4).problems] == ["run.stepz"]


@pytest.mark.usefixtures("warm_children")
def test_threads_train_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread but the main one may set signal handlers: a run in another is done without."""
    spec = preset("fake", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    with ThreadPoolExecutor() as pool:
        begun = [pool.submit(rlctl.train, spec, run_dir=tmp_path / name, run__steps=2) for name in "ab"]
    runs = [each.result() for each in begun]
    rewards = [[line["reward/mean"] for line in rlctl.load_metrics(run)] for run in runs]
    assert rewards[0] == rewards[1]

"""`import rlctl`: what it costs, and what its functions are beside the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import REPO, preset

import rlctl
from specs.errors import RunDirError, SpecError, UsageError
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


def test_what_toml_cannot_say_is_refused() -> None:
    with pytest.raises(UsageError, match="run__steps: NoneType is nothing that a spec can hold"):
        assignments({"run__steps": None})


def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Its first block, with a spec of engines that need no torch."""
    (tmp_path / "sort.toml").write_text(preset("fake", tmp_path).read_text())
    (code,) = re.findall(r"```python\n(.*?)```", (REPO / "docs" / "python.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    here: dict[str, Any] = {}
    exec(code.replace(", actor__optimizer__lr=3e-4", ', eval={"every": 4, "prompts": 4}'), here)
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith("4 0.0")
    assert "result: " not in said, "that line is for programs that call the command"
    assert here["run"] == tmp_path / "runs" / "fake"
    assert [line["step"] for line in here["lines"]] == [0, 1, 2, 3, 4]
    checked = rlctl.check_config("sort.toml", run__stepz=4)
    assert [problem.key for problem in checked.problems] == ["run.stepz"]
    assert repr(here["checked"]) == "ok", "what a notebook shows of it"
    assert re.fullmatch(r"error: run\.stepz = 4: unknown key\n  hint: .*\n1 problem", repr(checked))
    with pytest.raises(SpecError, match=r"run\.stepz"):
        rlctl.train("sort.toml", run__stepz=4)
    with pytest.raises(RunDirError, match="holds no metrics"):
        rlctl.load_metrics(tmp_path)

"""Code of environments is the user's code like a reward function: found, recorded with the run, compared on hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from corpus import write_case

from rlctl.preflight.reward_files import function_problems, scorer_code
from rlctl.processes.hosts import _files_of
from rlctl.run.input_files import changes, inputs_of
from specs.load.load import load_spec
from specs.schema.roles import ACTOR, REWARD

FILES = {"r.py": "def score(completion):\n    return 1.0\n", "e.py": "import helper\nclass Shop:\n    pass\n"}
FILES |= {"helper.py": "", "t.py": "def add():\n    pass\n"}
ENVIRONMENTS: list[dict[str, Any]] = [
    {"name": "a", "path": "e.py:Shop"},
    {"name": "b", "tools": ["mcp:python server.py", "t.py:add"]},
    {"name": "c", "agent": "gone.py:run"},
]


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    sets = {"environment": ENVIRONMENTS, "data.environment_column": "kind"}
    terms = {"reward.terms": [{"kind": "function", "path": "r.py:score"}]}
    return write_case({"set": {**sets, **terms}, "files": FILES}, tmp_path)


def test_code_of_environments_is_known_by_its_keys(spec_file: Path) -> None:
    spec = load_spec(spec_file)
    assert scorer_code(spec) == {
        "reward.terms.0.path": "r.py:score",
        "environment.0.path": "e.py:Shop",
        "environment.1.tools.1": "t.py:add",
        "environment.2.agent": "gone.py:run",
    }
    (problem,) = function_problems(spec, spec_file.parent)
    assert (problem.key, "no such file" in problem.message) == ("environment.2.agent", True)


def test_it_is_recorded_with_the_run_and_must_be_the_same_on_every_host(spec_file: Path) -> None:
    spec, folder = load_spec(spec_file), spec_file.parent
    before = inputs_of(spec, folder)
    assert {*before["environment.0.path"]} == {"e.py", "helper.py"}
    names = {Path(path).name for path in _files_of(REWARD, spec, folder)}
    assert names == {"r.py", "e.py", "helper.py", "t.py"}
    assert _files_of(ACTOR, spec, folder) == {}
    (folder / "helper.py").write_text("LIMIT = 1\n")
    (change,) = changes(before, inputs_of(spec, folder))
    assert change.startswith("environment.0.path: helper.py has other content")

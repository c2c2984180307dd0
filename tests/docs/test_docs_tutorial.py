"""The tutorial runs as it stands, with fewer steps, up to its last section, which needs vLLM."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
from running import REPO, finish
from test_docs import FENCE

from specs.load.toml_file import written

FEWER = {"run.steps=20": "run.steps=2", "run.steps=40": "run.steps=4"}
pytestmark = pytest.mark.slow


def change(spec: Path, changes: str) -> None:
    """Change the keys in a spec that a block of the tutorial names."""
    tables = tomli.loads(spec.read_text())
    for name, table in tomli.loads(changes).items():
        tables[name] = {**tables.get(name, {}), **table}
    lines = [f"schema = {tables.pop('schema')}"]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {written(value)}" for key, value in table.items())]
    spec.write_text("\n".join(lines))


def test_the_tutorial_runs(tmp_path: Path) -> None:
    text, _, _ = (REPO / "docs" / "tutorial.md").read_text(encoding="utf-8").partition("## In vLLM")
    scripts, said = iter(("make_data.py", "reward.py", "ask.py")), ""
    for kind, block in FENCE.findall(text):
        if kind == "python":
            (tmp_path / next(scripts)).write_text(block)
        elif kind == "toml":
            change(tmp_path / "next.toml", block)
        lines = [line.removeprefix("$ ") for line in block.splitlines() if kind == "bash" or line.startswith("$ ")]
        for program, *words in map(shlex.split, lines):
            if program == "rlctl":
                said += finish(*(FEWER.get(word, word) for word in words), cwd=tmp_path).stdout
            else:
                command = [sys.executable if program == "python" else program, *words]
                done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
                assert done.returncode == 0, done.stderr
                said += done.stdout
    for words in ('completion  "7422"', "score       1", "ok: next.toml", "pass@4", "proven: loads", "3142 → "):
        assert words in said
    assert "step 4/4" in said, "the fork and the resume end where they are told"

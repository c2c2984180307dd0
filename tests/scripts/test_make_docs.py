"""The reference says what the schema says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from specs.load.keys import walk
from specs.schema.recipes import RECIPES
from specs.schema.spec import Spec
from specs.schema.table import meaning_of

ROOT = Path(__file__).resolve().parents[2]


def test_drift_is_noticed(tmp_path: Path) -> None:
    names = {"spec.md": "group", "coming-from.md": "group", "engines.md": "Mixtral"}
    for name, word in names.items():
        (tmp_path / name).write_text((ROOT / "docs" / name).read_text().replace(word, word[::-1], 1))
    command = [sys.executable, ROOT / "scripts" / "make_docs.py", "--check", "--docs", tmp_path]
    drifted = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert drifted.returncode == 1
    assert [name for name in names if name in drifted.stderr] == [*names]


def test_every_key_is_explained() -> None:
    text = (ROOT / "docs" / "spec.md").read_text()
    for key, table in (found for recipe in RECIPES.values() for found in walk(recipe)):
        field = next(name for name, f in table.model_fields.items() if (f.alias or name) == key.rpartition(".")[2])
        section = issubclass(table, Spec)
        assert meaning_of(table, field) or section or key.endswith("kind"), f"{key} has no description"
        assert f"`{key.rpartition('.')[2]}`" in text or section, key

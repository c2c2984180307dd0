"""The reference says what the schema says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from specs.load.keys import homes, known_keys, walk
from specs.schema.roles import ROLES
from specs.schema.spec import Spec

ROOT = Path(__file__).resolve().parents[2]


def make_docs(*arguments: str, script: Path = ROOT / "scripts" / "make_docs.py") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=60)


def test_the_reference_has_not_drifted() -> None:
    done = make_docs("--check")
    assert done.returncode == 0, done.stderr


def test_drift_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "docs").mkdir()
    for folder in ("specs", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "docs" / "models.md").write_text((ROOT / "docs" / "models.md").read_text())
    script = tmp_path / "scripts" / "make_docs.py"
    script.write_text((ROOT / "scripts" / "make_docs.py").read_text())
    text = (ROOT / "docs" / "spec.md").read_text()
    (tmp_path / "docs" / "spec.md").write_text(text)
    assert make_docs("--check", script=script).returncode == 0
    (tmp_path / "docs" / "spec.md").write_text(text.replace("group_size", "groupsize", 1))
    assert make_docs("--check", script=script).returncode == 1


def test_every_key_is_explained() -> None:
    text = (ROOT / "docs" / "spec.md").read_text()
    for key, table in walk():
        field = next(f for name, f in table.model_fields.items() if (f.alias or name) == key.rpartition(".")[2])
        section = key in known_keys(Spec)
        assert field.description or section or key.endswith("kind"), f"{key} has no description"
        assert f"`{key.rpartition('.')[2]}`" in text or section, key


def test_keys_know_where_they_belong() -> None:
    assert homes()["lr"] == ("actor.optimizer.lr", "critic.optimizer.lr")
    assert set(homes()["micro_batch_tokens"]) == {
        f"{role}.micro_batch_tokens" for role in ROLES if ROLES[role].is_trainer
    }
    assert "reward.terms.N.pattern" in homes()["pattern"]


def test_synonyms_point_at_keys_that_exist() -> None:
    from specs.load.synonyms import SYNONYMS

    known = {key for key, _ in walk()}
    assert set(SYNONYMS.values()) <= known
    assert not set(SYNONYMS) & set(homes()), "a synonym hides a real key"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_the_files_that_a_guide_names_are_there(page: str) -> None:
    """With their folder, or, after one that has it, without."""
    named = re.findall(r"`((?:\w+/)*[\w*]+\.py)`", (ROOT / page).read_text())
    assert len(named) > 5
    folders = ("rlctl", "workers", "backends", "specs", "tests", "scripts")
    places = {name: [name] if "/" in name else [f"{folder}/**/{name}" for folder in folders] for name in named}
    assert [name for name, tried in places.items() if not any(path for one in tried for path in ROOT.glob(one))] == []

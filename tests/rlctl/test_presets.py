"""Every spec that ships is valid, from any folder, and says in its first line what it is."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from corpus import write_model

from rlctl.check.findings import examine
from rlctl.preflight.file_problems import file_problems
from rlctl.presets import presets, summary, write_preset
from specs.errors import UsageError
from specs.load.load import load_spec
from specs.schema.role_section import ModelRole
from specs.schema.roles import ROLES


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_sound_from_any_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said against it, on this machine too where that has what it needs, and nothing is written."""
    file, elsewhere = tmp_path / "spec.toml", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    write_preset(name, file, force=False)
    spec = load_spec(file)
    if name == "gsm8k-cpu":  # the person brings the data
        rows = tmp_path / spec.data.train
        rows.parent.mkdir(parents=True)
        made = [json.dumps({"question": f"1+{n}?", "answer": f"#### {n + 1}"}) for n in range(100)]  # 16 are held out
        rows.write_text("\n".join(made))
    if name == "distill-cpu":  # the quickstart's export
        write_model(tmp_path / spec.ref.model, {}, "tiny-digits", {})
    if name in ("agent-cpu", "game-cpu", "tools-cpu"):  # the warm-up's checkpoint
        write_model(tmp_path / spec.model.path, {}, "tiny-chat", {})
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    found = examine(file, (), elsewhere=True)
    assert found.problems == []
    assert found.warnings == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert spec.run.name == name
    assert 20 < len(summary(presets()[name])) < 120
    if not spec.lead_section.devices:
        for section in (spec.role(role) for role in spec.roles if ROLES[role].holds_model):
            if not installed(section):
                pytest.skip(f"the engine {section.engine.kind} is not installed here")
        assert file_problems(spec, tmp_path) == ([], [])


def installed(section: ModelRole) -> bool:
    """Tell whether this machine has the interpreter that a role names, or else the packages of its engine."""
    return Path(section.python).exists() if section.python else all(map(find_spec, section.engine.packages or ()))


@pytest.mark.parametrize("here", [True, False])
def test_interpreters_are_named_as_seen_from_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    monkeypatch.setattr("rlctl.presets.environments", lambda: tmp_path)
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "spec.toml" if here else tmp_path / "elsewhere" / "spec.toml"
    write_preset("vllm-cpu", file, force=False)
    python = ".venv-vllm/bin/python" if here else str(tmp_path / ".venv-vllm" / "bin" / "python")
    assert load_spec(file).rollout.python == python


def test_the_gsm8k_preset_fits_the_real_rows(tmp_path: Path) -> None:
    folder = os.environ.get("RLCTL_TEST_DATA")
    if not folder:
        pytest.skip("RLCTL_TEST_DATA is not set")
    write_preset("gsm8k-cpu", tmp_path / "spec.toml", force=False)
    spec = load_spec(tmp_path / "spec.toml", [f"data.train={folder}/gsm8k/train.jsonl"])
    assert file_problems(spec, tmp_path) == ([], [])


def test_unwritable_targets_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        write_preset("fake", tmp_path, force=True)

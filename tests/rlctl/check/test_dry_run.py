"""What a preset for a large machine would start there, compared with the text in `golden/`.

After a wanted change: RLCTL_WRITE_GOLDEN=1 pytest tests/rlctl/check/test_dry_run.py, and read the difference.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from rlctl.check.dry_run import dry_run
from rlctl.presets import write_preset
from specs.packages import package_root

GOLDEN = Path(__file__).parent / "golden"
ENGINES = ("vllm", "megatron")


def shown(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The dry run of a preset on 64 cores, with what belongs to this machine named; its warnings are left out."""
    spec = folder / "spec.toml"
    write_preset(name, spec, force=False)
    dry_run(spec, [])
    text = capsys.readouterr().out.partition("\nwarning: ")[0]
    text = re.sub(r"\[every role\].*?\n\n", "", text, flags=re.DOTALL)  # of the shell that the test runs in
    return text.replace(sys.executable, "PYTHON").replace(str(package_root()), "RLCTL")


@pytest.mark.parametrize("golden", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_a_preset_starts_what_it_did(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLCTL_CPU_CORES", "64")
    for name in ("PYTHONPATH", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for engine in ENGINES:
        python = f".venv-{engine}/bin/python"
        if python in golden.read_text() and not (package_root() / python).exists():
            pytest.skip(f"scripts/setup-engine {engine} makes .venv-{engine}")
    text = shown(golden.stem, tmp_path, capsys)
    if os.environ.get("RLCTL_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()

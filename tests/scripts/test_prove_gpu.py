"""What prove-gpu counts is right, and its parts work: on the CPU, at toy size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from _gpu_parts import PARTS, toy_size  # noqa: E402


def prove(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "scripts" / "prove-gpu", *arguments]
    environment = {**os.environ, "RLCTL_PYTHON": sys.executable}
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = prove()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("No GPU here: ")


@pytest.mark.parametrize("name", ["device", "weights", "decode", "train-0.5B", "run-host"])
def test_a_part_works(tmp_path: Path, name: str, warm_children: None) -> None:
    part = next(part for part in PARTS if part.name == name)
    assert part.skip() is None
    found = json.loads(json.dumps(part.run(toy_size(), tmp_path / name)))
    assert "failed" not in found, found
    rows = dict(part.rows(found))
    assert rows
    assert all(value for value in rows.values())
    if name == "run-host":
        assert len(found["steps"]) == toy_size().steps
        assert all(step["sync/GB_per_s"] > 0 for step in found["steps"])
    if name == "train-0.5B":
        sides = found["sides"]
        ours, plain = sides["rlctl ddp, sdpa"], sides["Hugging Face loop, sdpa"]
        assert ours["tokens_per_s"] > 0
        assert abs(ours["first_loss"] - plain["first_loss"]) < 1e-4, "both sides do the same work"


def test_a_part_that_takes_too_long_is_ended_and_the_rest_is_said(tmp_path: Path) -> None:
    done = prove("--rehearse", "--only", "device", "--only", "decode", "--out", tmp_path, "--limit", "11")
    record = json.loads((tmp_path / "prove-gpu.json").read_text())
    assert record["parts"]["device"]["state"] in ("passed", "timed out")
    assert record["parts"]["decode"]["state"] == "skipped"
    assert "s were left of 11" in done.stdout

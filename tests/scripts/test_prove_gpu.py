"""What prove-gpu counts is right, and its parts work: on the CPU, at toy size."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated_device.child import in_every_rank, on_simulated_device

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import _gpu_parts  # noqa: E402
import prove_gpu  # noqa: E402
from _gpu_parts import PARTS, Part, toy_size  # noqa: E402


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["prove-gpu"])
    assert prove_gpu.main() == 0
    assert capsys.readouterr().out.startswith("No GPU here: ")


@pytest.mark.timeout(300)
def test_a_run_with_vllm_works(tmp_path: Path, warm_children: None) -> None:
    """On the CPU: of the runs the one that no simulated device can show."""
    part = next(part for part in PARTS if part.name == "run-vllm")
    if why := part.skip():
        pytest.skip(why)
    found = json.loads(json.dumps(part.run(toy_size(), tmp_path / part.name)))
    assert_proven(part, found)
    assert all(step["sync/GB_per_s"] > 0 for step in found["steps"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["tests", "device", "weights", "decode", "train-0.5B", "run-cuda-ipc"])
@on_simulated_device
def test_a_part_works_on_a_device(tmp_path: Path, name: str) -> None:
    """A simulated one, of this process, of the ranks of a run, and of the processes of the tests."""
    part = next(part for part in PARTS if part.name == name)
    with in_every_rank(tmp_path), pytest.MonkeyPatch.context() as patch:
        if name == "tests":
            patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        found = part.run(replace(toy_size(), device="cuda"), tmp_path / name)
    assert_proven(part, found)
    if name == "tests":
        assert len(found["passed"]) > 20
        assert not found["skipped"]
    if name == "train-0.5B":
        ours, plain = (found["sides"][side] for side in ("rlctl ddp, sdpa", "Hugging Face loop, sdpa"))
        assert ours["tokens_per_s"] > 0
        assert abs(ours["first_loss"] - plain["first_loss"]) < 1e-4, "both sides do the same work"


def assert_proven(part: Part, found: Any) -> None:
    assert "failed" not in found, found
    rows = dict(part.rows(found))
    assert rows
    assert all(rows.values())
    if steps := found.get("steps"):
        assert len(steps) == toy_size().steps
        assert all(step["sync/verified"] and step["mem/actor_offloaded_GiB"] >= 0 for step in steps)


def test_what_has_passed_stays_and_is_not_done_again(tmp_path: Path) -> None:
    """Only the part has a process of its own here."""
    parts = [part for part in PARTS if part.name == "device"]
    options = Namespace(out=tmp_path, rehearse=True, again=False)
    records = []
    for _ in range(2):
        assert prove_gpu.prove(parts, toy_size(), options) == 0
        records.append(json.loads((tmp_path / "prove-gpu.json").read_text())["parts"]["device"])
    assert records[0]["state"] == "passed"
    assert records[0]["figures"]["matmul_tflops"] > 0
    assert records[1] == records[0], "with its seconds"


def test_a_side_of_ours_that_fails_fails_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ImportError("no module of ours")

    monkeypatch.setattr(_gpu_parts, "our_step", broken)
    found = _gpu_parts.measure_training("0.5B")(toy_size(), tmp_path)
    assert "no module of ours" in found["failed"]
    assert found["sides"]["Hugging Face loop, sdpa"]["tokens_per_s"] > 0

"""Engines with several ranks on a GPU: one rank of each trains, offloads, saves, resumes and exports as `ddp` does on
the CPU, and several train so over NCCL, on one GPU where there are no more. Where there is none, `ddp` alone is held
against itself, so that this file's own code is tried."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sharded_worker
from gpu import needs
from outcomes import Outcome, outcome
from sharded_worker import CASES, FUSED_ON_GPU, ON_ONE_RANK, STEPS
from train_helpers import QWEN2, largest_gap, write_model

from backends.protocol import Rank

WORKER = Path(sharded_worker.__file__)
pytestmark = [pytest.mark.timeout(300)]
ON_GPU = [pytest.param(case, "cuda", marks=[pytest.mark.gpu, *needs(1)]) for case in [*ON_ONE_RANK, *FUSED_ON_GPU]]
IN_FP32 = [param for param in ON_GPU if "bf16" not in str(param.values[0])]
TWO, FOUR = ([case for case in CASES if case.startswith("4:") is many and "bf16" not in case] for many in (False, True))
MOVED = [param for param in IN_FP32 if "offload" not in str(param.values[0]) and "critic" not in str(param.values[0])]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The references, trained on the CPU."""
    root = tmp_path_factory.mktemp("on_gpu")
    write_model(root / "model", QWEN2)
    trained(root, "ddp", out="one rank")
    trained(root, "ddp critic", out="one rank critic")
    return root


def trained(root: Path, case: str, **job: Any) -> Outcome:
    name = job.pop("out")
    sharded_worker.run(root / "model", {"case": case, "out": str(root / name), **job}, Rank()).close()
    return outcome(root, name)


def reference(root: Path, case: str) -> Outcome:
    return outcome(root, "one rank critic" if "critic" in case else "one rank")


def assert_alike(ours: Outcome, one: Outcome, close: float) -> None:
    assert ours.ranks[0]["skipped"]
    assert ours.ranks[0]["unchanged"]
    assert ours.losses() == pytest.approx(one.losses(), rel=close, abs=close)
    assert ours.norms() == pytest.approx(one.norms(), rel=close)
    for step in range(STEPS + 1):
        np.testing.assert_allclose(ours.told(step), one.told(step), rtol=0, atol=close)
    assert largest_gap(ours.weights, one.weights) < close


@pytest.mark.parametrize(("case", "device"), [("ddp", "cpu"), *IN_FP32])
def test_training_is_that_of_the_cpu(root: Path, case: str, device: str) -> None:
    """Losses, norms, log-probs or values, weights, greedy answers, and the objectives of units."""
    ours, one = trained(root, case, out=f"{case} {device}", device=device), reference(root, case)
    assert_alike(ours, one, 1e-4)
    assert ours.ranks[0]["bf16"]["same"]
    np.testing.assert_allclose(*(np.hstack(side.ranks[0]["proof"]) for side in (ours, one)), rtol=1e-4)
    for found, expected in zip(ours.objectives(), one.objectives(), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("case", "device"), [param for param in ON_GPU if "bf16" in str(param.values[0])])
def test_bf16_is_near_the_cpus(root: Path, case: str, device: str) -> None:
    """Masters are fp32 on both; what is computed in bf16 rounds in another order."""
    ours = trained(root, case, out=f"{case} {device}", device=device)
    one = trained(root, "ddp bf16", out=f"{case} on the cpu")
    assert ours.losses()[0] == pytest.approx(one.losses()[0], rel=0.02, abs=0.01)
    assert ours.norms()[0] == pytest.approx(one.norms()[0], rel=0.05)
    assert np.abs(ours.told(0) - one.told(0)).mean() < 0.02


@pytest.mark.parametrize(("case", "device"), MOVED)
def test_offload_in_every_step_changes_nothing(root: Path, case: str, device: str) -> None:
    moved = trained(root, case, out=f"{case} {device} moved", device=device, offload=True)
    assert_alike(moved, reference(root, case), 1e-4)


@pytest.mark.parametrize(("case", "device"), [("ddp", "cpu"), *MOVED])
def test_resume_is_the_step_that_would_have_come(root: Path, case: str, device: str) -> None:
    """A state that the CPU saved goes on here, and one that is saved here goes on on the CPU."""
    one, saved = reference(root, case), str(root / "one rank" / "state")
    ours = trained(root, case, out=f"{case} {device} resumed", device=device, load=saved)
    assert ours.losses()[-1] == pytest.approx(one.losses()[-1], rel=1e-4, abs=1e-4)
    assert largest_gap(ours.weights, one.weights) < 1e-4
    trained(root, case, out=f"{case} {device} saves", device=device)
    back = trained(root, "ddp", out=f"{case} {device} back", load=str(root / f"{case} {device} saves" / "state"))
    assert largest_gap(back.weights, one.weights) < 1e-4


def launch(root: Path, ranks: int, cases: list[str], request: pytest.FixtureRequest) -> None:
    """torchrun, with as many ranks on one device as it takes, for those cases whose tests will run."""
    asked = {item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")}
    jobs = [{"case": case, "out": str(root / f"{case} cuda"), "device": "cuda"} for case in cases if case in asked]
    file = root / f"jobs{ranks}.json"
    file.write_text(json.dumps({"model": str(root / "model"), "jobs": jobs}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run([*command, WORKER, file], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture(scope="module")
def two(root: Path, request: pytest.FixtureRequest) -> Path:
    launch(root, 2, TWO, request)
    return root


@pytest.fixture(scope="module")
def four(root: Path, request: pytest.FixtureRequest) -> Path:
    launch(root, 4, FOUR, request)
    return root


def assert_several_alike(root: Path, case: str) -> None:
    ours, one = outcome(root, f"{case} cuda"), reference(root, case)
    assert len(ours.ranks) > 1
    assert_alike(ours, one, 1e-4)
    for rank in ours.ranks:
        np.testing.assert_allclose(np.hstack(rank["proof"]), np.hstack(one.ranks[0]["proof"]), rtol=1e-4)
    for found, expected in zip(ours.objectives(), one.objectives(), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("case", TWO)
def test_two_ranks_over_nccl_train_as_one_on_the_cpu(two: Path, case: str) -> None:
    assert_several_alike(two, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", FOUR)
def test_four_ranks_over_nccl_train_as_one_on_the_cpu(four: Path, case: str) -> None:
    assert_several_alike(four, case)


def test_every_engine_of_one_rank_is_here() -> None:
    assert {CASES[case]["engine"].kind for case in ON_ONE_RANK} >= {"ddp", "fsdp2"}

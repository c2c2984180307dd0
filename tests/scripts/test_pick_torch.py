"""`scripts/_pick_torch.py` against a real pip and wheels that lie in a folder: no CUDA build without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

TORCH = "9.9.9"


def wheel(folder: Path, requires: str) -> None:
    """Write a wheel of a torch that is nothing but its metadata."""
    info = f"torch-{TORCH}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {TORCH}\nRequires-Dist: {requires}\n"
    with zipfile.ZipFile(folder / f"torch-{TORCH}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def pick(repo_root: Path, wheels: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, str(repo_root / "scripts" / "_pick_torch.py"), f"torch=={TORCH}", "cpu"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)


def test_a_cuda_build_is_refused_without_a_gpu(tmp_path: Path, repo_root: Path) -> None:
    wheel(tmp_path, 'nvidia-cublas==13.1; platform_system == "Linux" or platform_system == "Darwin"')
    done = pick(repo_root, tmp_path)
    assert done.returncode == 1
    assert f"no CPU build of torch=={TORCH} found" in done.stderr
    assert "hint:" in done.stderr
    assert done.stdout == ""


def test_a_cpu_build_from_pips_own_sources_is_taken(tmp_path: Path, repo_root: Path) -> None:
    wheel(tmp_path, 'nvidia-cublas; platform_system == "Windows" and extra == "x"')
    done = pick(repo_root, tmp_path)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr

"""Tests whose last inch needs a GPU: the same body runs on the CPU, where it can."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from simulated_device.child import IS_CHILD


def has_gpu(root: Path = Path("/")) -> bool:
    """Whether an NVIDIA driver shows itself: some containers have its device and not its files in /proc. Or a simulated
    device is in every process (simulated_device/child.py)."""
    places = ("proc/driver/nvidia/version", "dev/nvidiactl")
    return IS_CHILD in os.environ or any((root / place).exists() for place in places)


def on_cpu_and_gpu(*, gpus: int = 1) -> list[object]:
    """Parameters for a test of `device`: "cpu", and "cuda" where there are as many GPUs."""
    return ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, *needs(gpus)])]


def needs(gpus: int) -> list[pytest.MarkDecorator]:
    """Marks that skip a test where torch cannot use as many GPUs."""
    import torch

    held = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [pytest.mark.skipif(held < gpus, reason=f"needs {gpus} GPUs that torch can use; here are {held}")]

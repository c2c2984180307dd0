"""What a GPU could compute, by its data sheet. What training needs: `specs/wire/model_flops.py`. No torch."""

from __future__ import annotations

from collections.abc import Mapping

# TFLOP/s in dense bf16 with fp32 sums, as the data sheets say, by a part of the device's name.
PEAK_TFLOPS: Mapping[str, float] = {
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "B200": 2250.0,
}


def peak_tflops(device: str) -> float | None:
    """What the data sheet says, None for a device that is not in the table."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device), None)


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Model FLOPs utilisation (Chowdhery et al. 2022): share of `peak` (TFLOP/s) that `flops` in `seconds` are."""
    return flops / seconds / (peak * 1e12)

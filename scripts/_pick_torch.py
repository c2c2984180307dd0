"""Which torch to install: never a CUDA build on a machine without an NVIDIA driver.

    python scripts/_pick_torch.py torch==2.13.0 cpu|cuda      prints the extra pip arguments to install it with
    python scripts/_pick_torch.py --installed cpu|cuda        fails on a wrong torch, or a broken package

Uses the standard library and pip only: nothing else is installed yet.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
RUN = ("rlctl.run.train", "workers.roles.trainer", "backends.ddp.engine", "backends.torch_rollout.engine")
GPU_PACKAGES = ("nvidia", "cuda", "triton", "pytorch-triton")


def look_up(requirement: str, *arguments: str) -> dict[str, object] | None:
    """Metadata of the build that pip would install (nothing is downloaded but metadata), or None."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    command += ["--retries", "1", "--timeout", "20", "--report", "-", *arguments, requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return json.loads(done.stdout)["install"][0]["metadata"]


def needs_cuda(metadata: dict[str, object]) -> bool:
    """Whether this build brings CUDA libraries on this platform."""
    from pip._vendor.packaging.requirements import Requirement

    if "+cu" in str(metadata["version"]) or "+rocm" in str(metadata["version"]):
        return True
    needed = [Requirement(line) for line in metadata.get("requires_dist", [])]  # type: ignore[attr-defined]
    return any(
        item.name.lower().startswith(GPU_PACKAGES)
        for item in needed
        if item.marker is None or item.marker.evaluate({"extra": ""})
    )


def pick(requirement: str) -> list[str]:
    """pip arguments that give a CPU build: none where pip's own sources have one, else PyTorch's CPU wheels."""
    for arguments in ([], ["--index-url", CPU_INDEX]):
        metadata = look_up(requirement, *arguments)
        if metadata is not None and not needs_cuda(metadata):
            return arguments
    raise SystemExit(
        f"error: no CPU build of {requirement} found; a CUDA build is not installed on a machine without a GPU\n\n"
        f"hint: pip's configured sources offer none, and {CPU_INDEX} could not be read. Get the wheel whose name has\n"
        "      '+cpu' from there on another machine and run again with PIP_FIND_LINKS naming its folder"
    )


def check_installed(kind: str) -> None:
    for module in ("rlctl.cli", "datasets", "zmq", "safetensors", "math_verify", *RUN):
        import_module(module)
    import torch

    built_for = torch.version.cuda or torch.version.hip
    if kind == "cpu" and built_for is not None:
        raise SystemExit(f"error: torch {torch.__version__} is built for {built_for}, on a machine without a GPU")
    print(f"torch {torch.__version__}")


if __name__ == "__main__":
    if sys.argv[1] == "--installed":
        check_installed(sys.argv[2])
    elif sys.argv[2] == "cpu":
        print(" ".join(pick(sys.argv[1])))

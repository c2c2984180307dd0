"""`rlctl export-checkpoint`: a Hugging Face folder out of a run, proven to load, or nothing at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from rlctl import checkpoints
from specs.errors import CheckpointError, ExportError, UsageError

TIMEOUT_S = 3600.0
ROOT = Path(__file__).resolve().parent.parent


def export(run_dir: Path, out_dir: Path, step: int | None, role: str, dtype: str) -> int:
    """Export the newest (or the given) checkpoint of `role`. Raises UsageError, CheckpointError or ExportError."""
    from rich.console import Console

    console = Console()
    checkpoint = find(run_dir, step)
    folder = checkpoint.path / role
    if not folder.is_dir():
        raise UsageError(f"the run has no {role}", hint="it has: " + ", ".join(_roles(checkpoint)))
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UsageError(f"{out_dir} already exists", hint="choose another folder; exports never overwrite")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with console.status(f"exporting step {checkpoint.step} as {dtype}, and loading it back"):
        proof = _export(checkpoint, folder, out_dir, dtype)
    console.print(f"exported step {checkpoint.step} of {run_dir} to {out_dir}")
    console.print(
        f"proven: loads in transformers, {proof['tensors']} tensors with the trainer's values, "
        f"{proof['parameters']:,} parameters, {proof['greedy_tokens']} greedy tokens the same"
        + (f" ({proof['undecided_tokens']} near-ties left out)" if proof["undecided_tokens"] else "")
    )
    return 0


def find(run_dir: Path, step: int | None) -> checkpoints.Checkpoint:
    """The checkpoint to export. A torn one is an error when asked for, skipped with a warning when not."""
    root = run_dir / "checkpoints"
    if not root.is_dir():
        raise UsageError(f"{run_dir} is not a run directory", hint="pass the folder that train wrote, like runs/NAME")
    there = sorted(int(path.name.removeprefix("step_")) for path in root.glob("step_*"))
    if step is not None:
        if step not in there:
            raise UsageError(
                f"{run_dir} has no checkpoint of step {step}", hint=f"it has: {', '.join(map(str, there)) or 'none'}"
            )
        return checkpoints.read(checkpoints.step_path(root, step))
    from rich.console import Console

    found = checkpoints.newest(root, lambda text: Console(stderr=True).print(f"warning: {text}"))
    if found is None:
        raise CheckpointError(f"{run_dir} has no whole checkpoint", hint="train until the first `checkpoint.every`")
    return found


def _roles(checkpoint: checkpoints.Checkpoint) -> list[str]:
    return sorted(path.name for path in checkpoint.path.iterdir() if path.is_dir() and path.name != "driver")


def _export(checkpoint: checkpoints.Checkpoint, folder: Path, out_dir: Path, dtype: str) -> dict[str, Any]:
    """Write beside `out_dir`, prove, and only then rename into place."""
    about = checkpoint.manifest
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as scratch:
        model, answer, request = Path(scratch) / "model", Path(scratch) / "answer.json", Path(scratch) / "request.json"
        model.mkdir()
        body = {
            "checkpoint": str(folder.absolute()),
            "proof_file": str((folder / "greedy_proof.json").absolute()),
            "model_path": about["model_path"],
            "trust_remote_code": about["trust_remote_code"],
            "dtype": dtype,
            "out": str(model.absolute()),
            "answer": str(answer.absolute()),
        }
        request.write_text(json.dumps(body))
        proof = _run(about["python"], request, answer)
        note = {"run": about["run"], "step": checkpoint.step, "dtype": dtype, "base_model": about["model_path"]}
        note["proof"] = proof
        (model / "rlctl_export.json").write_text(json.dumps(note, indent=2) + "\n")
        if out_dir.exists():
            out_dir.rmdir()  # empty: checked above
        shutil.move(model, out_dir)
    return proof


def _run(python: str, request: Path, answer: Path) -> dict[str, Any]:
    ours = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    env = {**os.environ, **ours}
    done = subprocess.run(
        [python, "-m", "workers.export_model", str(request)],
        env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    result = json.loads(answer.read_text()) if answer.is_file() else {}
    if "proof" in result:
        return dict(result["proof"])
    if "error" in result:
        raise ExportError(result["error"], hint=result["hint"] or "nothing was exported")
    tail = "\n".join(done.stderr.splitlines()[-12:])
    raise ExportError(f"the export process ended with code {done.returncode}:\n{tail}", hint="nothing was exported")

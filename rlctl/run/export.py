"""`rlctl export-checkpoint`: make a Hugging Face folder out of a run, proven to load, or nothing at all."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl import __version__
from rlctl.models.paths import config_of, lineage
from rlctl.models.run_export import NOTE
from rlctl.run import checkpoints
from rlctl.run.interrupt import as_ctrl_c
from rlctl.run.publish.hub_push import find_repo, push
from rlctl.run.publish.model_card import ExportedModel, model_card
from rlctl.run.run_dir import FULL
from specs.errors import CheckpointError, ExportError, UsageError
from specs.json_file import read_or_empty
from specs.load.dotted_keys import value_at
from specs.model_facts import model_facts
from specs.packages import path_for
from specs.schema.engines.engine_registry import table_of
from specs.schema.roles import ACTOR, PROOF_FILES, ROLES

if TYPE_CHECKING:
    from rlctl.show.screen import Screen

STALL_S = 3600.0
_REQUEST = "rlctl_export_request.json"  # locked while its export goes on
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}

Say = Callable[[str], None]


def export(
    run_dir: Path,
    out_dir: Path,
    step: int | None,
    role: str = "",
    dtype: str | None = None,
    *,
    shard_GB: float = 2.0,
    memory_GiB: float | None = None,
    adapter_only: bool = False,
    push_to_hub: str | None = None,
    public: bool = False,
    screen: Screen | None = None,
) -> int:
    """Export the newest (or the given) checkpoint of `role`, else of the run's actor, or of what it trained: a whole
    model, or its LoRA adapters alone. `dtype` None: that of the base model. `push_to_hub`: a repository that it becomes
    too, private unless `public`. `memory_GiB`: what the proof may take; None: half of what is free, so that it presses
    nothing out of memory. Raises UsageError, CheckpointError or ExportError."""
    import psutil
    from rich.text import Text

    from rlctl.show.screen import Screen

    if dtype and dtype not in _DTYPES.values():
        raise UsageError(f"no export can be in {dtype}", hint=f"dtype is one of {', '.join(_DTYPES.values())}")
    console = screen or Screen(highlight=True)
    with console.status("checking the checkpoint"):
        checkpoint = find(run_dir, step)
    there = sorted(checkpoint.manifest["roles"].keys() & ROLES)
    role = role or (ACTOR if ACTOR in there or not there else there[-1])
    folder = checkpoint.path / role
    if role not in there:
        raise UsageError(f"the run has no {role}", hint="it has: " + (", ".join(there) or "none"))
    about = _about(checkpoint, role)
    dtype, why = (dtype, "") if dtype else own_dtype(about)
    _remove_what_was_killed(out_dir)
    _check_options(folder, out_dir, adapter_only=adapter_only, push_to_hub=push_to_hub, public=public)
    repo = find_repo(push_to_hub, public=public) if push_to_hub is not None else None
    about |= {"recipe": value_at(read_or_empty(run_dir / "resolved.json"), "run.recipe", "rl")}
    about |= {"made_from": value_at(checkpoint.manifest, ("lineage", role)) or lineage(about["model_path"])}
    name = (repo or out_dir.resolve()).name  # "." has none
    exported = ExportedModel(run_dir, checkpoint.step, about, role, dtype, adapter_only, name)
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        with as_ctrl_c(), console.status(f"exporting step {checkpoint.step} as {dtype}") as status:
            sizes = {"shard_bytes": int(shard_GB * 1e9)}
            sizes["memory_bytes"] = int(memory_GiB * 2**30) if memory_GiB else psutil.virtual_memory().available // 2
            proof = _export(exported, folder, out_dir, sizes, lambda text: status.update(Text(text)))
    except OSError as error:
        kind = ExportError if error.errno in FULL else UsageError
        problem = f"{out_dir} cannot be written: {error.strerror or error}"
        raise kind(problem, hint="nothing was exported; make room there, or name another folder") from None
    console.print(f"exported step {checkpoint.step} of {run_dir} to {out_dir}, in {dtype}{why}")
    console.print(_proven(proof, adapter_only))
    if repo is not None:
        address = push(repo, out_dir, f"step {checkpoint.step} of {about['run']}, exported by rlctl {__version__}")
        console.print(f"pushed to {address} ({'public' if repo.public else 'private'})")
    return 0


def _check_options(folder: Path, out_dir: Path, *, adapter_only: bool, push_to_hub: str | None, public: bool) -> None:
    """Raises UsageError for options that do not fit together, or the role whose files are in `folder`."""
    role = folder.name
    if adapter_only and ROLES[role].head != "lm":
        raise UsageError("--adapter-only: beside its adapters the head learned", hint="leave it out: they are merged")
    if adapter_only and not (folder / "adapter_config.json").is_file():
        hint = "leave it out: the whole model was trained"
        raise UsageError(f"--adapter-only: it was not trained with {role}.lora", hint=hint)
    if os.path.lexists(out_dir) and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UsageError(f"{out_dir} already exists", hint="choose another folder; exports never overwrite")
    if public and push_to_hub is None:
        raise UsageError("--public: only with --push-to-hub", hint="add --push-to-hub NAME, or leave it out")


def _proven(proof: Mapping[str, Any], adapter_only: bool) -> str:
    by = "peft" if adapter_only else "transformers"
    from_disk = ", layer by layer from the disk" if proof["loaded"] == "disk" else ""
    same = f"{proof['values']} values" if proof["values"] else f"{proof['greedy_tokens']} greedy tokens"
    left_out = f" ({proof['undecided_tokens']} near-ties left out)" if proof["undecided_tokens"] else ""
    return (
        f"proven: loads in {by}{from_disk}, {proof['tensors']} tensors with the trainer's values, "
        f"{proof['parameters']:,} parameters, {same} the same{left_out}"
    )


def find(run_dir: Path, step: int | None) -> checkpoints.Checkpoint:
    """Open the checkpoint to export. A torn one is an error when asked for, skipped with a warning when not."""
    root = run_dir / "checkpoints"
    if not root.is_dir():
        raise UsageError(f"{run_dir} is not a run directory", hint="pass the folder that train wrote, like runs/NAME")
    if step is not None:
        checkpoints.check_has(root, step, "")
        return checkpoints.read(checkpoints.step_path(root, step))
    from rlctl.show.screen import Screen

    found = checkpoints.newest(root, lambda text: Screen(stderr=True).print(f"warning: {text}", soft_wrap=True))
    if found is None:
        raise CheckpointError(f"{run_dir} has no complete checkpoint", hint="train until the first `checkpoint.every`")
    return found


def _about(checkpoint: checkpoints.Checkpoint, role: str) -> dict[str, Any]:
    """Return what the manifest says of the model and who reads it. Raises CheckpointError or UsageError."""
    about = {**checkpoint.manifest, **checkpoint.manifest["roles"][role]}
    table = table_of("train", str(about.get("engine")))
    if table is not None and table.model_of == "bigram":
        hint = "an engine that trains a model, like ddp, writes checkpoints that can be exported"
        raise UsageError("this run's engine is fake: there is no model to export", hint=hint)
    if f"{role}/{PROOF_FILES[ROLES[role].head]}" not in about["files"]:
        unproven = f"step {checkpoint.step} was saved without the proof that an export must repeat"
        raise CheckpointError(unproven, hint="export another step with --step; a resume of the run tries it again")
    manifest, model = checkpoint.path / checkpoints.MANIFEST, Path(about["model_path"])
    if shutil.which(about["python"]) is None:
        hint = f"put it back, or write another interpreter that has the engine's packages into {manifest}"
        raise CheckpointError(f"the interpreter that trained the {role}, {about['python']}, is not there", hint=hint)
    if model.is_absolute() and not model.is_dir():  # else a hub id
        hint = f"put it back, or write where it is now into {manifest}"
        raise CheckpointError(f"the model that the {role} began with, {model}, is not there", hint=hint)
    return about


def own_dtype(about: Mapping[str, Any]) -> tuple[str, str]:
    """Choose the precision of an export without --dtype, and say why: the base model's, else the one trained in."""
    facts = model_facts(config_of(about["model_path"], Path()))
    own = facts.dtype.removeprefix("torch.") if facts else ""
    if own == "float16":
        return "bf16", " (the base model is fp16, which no export is; --dtype chooses)"
    if own in _DTYPES:
        return _DTYPES[own], " (as the base model; --dtype chooses)"
    trained = "bf16" if about.get("dtype") == "bf16" else "fp32"
    return trained, " (as it was trained: the base model's config.json names no dtype; --dtype chooses)"


def _export(exported: ExportedModel, folder: Path, out_dir: Path, sizes: Mapping[str, int], say: Say) -> dict[str, Any]:
    """Write into a scratch folder, prove, and only then rename into place."""
    about = exported.about
    base, scratch_in = about["made_from"][0], _scratch_in(out_dir)
    place = tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=scratch_in)
    with place as name, open(Path(name) / _REQUEST, "w") as request_file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(request_file, fcntl.LOCK_EX)
        scratch = Path(name).absolute()
        model = scratch / "model"
        model.mkdir()
        request = {
            "checkpoint": str(folder.absolute()),
            "proof_file": str((folder / PROOF_FILES[ROLES[folder.name].head]).absolute()),
            "model_path": about["model_path"],
            "trust_remote_code": about["trust_remote_code"],
            "dtype": exported.dtype,
            "head": ROLES[folder.name].head,
            "adapter_only": exported.adapter_only,
            "out": str(model),
            **sizes,
            "answer": str(scratch / "answer.json"),
            "progress": str(scratch / "progress.json"),
        }
        request_file.write(json.dumps(request))
        request_file.flush()
        proof = _run(about["python"], scratch, say)
        if (adapters := model / "adapter_config.json").is_file():  # a path would say something of this machine
            config = {**json.loads(adapters.read_text()), "base_model_name_or_path": base}
            adapters.write_text(json.dumps(config, indent=2) + "\n")
        note = {"run": about["run"], "step": exported.step, "dtype": exported.dtype, "base_model": base, "proof": proof}
        note |= {"recipe": about["recipe"], "role": exported.role, "made_from": about["made_from"]}
        (model / NOTE).write_text(json.dumps(note, indent=2) + "\n")
        (model / "README.md").write_text(model_card(exported, proof, model), encoding="utf-8")
        for path in [*model.iterdir()] if scratch_in == out_dir else [model]:
            path.rename(out_dir / path.name if scratch_in == out_dir else out_dir)
    return proof


def _scratch_in(out_dir: Path) -> Path:
    """Return where an export is written before it is renamed: inside a folder that is there, which may be a mount."""
    return out_dir if out_dir.is_dir() else out_dir.parent


def _remove_what_was_killed(out_dir: Path) -> None:
    """Remove the scratch folders of exports to the same place that are no more."""
    for file in _scratch_in(out_dir).glob(f".{glob.escape(out_dir.name)}-????????/{_REQUEST}"):
        with suppress(OSError), file.open() as held:  # by an export that goes on, or where there are no locks
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(file.parent, ignore_errors=True)


def _run(python: str, scratch: Path, say: Say) -> dict[str, Any]:
    path = path_for(python, os.environ.get("PYTHONPATH", ""), scratch)
    ours = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    answer, log = scratch / "answer.json", scratch / "log.txt"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [python, "-m", "workers.offline.export_model", str(scratch / _REQUEST)],
            env={**os.environ, **ours}, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        _follow(process, scratch / "progress.json", say)
    finally:
        process.kill()
        process.wait()
    result = read_or_empty(answer)  # without room for a word it is empty
    if "proof" in result:
        return dict(result["proof"])
    if answer.is_file():
        raise ExportError(result.get("error", "the disk is full"), hint=result.get("hint") or "nothing was exported")
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
    raise ExportError(f"the export process ended with code {process.returncode}:\n{tail}", hint="nothing was exported")


def _follow(process: subprocess.Popen[bytes], progress: Path, say: Say) -> None:
    """Show how far the process is until it ends. Raises ExportError when it gets nowhere for `STALL_S`."""
    moved, line = time.monotonic(), ""
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
            return
        if progress.is_file():
            now = json.loads(progress.read_text())
            size = f" {now['done'] / 1e9:.2f} of {now['total'] / 1e9:.2f} GB" if now["total"] else ""
            if (text := now["what"] + size) != line:
                moved, line = time.monotonic(), text
                say(line)
        if time.monotonic() - moved > STALL_S:
            raise ExportError(f"the export process made no progress for {STALL_S:.0f} s", hint="nothing was exported")

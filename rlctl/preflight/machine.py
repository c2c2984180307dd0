"""Check what a run needs of the machine besides models, data and interpreters: commands, packages, disk.

Nothing is created or changed. What another machine may have is a warning, and an error where the run is to start.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlctl.models.model_tensors import tensors_of_config
from rlctl.models.run_export import RunExport
from rlctl.show.tracking import missing_package
from specs.errors import NotHere, Problem
from specs.memory_parts import GIB
from specs.model_facts import model_facts
from specs.schema.recipes import sampling_of
from specs.schema.roles import ROLES
from specs.schema.spec import Spec


def machine_problems(
    spec: Spec, spec_dir: Path, config: Mapping[str, Any], run_dir: Path, *, starting: bool, here: bool, saves: bool
) -> tuple[list[Problem], list[Problem]]:
    """Return errors and warnings. `config`: the actor's parsed config.json, {} where it is not at hand. `run_dir`:
    where the run writes. `starting`: the run begins now; `here`: nothing in the spec asks for another machine;
    `saves`: it writes checkpoints, as no evaluation does."""
    trackers = [(number, table) for number, table in enumerate(spec.tracking) if find_spec(table.package) is None]
    errors = [*(missing_package(*tracker) for tracker in trackers), *_ray(spec), *_folders(spec, spec_dir, run_dir)]
    by_srun = [role for role, section in spec.sections() if ROLES[role].together and section.launcher == "srun"]
    warnings: list[Problem] = []
    if not (starting or shutil.which("srun")):  # at a start the launcher says it
        hint = 'start it inside a SLURM job, or write "torchrun"'
        warnings += [NotHere(f"{role}.launcher", "this machine has no srun", hint) for role in by_srun]
    (errors if here else warnings).extend(_disk(spec, config, run_dir) if saves and not errors else [])
    return errors, warnings


def _ray(spec: Spec) -> Iterator[Problem]:
    if spec.cluster is not None and spec.cluster.kind == "ray" and find_spec("ray") is None:
        hint = "pip install ray, in the version that the cluster has"
        yield NotHere("cluster.kind", "the package ray is not installed", hint, '"ray"')


# ── folders and disk ──────────────────────────────────────────────────────────────────────────────


def _folders(spec: Spec, spec_dir: Path, run_dir: Path) -> Iterator[Problem]:
    """Find folders that the run cannot write to, or make."""
    named = {"run.dir" if run_dir == spec.run.place else "": run_dir}  # else no key names it
    if (sampling := sampling_of(spec)) is not None:
        if sampling.sync.folder:
            named["sync.folder"] = spec_dir / Path(sampling.sync.folder).expanduser()
        weights_dir = Path(getattr(sampling.rollout.engine, "weights_dir", ""))
        if weights_dir.is_absolute():
            named["rollout.engine.weights_dir"] = weights_dir
    hints = dict.fromkeys(named, "name another folder")
    models = [(f"{role}.model", getattr(own, "model", "")) for role, own in spec.sections()]
    for key, path in [("model.path", spec.model.path), *models]:
        exported = RunExport.of(os.path.abspath(spec_dir / Path(path).expanduser()))
        if exported is not None and not exported.folder.is_dir():
            named[key], hints[key] = exported.folder.parent, exported.way_out
    for key, folder in named.items():
        place = nearest_existing(folder)
        writable = place.is_dir() and os.access(place, os.W_OK | os.X_OK) and shutil.disk_usage(place).total
        if not writable:
            message = f"{place} {'cannot be written to' if place.is_dir() else 'is not a folder'}"
            yield Problem(key, message, hints[key])


def nearest_existing(path: Path) -> Path:
    """Return `path`, or the closest folder above it that is there, be it a link to nowhere."""
    path = Path(os.path.abspath(path))
    return next(place for place in (path, *path.parents) if os.path.lexists(place))


def _disk(spec: Spec, config: Mapping[str, Any], run_dir: Path) -> list[Problem]:
    """Find too little room for the checkpoints that lie on the disk together: those kept, and one more while it is
    written. Those of a run to resume are there already."""
    each = checkpoint_bytes(spec, config)
    there = len(list((run_dir / "checkpoints").glob("step_*")))
    count = max(1, min(spec.checkpoint.keep + 1, -(-spec.run.steps // spec.checkpoint.every)) - there)
    place = nearest_existing(run_dir)
    free, needed = shutil.disk_usage(place).free, each * count
    if free >= needed:
        return []
    sizes = f"of {each / GIB:.3g} GiB take {needed / GIB:.3g} GiB, and {place} has {free / GIB:.3g} GiB free"
    message = f"{count} checkpoint{'s' if count > 1 else ''} {sizes}"
    hint = "free some space, " + "lower it, " * (spec.checkpoint.keep > 1) + "or set run.dir"
    return [Problem("checkpoint.keep", message, hint)]


def checkpoint_bytes(spec: Spec, config: Mapping[str, Any]) -> int:
    """Return the size of one checkpoint, of every role that learns; 0 for what is not known or small (adapters)."""
    facts, tensors, total = model_facts(config), tensors_of_config(config), 0
    for role in spec.roles if facts and tensors else ():
        section: Any = spec.role(role)
        whole = spec.learns(role) and getattr(section, "lora", None) is None
        if facts and tensors and whole and spec.model_path(role) == spec.model.path:
            own = tensors if ROLES[role].head == "lm" else tensors.with_score_layer(facts.hidden_size)
            total += (section.engine.checkpoint_bytes or 0) * own.elements
    return total

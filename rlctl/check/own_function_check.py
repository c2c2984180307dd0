"""A user's own advantage and loss, run once on a tiny batch as a run would: in a process of the interpreter that calls
them there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from rlctl.preflight.interpreters import own_path
from rlctl.processes.placement import package_root
from specs.errors import Problem
from specs.schema.spec import Spec
from specs.text import show

TIMEOUT_S = 60.0  # torch is imported for a loss


def own_function_trials(spec: Spec, spec_dir: Path, known: Collection[str] = ()) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings about them; keys in `known` have been found wrong already."""
    found: dict[str, list[Problem]] = {"error": [], "warning": []}
    for key, path in spec.algorithm.own_functions.items():
        if f"algorithm.{key}" not in known:
            said = _tried(spec, spec_dir, key.partition("_")[0], path)
            for kind in said.keys() & found.keys():
                found[kind].append(Problem(f"algorithm.{key}", said[kind], said["hint"], show(path)))
    return found["error"], found["warning"]


def _tried(spec: Spec, spec_dir: Path, which: str, path: str) -> dict[str, str]:
    """What the trial says."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RLCTL_")}
    env |= spec.actor.env if which == "loss" else {}
    env["PYTHONPATH"] = os.pathsep.join(part for part in (str(package_root()), env.get("PYTHONPATH", "")) if part)
    python = (own_path(spec.actor, spec_dir) if which == "loss" else "") or sys.executable
    command = [python, "-B", "-P", "-m", "workers.offline.own_function_trial", which, str(spec_dir / path)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        hint = "it is called in every step: make it quick"
        return {"error": f"does not end within {TIMEOUT_S:g} s on a tiny batch", "hint": hint}
    except OSError as error:
        return {"error": f"cannot be tried with {python}: {error.strerror}", "hint": "check actor.python"}
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        last = "".join(done.stderr.decode(errors="replace").strip().splitlines()[-1:])
        message = f"trying it ended the process (status {done.returncode}) {last}"
        return {"error": message, "hint": "call it with python to see why"}

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


def own_function_failures(spec: Spec, spec_dir: Path, known: Collection[str] = ()) -> list[Problem]:
    """Run each of them; keys in `known` have been found wrong already."""
    found = []
    for key, path in spec.algorithm.own_functions.items():
        if f"algorithm.{key}" not in known and (wrong := _wrong(spec, spec_dir, key.partition("_")[0], path)):
            found.append(Problem(f"algorithm.{key}", *wrong, show(path)))
    return found


def _wrong(spec: Spec, spec_dir: Path, which: str, path: str) -> tuple[str, str] | None:
    """Return what is wrong with it, and a hint."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RLCTL_")}
    env |= spec.actor.env if which == "loss" else {}
    env["PYTHONPATH"] = os.pathsep.join(part for part in (str(package_root()), env.get("PYTHONPATH", "")) if part)
    python = (own_path(spec.actor, spec_dir) if which == "loss" else "") or sys.executable
    command = [python, "-B", "-P", "-m", "workers.offline.call_own_function", which, str(spec_dir / path)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=TIMEOUT_S, check=False)
        reply = json.loads(done.stdout.splitlines()[-1])
        return (reply["error"], reply["hint"]) if reply else None
    except subprocess.TimeoutExpired:
        return f"does not end within {TIMEOUT_S:g} s on a tiny batch", "it is called in every step: make it quick"
    except OSError as error:
        return f"cannot be tried with {python}: {error.strerror}", "check actor.python"
    except (ValueError, IndexError):
        last = "".join(done.stderr.decode(errors="replace").strip().splitlines()[-1:])
        return f"trying it ended the process (status {done.returncode}) {last}", "call it with python to see why"

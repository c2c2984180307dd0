"""Interpreters of roles: what is installed in them, and what their role lacks there.

A role may run in an interpreter of its own (`rollout.python`), because engines pin different versions of torch and
transformers. It is asked in one short process that imports nothing but the standard library; ours is asked here.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from specs.errors import Problem
from specs.packages import environments, installed_here
from specs.schema.engines.engine_registry import ROLLOUT_TABLES, TRAIN_TABLES, library_names
from specs.schema.engines.engine_table import EngineTable, engine_of
from specs.schema.role_section import RoleSection
from specs.schema.roles import ROLES, RoleName
from specs.schema.spec import Spec
from specs.text import show

OLDEST_PYTHON = (3, 11)
_TIMEOUT_S = 30.0
_MARK = "rlctl-interpreter: "

# What any role's process imports, and what one without a model imports besides.
WORKER_PACKAGES = ("numpy", "pydantic", "pyzmq", "safetensors", "xxhash")
_TEXT_PACKAGES = ("tokenizers", "jinja2")
SHOWN = library_names()  # packages whose versions are shown
# What roles need, and what attention, kernels and tokenizers are chosen by.
_ASKED = (
    *(*SHOWN, *WORKER_PACKAGES, *_TEXT_PACKAGES, "accelerate", "packaging"),
    *("flash-attn", "flash-attn-3", "kernels", "liger-kernel", "triton"),
    *("transformer-engine", "transformer-engine-torch"),
)

# Runs in any Python 3: what is too old must be able to say so.
_PROGRAM = """
import json, sys
found = {"python": "%d.%d.%d" % sys.version_info[:3], "versions": {}}
try:
    from importlib.metadata import PackageNotFoundError, version
    names = sys.argv[2:]
except ImportError:
    names = []
for name in names:
    try:
        found["versions"][name] = version(name)
    except PackageNotFoundError:
        pass
print(sys.argv[1] + json.dumps(found))
"""


@dataclass(frozen=True)
class Interpreter:
    """Hold what is known of an interpreter. `failure`: why it did not answer, or empty."""

    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""

    @property
    def too_old(self) -> bool:
        return tuple(map(int, self.python.split(".")[:2])) < OLDEST_PYTHON

    def version(self, package: str) -> str:
        """Return the installed version of a package, under whichever name it came; empty: it is not there."""
        names = (package, *_other_names().get(package, ()))
        return next((self.versions[name] for name in names if name in self.versions), "")


@cache
def look_at(python: str, more: tuple[str, ...] = ()) -> Interpreter:
    """Ask an interpreter, by its path, for its version and its packages, `more` of them besides those that rlctl knows.
    Never raises; asks each path once."""
    # Not -I: what PYTHONPATH adds is there for the role too. Nothing is written, not even bytecode.
    command = [python, "-B", "-c", _PROGRAM, _MARK, *dict.fromkeys((*_ASKED, *more))]
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, env=env, check=False
        )
    except OSError as error:
        return Interpreter(failure=error.strerror or str(error))
    except subprocess.TimeoutExpired:
        return Interpreter(failure=f"no output for {_TIMEOUT_S:g} s")
    answer = next((line for line in done.stdout.splitlines() if line.startswith(_MARK)), "")
    if done.returncode != 0 or not answer:
        last = next(reversed((done.stderr or done.stdout).strip().splitlines()), "")
        why = f": {last}" if last else " without output"
        return Interpreter(failure=f"it ended with code {done.returncode}{why}")
    try:
        return Interpreter(**json.loads(answer.removeprefix(_MARK)))
    except (ValueError, TypeError):
        return Interpreter(failure="it is no Python: its answer is not that of the program it was given")


def packages_of(section: RoleSection, spec_dir: Path) -> Mapping[str, str] | None:
    """Return the versions of packages in the role's interpreter; None where it does not answer."""
    path = own_path(section, spec_dir)
    if not path:
        return installed_here(_ASKED)
    found = look_at(path)
    return None if found.failure else found.versions


def own_path(section: RoleSection, spec_dir: Path) -> str:
    """Return the absolute path of the role's own interpreter; empty where it runs in ours. Links are kept: bin/python
    is what makes an interpreter that of its virtual environment."""
    return os.path.abspath(spec_dir / Path(section.python).expanduser()) if section.python else ""


def interpreter_problems(spec: Spec, spec_dir: Path, *, nvidia_driver: bool) -> Iterator[Problem]:
    """Yield what is wrong with the interpreters that roles name, and the packages of engines and launchers that ours
    lacks. `nvidia_driver`: whether this machine has one; a spec for GPUs may be checked where there are none."""
    for role, section in spec.sections():
        path = own_path(section, spec_dir)
        found = _unusable(role, section, path) if path else None
        found = found or _missing(role, section, path)
        if found is not None:
            yield found
        elif (engine := engine_of(section)) is not None:
            versions = packages_of(section, spec_dir) or {}
            yield from engine.installed_problems(role, section, versions, nvidia_driver=nvidia_driver)


def _unusable(role: RoleName, section: RoleSection, path: str) -> Problem | None:
    key, kind = f"{role}.python", _own_environment(section)
    other = _set_up(kind) if kind else f"leave it out to use {sys.executable}"
    if os.path.isdir(path):
        return Problem(key, "is a folder", "name the interpreter in it, such as its bin/python")
    if not os.path.isfile(path):
        return Problem(key, f"no such interpreter ({path})", other)
    if not os.access(path, os.X_OK):
        return Problem(key, "is not executable", "name the environment's bin/python")
    if (found := look_at(path)).failure:
        return Problem(key, f"does not start: {found.failure}", other)
    if found.too_old:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        return Problem(key, f"is Python {found.python}", f"roles need Python {oldest} or newer")
    return None


def _missing(role: RoleName, section: RoleSection, path: str) -> Problem | None:
    """Return the packages that a role needs and its interpreter lacks; `path` empty: ours, which has what every role
    needs."""
    engine, launcher = engine_of(section), {"torchrun": ("torch",), "deepspeed": ("deepspeed",)}.get(section.launcher)
    of_engine = (engine.packages or ()) if engine is not None else ()
    of_roles = (*WORKER_PACKAGES, *(() if ROLES[role].holds_model else _TEXT_PACKAGES)) if path else ()
    needed = dict.fromkeys((*of_roles, *of_engine, *((launcher or ()) if ROLES[role].together else ())))
    more = tuple(package for package in needed if package not in _ASKED)  # of another package's engine
    there = look_at(path, more) if path else Interpreter(versions=installed_here((*_ASKED, *more)))
    missing = [package for package in needed if not there.version(package)]
    if not missing:
        return None
    kind = _own_environment(section)
    install = f"{shlex.quote(path or sys.executable)} -m pip install {' '.join(missing)}"
    names = ", ".join(missing)
    if not {*missing} & {*of_roles, *of_engine}:
        get = install if path else f"rlctl setup-engine {names} adds it"
        hint = f'set {role}.launcher = "torchrun", for torchrun starts every engine too, or {get}'
        return Problem(f"{role}.launcher", f"{names} is not installed{f' in {path}' if path else ''}", hint)
    if path:
        hint = _set_up(kind) if kind else install
        return Problem(f"{role}.python", f"lacks the package{'s' if len(missing) > 1 else ''} {names}", hint)
    hint = f"{_set_up(kind)}; then write {role}.python = {show(_made_by_setup(kind))}" if kind else ""
    message = f"{names} {'is' if len(missing) == 1 else 'are'} not installed where rlctl runs"
    return Problem(f"{role}.engine.kind", message, hint or (engine.where_to_get if engine else "") or install)


@cache
def _other_names() -> dict[str, tuple[str, ...]]:
    """Return for each package the distributions that bring the same one, by all engines."""
    tables: tuple[type[EngineTable], ...] = (*TRAIN_TABLES, *ROLLOUT_TABLES)
    return {name: others for table in tables for name, others in (table.package_aliases or {}).items()}


def _own_environment(section: RoleSection) -> str:
    """Return the engine's kind where `setup-engine` gives it an interpreter of its own, else ""."""
    engine = engine_of(section)
    return engine.kind if engine is not None and engine.own_environment else ""


def _set_up(kind: str) -> str:
    return f"rlctl setup-engine {kind} makes {_made_by_setup(kind)}"


def _made_by_setup(kind: str) -> str:
    return str(environments() / f".venv-{kind}" / "bin" / "python")

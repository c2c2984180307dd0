"""Interpreters of roles: what is installed in them, and what their role lacks there.

A role may run in an interpreter of its own (`rollout.python`), because engines pin different versions of torch and
transformers. It is asked in one short process that imports nothing but the standard library; ours is asked here.
"""

from __future__ import annotations

import json
import os
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
_PROBE_TIMEOUT_S = 30.0
_MARK = "rlctl-interpreter: "

# What any role's process imports, and what its engine does besides.
WORKER_PACKAGES = ("numpy", "pydantic", "pyzmq", "safetensors", "xxhash")
_TEXT_PACKAGES = ("tokenizers", "jinja2")
# Packages whose versions are shown, and those whose demands on one another must hold.
SHOWN = library_names()
WATCHED = tuple(
    dict.fromkeys(
        (
            *(*SHOWN, "accelerate", "torchvision", "torchaudio", "tokenizers", "packaging", "jinja2"),
            *(
                "flash-attn",
                "flash-attn-3",
                "kernels",
                "liger-kernel",
                "transformer-engine",
                "transformer-engine-torch",
                "triton",
                "sentencepiece",
                "mistral-common",
                *WORKER_PACKAGES,
            ),
        )
    )
)

# Runs in any Python 3: what is too old must be able to say so.
_PROBE = """
import json, re, sys
found = {"python": "%d.%d.%d" % sys.version_info[:3], "versions": {}, "requires": {}}
try:
    from importlib.metadata import PackageNotFoundError, distribution
except ImportError:
    names = []
else:
    names = sys.argv[2:]
watched = set(names)
for name in names:
    try:
        package = distribution(name)
    except PackageNotFoundError:
        continue
    found["versions"][name] = package.version
    first = re.compile("[A-Za-z0-9._-]+")
    lines = [line for line in package.requires or [] if "extra ==" not in line]
    found["requires"][name] = [line for line in lines if first.match(line).group().lower() in watched]
print(sys.argv[1] + json.dumps(found))
"""


@dataclass(frozen=True)
class Interpreter:
    """What is known of an interpreter. `failure`: why it said nothing, or empty."""

    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, list[str]] = field(default_factory=dict)
    failure: str = ""

    @property
    def too_old(self) -> bool:
        return tuple(map(int, self.python.split(".")[:2])) < OLDEST_PYTHON

    def version(self, package: str) -> str:
        """Installed version of a package, under whichever name it came; empty: it is not there."""
        names = (package, *_other_names().get(package, ()))
        return next((self.versions[name] for name in names if name in self.versions), "")

    def clashes(self) -> list[str]:
        """Demands of the watched packages on one another that what is installed does not meet, in words."""
        from packaging.requirements import InvalidRequirement, Requirement  # only where a role has its own interpreter
        from packaging.version import InvalidVersion, Version

        environment = {"python_version": self.python.rpartition(".")[0], "python_full_version": self.python}
        found = []
        for name, lines in self.requires.items():
            for line in lines:
                try:
                    needed = Requirement(line)
                    here = Version(self.versions.get(needed.name.lower(), ""))
                except (InvalidRequirement, InvalidVersion):
                    continue  # not there, or not a version that can be compared
                applies = needed.marker is None or needed.marker.evaluate({**environment, "extra": ""})
                if applies and not needed.specifier.contains(here, prereleases=True):
                    found.append(
                        f"{name} {self.versions[name]} needs {needed.name}{needed.specifier}, and {here} is there"
                    )
        return found


@cache
def look_at(python: str) -> Interpreter:
    """Ask an interpreter, by its path, for its version and its packages. Never raises; asks each path once."""
    # Not -I: what PYTHONPATH adds is there for the role too. Nothing is written, not even bytecode.
    command = [python, "-B", "-c", _PROBE, _MARK, *WATCHED]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
            env=environment,
            check=False,
        )
    except OSError as error:
        return Interpreter(failure=error.strerror or str(error))
    except subprocess.TimeoutExpired:
        return Interpreter(failure=f"it said nothing for {_PROBE_TIMEOUT_S:g} s")
    answer = next((line for line in done.stdout.splitlines() if line.startswith(_MARK)), "")
    if done.returncode != 0 or not answer:
        said = (done.stderr or done.stdout).strip().splitlines()
        ended = f"it ended with code {done.returncode}"
        return Interpreter(failure=f"{ended}: {said[-1]}" if said else f"{ended} and said nothing")
    try:
        return Interpreter(**json.loads(answer.removeprefix(_MARK)))
    except (ValueError, TypeError):
        return Interpreter(failure="it is no Python: its answer is not that of the program it was given")


def packages_of(section: RoleSection, spec_dir: Path) -> Mapping[str, str] | None:
    """Versions of the watched packages in the role's interpreter; None where it does not answer."""
    path = own_path(section, spec_dir)
    if not path:
        return installed_here(WATCHED)
    found = look_at(path)
    return None if found.failure else found.versions


def own_path(section: RoleSection, spec_dir: Path) -> str:
    """Absolute path of the role's own interpreter; empty where it runs in ours. Links are kept: bin/python is what
    makes an interpreter that of its virtual environment."""
    return os.path.abspath(spec_dir / Path(section.python).expanduser()) if section.python else ""


def interpreter_problems(spec: Spec, spec_dir: Path, *, nvidia_driver: bool) -> list[Problem]:
    """What is wrong with the interpreters that roles name, and the engine packages that ours lacks.

    `nvidia_driver`: whether this machine has one; a spec for GPUs may be checked where there are none.
    """
    problems: list[Problem] = []
    for role, section in spec.sections():
        path = own_path(section, spec_dir)
        own = [*(_foreign(role, section, path) if path else _ours(role, section))]
        engine = engine_of(section)
        if not own and engine is not None:
            versions = packages_of(section, spec_dir) or {}  # ours without a process of its own
            own = [*engine.installed_problems(role, section, versions, nvidia_driver=nvidia_driver)]
        problems += own
    return problems


def _foreign(role: RoleName, section: RoleSection, path: str) -> Iterator[Problem]:
    key, value = f"{role}.python", show(section.python)
    if os.path.isdir(path):
        yield Problem(key, "is a folder", "name the interpreter in it, such as its bin/python", value)
        return
    if not os.path.isfile(path):
        yield Problem(key, f"no such interpreter ({path})", _where_to_get(section), value)
        return
    if not os.access(path, os.X_OK):
        yield Problem(key, "is not executable", "name the environment's bin/python", value)
        return
    found = look_at(path)
    if found.failure:
        yield Problem(key, f"does not start: {found.failure}", _where_to_get(section), value)
        return
    if found.too_old:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield Problem(key, f"is Python {found.python}", f"roles need Python {oldest} or newer", value)
        return
    if missing := [package for package in needed_packages(role, section) if not found.version(package)]:
        what = "package" if len(missing) == 1 else "packages"
        yield Problem(
            key, f"lacks the {what} {', '.join(missing)}", _how_to_install(role, section, path, missing), value
        )
    for clash in found.clashes():
        yield Problem(key, clash, f"install what fits there: {path} -m pip install …", value)


def _ours(role: RoleName, section: RoleSection) -> Iterator[Problem]:
    """Packages of the role's engine that our interpreter lacks."""
    engine, needed = engine_of(section), _engine_packages(section)
    here = Interpreter(versions=installed_here((*WATCHED, *needed)))
    missing = [package for package in needed if not here.version(package)]
    if engine is None or not missing:
        return
    if kind := _own_environment(section):
        hint = f"{_set_up(kind)}; then write {role}.python = {show(_made_by_setup(kind))}"
    else:
        hint = engine.where_to_get or f"{sys.executable} -m pip install {' '.join(missing)}"
    are = "is" if len(missing) == 1 else "are"
    message = f"{', '.join(missing)} {are} not installed where rlctl runs"
    yield Problem(f"{role}.engine.kind", message, hint, show(engine.kind))


def _own_environment(section: RoleSection) -> str:
    """The engine's kind where setup-engine gives it an interpreter of its own, else ""."""
    engine = engine_of(section)
    return engine.kind if engine is not None and engine.own_environment else ""


@cache
def _other_names() -> dict[str, tuple[str, ...]]:
    """Package → distributions that bring the same one, by all engines."""
    tables: tuple[type[EngineTable], ...] = (*TRAIN_TABLES, *ROLLOUT_TABLES)
    return {name: others for table in tables for name, others in (table.package_aliases or {}).items()}


def needed_packages(role: RoleName, section: RoleSection) -> tuple[str, ...]:
    """Packages that the role's process imports at least, by the name they are installed under."""
    own = _engine_packages(section) if ROLES[role].holds_model else _TEXT_PACKAGES
    launcher = {"torchrun": ("torch",), "deepspeed": ("deepspeed",)}.get(section.launcher, ())
    return tuple(dict.fromkeys((*WORKER_PACKAGES, *own, *launcher)))


def _engine_packages(section: RoleSection) -> tuple[str, ...]:
    """Empty also where the engine does not say: then nothing is missing that is known of."""
    engine = engine_of(section)
    return (engine.packages or ()) if engine is not None else ()


def _of_this_engine_alone(section: RoleSection) -> set[str]:
    """Packages of the role's engine that no other one needs."""
    others = (table for table in (*TRAIN_TABLES, *ROLLOUT_TABLES) if table is not type(engine_of(section)))
    return set(_engine_packages(section)) - {name for table in others for name in table.packages or ()}


def _where_to_get(section: RoleSection) -> str:
    kind = _own_environment(section)
    return _set_up(kind) if kind else f"leave it out to use {sys.executable}"


def _how_to_install(role: RoleName, section: RoleSection, path: str, missing: list[str]) -> str:
    kind = _own_environment(section)
    if not {*missing} & {*WORKER_PACKAGES, *_engine_packages(section)}:  # the launcher's
        install = f"{path} -m pip install {' '.join(missing)}"
        return f'set {role}.launcher = "torchrun", which needs nothing more, or {install}'
    if kind and (path == _made_by_setup(kind) or set(missing) & _of_this_engine_alone(section)):
        return _set_up(kind)
    return f"{path} -m pip install {' '.join(missing)}"


def _set_up(kind: str) -> str:
    return f"rlctl setup-engine {kind} makes {_made_by_setup(kind)}"


def _made_by_setup(kind: str) -> str:
    """Interpreter of the environment that setup-engine makes for an engine."""
    return str(environments() / f".venv-{kind}" / "bin" / "python")

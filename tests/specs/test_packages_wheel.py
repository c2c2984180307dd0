"""What pip installs, outside the clone: what rlctl names is there, and nothing names the clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from specs.packages import version_here

WINGS = ("rlctl", "workers", "backends", "specs")
BESIDE = ("scripts", "docs", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
INIT_ALL = """
from pathlib import Path
from rlctl.presets import presets, write_preset
for name in presets():
    write_preset(name, Path(f"{name}.toml"), force=False)
Path("elsewhere").mkdir()
write_preset("vllm-cpu", Path("elsewhere/spec.toml"), force=False)
"""
NAMES_THE_CLONE = re.compile(r"scripts/setup-engine|(?<![\w/])docs/[\w-]+\.md")


class Installed:
    """A virtual environment with the wheel in it, beside the packages of the one that the tests run in."""

    def __init__(self, folder: Path, repo_root: Path) -> None:
        source, self.folder = folder / "source", folder / "venv"
        source.mkdir()
        for name in WINGS:
            shutil.copytree(repo_root / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in BESIDE:
            (source / name).symlink_to(repo_root / name)
        self._environment = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        } | {"COLUMNS": "200"}
        self._run(sys.executable, "-c", BUILD, folder, cwd=source)
        (wheel,) = folder.glob("*.whl")
        self._run(sys.executable, "-m", "venv", "--without-pip", self.folder, cwd=folder)
        quiet = ("--quiet", "--disable-pip-version-check")
        pip = (sys.executable, "-m", "pip", "--python", self.folder / "bin" / "python", *quiet)
        self._run(*pip, "install", "--no-deps", "--no-index", "--no-compile", wheel, cwd=folder)
        (self.site,) = self.folder.glob("lib/python*/site-packages")
        (self.site / "theirs.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def _run(self, *command: object, cwd: Path) -> None:
        done = self.call(*command, cwd=cwd)
        assert done.returncode == 0, done.stdout + done.stderr

    def call(self, *command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        return subprocess.run(
            words, cwd=cwd, env=self._environment, capture_output=True, text=True, timeout=400, check=False
        )

    def rlctl(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return self.call(self.folder / "bin" / "rlctl", *arguments, cwd=cwd)

    def python(self, code: str, cwd: Path) -> None:
        self._run(self.folder / "bin" / "python", "-c", code, cwd=cwd)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Installed:
    pytest.importorskip("setuptools", minversion="77", reason="what builds the wheel")
    return Installed(tmp_path_factory.mktemp("wheel"), repo_root)


def test_a_spec_is_written_and_checked(installed: Installed, tmp_path: Path) -> None:
    listed = installed.rlctl("--help", cwd=tmp_path)
    assert (listed.returncode, "setup-engine" in listed.stdout) == (0, True), listed.stderr
    assert installed.rlctl("init", "spec.toml", "--preset", "fake", cwd=tmp_path).returncode == 0
    done = installed.rlctl("check-config", "spec.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_presets_name_what_is_there(installed: Installed, tmp_path: Path) -> None:
    installed.python(INIT_ALL, tmp_path)
    written = {file.stem: file.read_text() for file in tmp_path.glob("*.toml")}
    assert not [name for name, text in written.items() if NAMES_THE_CLONE.search(text)]
    assert "rlctl setup-engine vllm" in written["vllm-cpu"]
    assert 'python = ".venv-vllm/bin/python"' in written["vllm-cpu"]
    elsewhere = (tmp_path / "elsewhere" / "spec.toml").read_text()
    assert f'python = "{tmp_path}/.venv-vllm/bin/python"' in elsewhere
    (page,) = re.findall(r"(\S+/docs/rollout\.md)", written["sglang-1gpu"])
    assert Path(page).is_file()


def test_a_hint_names_the_command(installed: Installed, tmp_path: Path) -> None:
    assert installed.rlctl("init", "spec.toml", "--preset", "megatron-cpu", cwd=tmp_path).returncode == 0
    done = installed.rlctl("check-config", "spec.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert f"rlctl setup-engine megatron makes {tmp_path}/.venv-megatron/bin/python" in done.stdout + done.stderr


def test_setup_engine_works_in_the_current_folder(installed: Installed, tmp_path: Path) -> None:
    assert "megatron" in installed.rlctl("setup-engine", "--help", cwd=tmp_path).stdout
    wrong = installed.rlctl("setup-engine", "tensorrt", cwd=tmp_path)
    assert (wrong.returncode, "hint: rlctl setup-engine deepspeed" in wrong.stderr) == (2, True), wrong.stderr
    # An environment whose stamp says that it is complete.
    parts, environment = installed.site / "specs" / "shipped" / "scripts", tmp_path / ".venv-megatron"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(sys.executable)
    gpu = f". {parts}/_steps.sh; if has_gpu; then echo cuda; else echo cpu; fi"
    kind = subprocess.check_output(["bash", "-c", gpu], text=True).strip()
    parts_sum = f"cat {parts}/constraints-megatron.txt {parts}/setup-engine | cksum"
    stamp = subprocess.check_output(["bash", "-c", parts_sum], text=True).strip()
    (environment / ".rlctl-stamp").write_text(f"{kind} {stamp}")
    done = installed.rlctl("setup-engine", "megatron", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"megatron-core==\S+ is there, in {re.escape(str(environment))}\.", done.stderr)
    if f"deepspeed=={version_here('deepspeed')}" in (parts / "constraints.txt").read_text().split():
        beside = installed.rlctl("setup-engine", "deepspeed", cwd=tmp_path)
        assert (beside.returncode, "is there." in beside.stderr) == (0, True), beside.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [".venv-megatron"]

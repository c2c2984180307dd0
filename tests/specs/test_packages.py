"""Versions of installed packages, read without parsing all of their metadata."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from specs.packages import installed_here, package_root, version_here


def test_versions_are_those_of_importlib() -> None:
    """Of a name that is there twice (setuptools brings some of its own) the first on the path counts."""
    here: dict[str, str] = {}
    for found in metadata.distributions():
        here.setdefault(found.metadata["Name"].lower(), found.version)
    assert len(here) > 20
    assert installed_here(here) == here


def test_what_is_not_there_is_left_out() -> None:
    assert installed_here(("no-such-package", "pydantic")).keys() == {"pydantic"}


def test_an_old_package_without_a_dist_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ancient.egg-info").mkdir()
    text = "Metadata-Version: 1.0\nName: ancient\nVersion: 0.3.dev1\nSummary: Version: 9\n"
    (tmp_path / "ancient.egg-info" / "PKG-INFO").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert version_here("ancient") == "0.3.dev1"


def test_what_a_linked_rlctl_starts_sees_the_links_alone(tmp_path: Path) -> None:
    """A role's own interpreter gets links to our packages: the folder behind them holds another one's torch."""
    (tmp_path / "specs").symlink_to(package_root() / "specs")
    program = "from specs.packages import package_path; print(package_path(''))"
    seen = subprocess.check_output([sys.executable, "-P", "-c", program], env={"PYTHONPATH": str(tmp_path)}, text=True)
    assert seen.strip() == str(tmp_path)

"""`rlctl --version` names the commit of a clone and of its work trees, and the extras that are installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rlctl import __version__
from rlctl.version import commit_of, extras, version_line


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.check_output(["git", "-C", str(folder), *who, *arguments], text=True).strip()


@pytest.mark.parametrize("packed", [False, True])
def test_the_commit_is_that_of_git(tmp_path: Path, packed: bool) -> None:
    git(tmp_path, "init", "--quiet", "clone")
    clone, tree = tmp_path / "clone", tmp_path / "tree"
    assert commit_of(clone) == "", "nothing is committed"
    git(clone, "commit", "--quiet", "--allow-empty", "--message", "one")
    git(clone, "worktree", "add", "--quiet", str(tree))
    if packed:
        git(clone, "pack-refs", "--all")
    assert commit_of(clone) == commit_of(tree) == git(clone, "rev-parse", "HEAD")
    git(clone, "checkout", "--quiet", "--detach")
    assert commit_of(clone) == git(clone, "rev-parse", "HEAD")
    assert commit_of(tmp_path) == ""


def test_an_extra_is_there_with_all_its_packages(tmp_path: Path) -> None:
    for name in ("rlctl-0.1.0", "mcp-2.0", "aio_http-3.0", "wandb-1.0"):
        (tmp_path / f"{name}.dist-info").mkdir()
    lines = (
        'mcp>=2; extra == "mcp"',
        'aio-http; extra == "agents"',
        "wandb; extra == 'tracking'",
        'b; extra == "tracking"',
    )
    text = "".join(f"Requires-Dist: {line}\n" for line in ("numpy", *lines))
    (tmp_path / "rlctl-0.1.0.dist-info" / "METADATA").write_text(text)
    assert list(extras(["/none", str(tmp_path)])) == ["mcp", "agents"]
    assert list(extras([])) == []
    assert version_line().startswith(f"rlctl {__version__} (")

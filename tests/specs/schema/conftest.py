"""What the tests of all keys begin with."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where relative paths of a spec begin, with the hostfiles that it may name."""
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")
    (tmp_path / "more_hosts").write_text("c slots=4\nd slots=4\n")
    return tmp_path

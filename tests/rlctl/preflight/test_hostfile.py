"""Hostfiles: what is read, and errors that name line and text."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.preflight.hostfile import Host, read_hostfile
from specs.errors import SpecError


def test_hosts_with_comments_and_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\nnode-1.example  slots=8\n\n10.0.0.2 slots=4 # the old one\n")
    assert read_hostfile(file) == [Host("node-1.example", 8), Host("10.0.0.2", 4)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a slots=2\nb", "line 2: `b` is not a host"),
        ("a slots=0", "line 1: `a slots=0`"),
        ("-oProxyCommand=x slots=1", "is not a host"),
        ("a slots=2\n\na slots=2", "line 3: a is listed twice"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        read_hostfile(file)
    assert words in str(caught.value)
    assert "cluster.hostfile" in str(caught.value)

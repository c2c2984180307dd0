"""A run outlives whoever watched it: pipes that close, terminals that hang up."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stderr
from io import BytesIO, TextIOWrapper

import pytest

from rlctl.cli import show_error
from rlctl.show.streams import SafeStdout, visible_streams
from specs.errors import RlctlError


def closed_pipe():
    """The writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w", buffering=1)


@pytest.mark.parametrize("where", ["pipe", "disk"])
def test_what_nobody_takes_goes_nowhere(where):
    with closed_pipe() if where == "pipe" else open("/dev/full", "w", buffering=1) as file:
        outlet = SafeStdout(file)
        for _ in range(3):
            assert outlet.write("line\n") == 5
            outlet.flush()
    # the end of the block flushes what was left: that raised nothing either


def test_an_error_that_nobody_hears_is_no_second_error():
    with closed_pipe() as file, redirect_stderr(file):
        show_error(RlctlError("one", hint="two"))
        assert sys.stderr is file


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_terminal_without_unicode_ends_no_command(name, monkeypatch):
    monkeypatch.setattr(sys, name, TextIOWrapper(raw := BytesIO(), encoding="latin-1", write_through=True))
    with visible_streams():
        print("2 × 3 – 5", file=getattr(sys, name))
    assert raw.getvalue() == b"2 \xd7 3 ? 5\n"

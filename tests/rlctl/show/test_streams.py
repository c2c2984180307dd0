"""A run outlives whoever watched it: pipes that close, terminals that hang up."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import redirect_stderr

import pytest
from running import preset, start, steps_done, wait_for, workers_of

from rlctl.cli import show_error
from rlctl.show.streams import SafeStdout
from specs.errors import RlctlError

FOREVER = ("--set", "run.steps=100000", "--set", "checkpoint.every=100000")


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


def test_what_was_reached_is_saved_though_nobody_listens(tmp_path):
    """Closing an ssh session: SIGHUP, and no terminal any more. Ctrl-C on `rlctl train … 2>&1 | tee log` ends alike."""
    run = tmp_path / "run"
    driver = start("train", preset("fake", tmp_path), "--run-dir", run, *FOREVER)
    try:
        wait_for(lambda: steps_done(run) >= 2 or driver.poll() is not None, 150, "the second step")
        driver.stdout.close()
        driver.send_signal(signal.SIGHUP)
        assert driver.wait(timeout=200) == 130
    finally:
        driver.kill()
        driver.wait()
    newest = max(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*"))
    assert newest == steps_done(run) >= 2
    wait_for(lambda: not workers_of(run), 150, "the end of every worker")

"""What people's code prints is bounded on the disk, at every moment and whichever way it is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workers.grading import output_log

PRINTS = """
import os, sys
for _ in range(50):
    os.write(2, b"x" * 9_999 + b"\\n")
    print("y" * 9_999, flush=True)
"""


def test_a_log_has_the_last_that_was_printed_and_says_how_much_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_log, "LOG_BYTES", 200_000)
    monkeypatch.setattr(output_log, "READ_BYTES", 10_000)
    log = tmp_path / "log"
    for times in (1, 2):
        output, reader = output_log.log_output(log)
        with open(output, "wb") as pipe:
            process = subprocess.Popen([sys.executable, "-c", PRINTS], stdout=pipe, stderr=pipe)
        while process.poll() is None:
            assert not log.exists() or log.stat().st_size <= 200_000
        reader.join()
        head, _, kept = log.read_bytes().partition(b"\n")
        said = int(head.removeprefix(b"(").removesuffix(b" bytes that were printed before this are left out)"))
        assert len(kept) < 200_000
        assert kept.endswith(b"y" * 9_999 + b"\n")
        assert times * 1_000_000 <= said + len(kept) < times * 1_000_000 + 2_000  # what it said before is dropped, too

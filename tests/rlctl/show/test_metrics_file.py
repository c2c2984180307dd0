"""`metrics.jsonl`: what is written comes back, and a resume cuts off the later steps."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlctl.show.metrics_file import MetricsWriter, read_metrics, truncate_after
from specs.errors import NotFiniteError, RlctlError, RunDirError


def write_steps(path: Path, steps: range, **options: int) -> None:
    with MetricsWriter(path, **options) as writer:
        for step in steps:
            writer.write({"step": step, "reward/mean": step / 10})


def test_a_number_that_is_not_finite_ends_the_run_and_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 1, "x": np.float32(3)})
        with pytest.raises(NotFiniteError, match="step 2: actor/grad_norm is inf, actor/loss is nan"):
            writer.write({"step": 2, "actor/grad_norm": math.inf, "actor/loss": np.float32("nan"), "x": np.int64(3)})
    assert read_metrics(path)[1] == {"step": 2, "actor/grad_norm": None, "actor/loss": None, "x": 3}


def test_resume_drops_later_steps_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 7))
    first_three = path.read_text().splitlines()[:3]
    write_steps(path, range(4, 7), resume_step=3)
    assert path.read_text().splitlines()[:3] == first_three
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5, 6]


def test_a_torn_last_line_is_left_out_and_a_bad_middle_one_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "rew')
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    truncate_after(path, 1)
    assert path.read_text() == '{"step": 1}\n'
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(RunDirError, match=r"metrics.jsonl:2"):
        read_metrics(path)


def test_a_disk_that_refuses_everything_is_told(tmp_path: Path) -> None:
    """As one that became read-only after an error: half a line can then not be taken back either."""
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 1})
        writer._file.close()
        writer._file = io.FileIO(os.open(path, os.O_RDONLY), "a")
        with pytest.raises(RlctlError, match=r"cannot write .*metrics\.jsonl"):
            writer.write({"step": 2})
    assert read_metrics(path) == [{"step": 1}]


FULL_DISK = """
import json, resource, signal, sys
from pathlib import Path
from rlctl.show.metrics_file import MetricsWriter, read_metrics
from specs.errors import RlctlError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
path = Path(sys.argv[1])
with MetricsWriter(path) as writer:
    for step in range(1, 1000):
        try:
            writer.write({"step": step, "text": "x" * 30})
        except RlctlError as error:
            print(json.dumps([step, error.message, error.hint, len(read_metrics(path))]))
            break
"""


def test_a_full_disk_is_told_and_leaves_whole_lines(tmp_path: Path, repo_root: Path) -> None:
    """The file size limit makes the kernel refuse a write in the middle of a line, as a full disk does."""
    path = tmp_path / "metrics.jsonl"
    command = [sys.executable, "-c", FULL_DISK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=repo_root, timeout=400)
    step, message, hint, kept = json.loads(done.stdout)
    assert str(path) in message
    assert "--resume" in hint
    assert kept == step - 1
    assert path.read_bytes().endswith(b"\n")

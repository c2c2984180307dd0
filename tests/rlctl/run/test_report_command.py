"""The page of a run that goes on is written by a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlctl.cli import main
from rlctl.run import report_command
from rlctl.run.report_command import RunningReport
from rlctl.run.run_lock import RunLock
from rlctl.show.report_page import write_page
from specs.errors import UsageError


def test_a_running_page_is_there_once_it_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "resolved.json").write_text('{"run": {"name": "mine"}}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    lock, page = RunLock(tmp_path, ""), tmp_path / "report.html"
    (mine := tmp_path / "mine" / "workers").mkdir(parents=True)  # what is in the current folder is not ours
    (mine / "__init__.py").touch()
    monkeypatch.chdir(mine.parent)
    early = RunningReport(tmp_path)
    monkeypatch.setattr(report_command, "REPORT_S", 0.0)
    due = RunningReport(tmp_path)
    for written, report in ((False, early), (True, due)):
        report.follow(10_000)
        report.close()
        assert page.exists() is written
    assert "Running: 2 steps done" in page.read_text()
    page.unlink()
    due.follow(10_001)
    due.close()
    assert not page.exists(), "no more than a hundredth of the time"
    lock.release()


def test_a_page_goes_into_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with os.fdopen(os.open(pipe, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0) as end:
        write_page(pipe, "a page")
        assert end.read(6) == b"a page"
    assert pipe.is_fifo()


def test_a_page_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    (page := tmp_path / "resolved.json").write_text("{}")
    for out in (page / "x.html", tmp_path, Path()):
        with pytest.raises(UsageError, match="cannot be written: "):
            report_command.report([tmp_path], out)


def test_a_page_replaces_pages_and_no_other_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in (runs := [tmp_path / "one", tmp_path / "two"]):
        run.mkdir()
        (run / "resolved.json").write_text("{}")
    (page := tmp_path / "page.html").touch()
    assert main(["report", *map(str, runs), "--out", str(page)]) == 0
    assert main(["report", str(runs[0]), "--out", str(page)]) == 0
    assert "<h1>one</h1>" in page.read_text()
    (spec := tmp_path / "spec.toml").write_text("schema = 1")
    for chosen in (runs, runs[:1]):
        assert main(["report", *map(str, chosen), "--out", str(spec)]) == 2
    assert spec.read_text() == "schema = 1"
    assert "--out" in capsys.readouterr().err

"""The report with which torchrun 2.13.0 ends when a rank of its group has failed."""

from __future__ import annotations

from pathlib import Path

from rlctl.processes.torchrun_report import codes_of_failures

REPORT = """\
W1122 01:26:10.123000 4711 torch/distributed/elastic/multiprocessing/api.py:1014] Sending process 4712 closing signal SIGTERM
E1122 01:26:10.456000 4711 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: -9) local_rank: 1 (pid: 4713)
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
workers.main FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-22_01:26:10
  host      : node
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 4712)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_01:26:09
  host      : node
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 4713)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4713
============================================================
"""  # noqa: E501


def test_the_root_cause_comes_first_and_others_are_known(tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    log.write_text("rank 7 says: exitcode  : 3\n" + REPORT)
    assert list(codes_of_failures(log).items()) == [(1, -9), (0, 1)]


def test_a_lone_failure(tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    others, _, root = REPORT.partition("[1]:")
    log.write_text(others + "  <NO_OTHER_FAILURES>\n" + root[root.index("-----") :])
    assert codes_of_failures(log) == {1: -9}


def test_without_a_report_nobody_is_named(tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    log.write_text("killed before it could say anything\n")
    assert codes_of_failures(log) == {}
    assert codes_of_failures(tmp_path / "none") == {}

"""Reward functions as `check-config` calls them: once, as a run would, leaving nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from corpus import write_case
from process_ends import ended
from running import listing

from rlctl.check.check_command import check
from rlctl.check.findings import Findings, examine
from rlctl.check.meaning import as_dict

FUNCTION = {"reward.terms.0": {"kind": "function", "path": "rewards.py:score"}}
SCORE = "def score(prompt, completion, row): return float(len(completion))\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def found_of(folder: Path, code: str, **sets: Any) -> Findings:
    return examine(write_case({"set": FUNCTION | sets, "files": {"rewards.py": code}}, folder), ())


def test_the_score_or_the_traceback_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for code, score, shown in (
        ("def score(completion, answer): return 2 * (completion == answer)\n", 2.0, "score       2"),
        ("def score(completion): return int('x')\n", None, "ValueError: invalid literal for int()"),
    ):
        spec = write_case({"set": FUNCTION, "files": {"rewards.py": code}}, tmp_path)
        (call,) = as_dict(examine(spec, ()), spec)["reward_functions"]
        assert (call["path"], call["score"]) == ("rewards.py:score", score)
        assert ("rewards.py" in call["traceback"]) == (score is None)
        assert (check(spec, (), as_json=False) == 0) == (score is not None)
        assert shown in capsys.readouterr().out


def test_it_is_imported_with_its_environment_and_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    code = "import os, helper\nprint('loud', flush=True)\nos.write(2, b'louder')\nassert os.environ['A'] == 'b'\n"
    files = {"rewards.py": code + SCORE, "helper.py": "import sys\nassert sys.stdin.read() == ''\n"}
    spec = write_case({"set": {**FUNCTION, "reward.env": {"A": "b"}}, "files": files}, tmp_path)
    before = listing(tmp_path)
    assert examine(spec, ()).problems == []
    assert listing(tmp_path) == before
    assert capfd.readouterr() == ("", "")


def test_an_import_that_hangs_is_given_up_and_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl.check.own_functions.IMPORT_TIMEOUT_S", 3.0)
    code = "import subprocess, time\nchild = subprocess.Popen(['sleep', '600'])\n"
    code += "with open('pid', 'w') as file:\n    file.write(str(child.pid))\ntime.sleep(600)\n"
    (problem,) = found_of(tmp_path, code + SCORE).problems
    assert "cannot be loaded: not ready after 3 s" in problem.message
    assert ended(int((tmp_path / "pid").read_text()))


def test_a_call_that_hangs_is_a_warning(tmp_path: Path) -> None:
    code = "import time\ndef score(completion): time.sleep(600)\n"
    found = found_of(tmp_path, code, **{"reward.timeout_s": 0.5})
    assert found.problems == []
    (warning,) = found.warnings
    assert "score, called with the first row, gives no score: no score within 0.5 s" in warning.message


BACKGROUND = {
    "a thread": "threading.Thread(target=time.sleep, args=(600,)).start()\n",
    "a server": "start([sys.executable, '-c', 'import http.server as h; h.test(port=0, bind=\"127.0.0.1\")'])\n",
    "a server of its own session": "start(['sleep', '600'], start_new_session=True, stdin=-3, stdout=-3, stderr=-3)\n",
    "a grandchild of its own session": "start(['sh', '-c', 'setsid sleep 600 & echo $! >> pids'])\n",
    "an end that waits": "atexit.register(time.sleep, 600)\n",
}


def test_threads_and_servers_are_no_alarm_and_do_not_stay(tmp_path: Path) -> None:
    code = "import atexit, subprocess, sys, threading, time\n\ndef start(command, **how):\n"
    code += "    open('pids', 'a').write(f'{subprocess.Popen(command, **how).pid}\\n')\n"
    files = {f"r{number}.py": code + lines + SCORE for number, lines in enumerate(BACKGROUND.values())}
    terms = [{"kind": "function", "path": f"{name}:score"} for name in files]
    found = examine(write_case({"set": {"reward.terms": terms}, "files": files}, tmp_path), ())
    assert (found.problems, found.warnings) == ([], [])
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) >= 3
    assert all(map(ended, pids))

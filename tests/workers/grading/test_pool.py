"""Rewards that hang, crash, print, raise and lie: each takes only its own sample with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from given_up import LIMIT_S, given_up
from probe_groups import wait_until
from process_ends import ended

from specs.errors import RewardError
from workers.grading.pool import Grade, GraderPool
from workers.grading.reward_failures import MAX_RECORDS, FailureLog, is_of_code, last_line
from workers.grading.terms import GradeRequest, Setting, make_term

NAUGHTY = """
    import ctypes, os, subprocess, sys, time

    def score(prompt, completion, row):
        do = completion
        if do == "hang":
            while True:
                pass
        if do == "hang-with-child":
            for own_session in (False, True):
                command = [sys.executable, "-c", "import time; time.sleep(600)  # " + row["mark"]]
                subprocess.Popen(command, start_new_session=own_session)
            time.sleep(600)
        if do == "exit":
            os._exit(3)
        if do == "sys.exit":
            sys.exit(5)
        if do == "segfault":
            ctypes.string_at(0)
        if do == "raise":
            raise KeyError("no such thing")
        if do == "recurse":
            return score(prompt, completion, row)
        if do == "print":
            print('{"i": 0, "t": [99.0]}')
            print("x" * 5_000_000)
            sys.stderr.write("to stderr\\n")
            os.write(1, b'{"i": 0, "t": [99.0]}\\n')
            return 0.5
        if do == "print-no-text":
            print("\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07 half \\ud800")
            sys.stderr.write("\\x9b2J\\n")
            return 0.5
        if do == "raise-no-text":
            raise ValueError("\\x1b]0;title\\x07 half \\ud800")
        if do == "half":
            return "\\ud800"
        if do == "read":
            return float(len(sys.stdin.read()))
        if do == "close":
            os.closerange(3, 64)
            return 1.0
        if do == "fork":
            if os.fork() == 0:
                return 99.0
            return 0.25
        if do == "nan":
            return float("nan")
        if do == "none":
            return None
        if do == "text":
            return "1.0"
        if do == "huge-int":
            return 10**400
        if do == "too-large":
            return -1e38
        if do == "true":
            return True
        if do == "numpy":
            import numpy
            return numpy.float32(0.75)
        return float(completion) + row.get("add", 0)
"""
FAILING = {
    "hang": "timeouts",
    "exit": "crashes",
    "segfault": "crashes",
    "close": "crashes",
    "sys.exit": "exceptions",
    "raise": "exceptions",
    "recurse": "exceptions",
    "nan": "bad_values",
    "none": "bad_values",
    "text": "bad_values",
    "huge-int": "bad_values",
    "too-large": "bad_values",
    "raise-no-text": "exceptions",
    "half": "bad_values",
}
WORKING = {"print": 0.5, "print-no-text": 0.5, "read": 0.0, "fork": 0.25, "true": 1.0, "numpy": 0.75, "3": 3.0}

MakePool = Callable[..., GraderPool]


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    pools: list[GraderPool] = []

    def make(
        code: str, *, workers: int = 2, timeout_s: float = LIMIT_S, terms: list[dict[str, Any]] | None = None
    ) -> GraderPool:
        (tmp_path / "rewards.py").write_text(textwrap.dedent(code), "utf-8")
        terms = terms or [{"kind": "function", "path": "rewards.py:score"}]
        log = tmp_path / "output.log"
        pool = GraderPool(
            terms, Setting("answer", 8, str(tmp_path)), workers=workers, timeout_s=timeout_s, log_path=log
        )
        pools.append(pool.start())
        pool.wait_ready()
        return pool

    yield make
    for pool in pools:
        pids = [process.process.pid for process in pool._processes.values()]
        pool.close()
        assert not any(psutil.pid_exists(pid) for pid in pids)


def request(completion: str, row_key: int = 0, **row: Any) -> GradeRequest:
    return GradeRequest(row_key, "prompt", row, completion, len(completion))


def test_each_failure_takes_only_its_own_sample(make_pool: MakePool) -> None:
    """All kinds of failure in one call, healthy samples between them: every healthy one keeps its own score."""
    pool = make_pool(NAUGHTY, timeout_s=LIMIT_S)
    asked: list[str] = []
    for number, name in enumerate([*FAILING, *WORKING]):
        asked += [str(1000 + number), name, str(2000 + number)]
    with given_up(pool, "hang"):
        grades = pool.grade([request(name) for name in asked])
    assert len(grades) == len(asked)
    for name, grade in zip(asked, grades, strict=True):
        if name in FAILING:
            assert grade.cause == FAILING[name], (name, grade)
            assert grade.text
        else:
            expected = WORKING[name] if name in WORKING else float(name)
            assert grade == Grade((expected,)), name


def test_the_last_line_of_a_failure_names_the_exception(make_pool: MakePool, tmp_path: Path) -> None:
    """However long its message is, and of however many lines; where it was raised stays."""
    code = """
        def score(prompt, completion, row):
            raise ValueError(row["message"])
    """
    pool = make_pool(code, workers=1)
    messages = {
        "x" * 5000: "ValueError: xxx",
        "a\nb\n": "ValueError: a b",
        "short": "ValueError: short",
        "": "ValueError",
    }
    grades = pool.grade([request("", number, message=message) for number, message in enumerate(messages)])
    for grade, last in zip(grades, messages.values(), strict=True):
        assert last_line(grade.text).startswith(last)
        assert len(last_line(grade.text)) <= 500
        assert is_of_code(grade.cause, grade.text)
        assert "line 3, in score" in grade.text


def test_a_kill_reaches_what_the_reward_started(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(NAUGHTY, workers=1, timeout_s=2)
    mark = f"mark-of-{tmp_path.name}-{os.getpid()}"
    (grade,) = pool.grade([request("hang-with-child", mark=mark)])
    assert grade.cause == "timeouts"
    everybody = partial(psutil.process_iter, ["cmdline"])
    assert wait_until(lambda: not any(mark in " ".join(one.info["cmdline"] or []) for one in everybody()))


def test_slow_samples_run_side_by_side(make_pool: MakePool) -> None:
    """Each of four sees the other three at work: no process waits while another has a queue."""
    code = """
        import os, time
        def score(prompt, completion, row):
            open(os.path.join(row["folder"], completion), "w").close()
            until = time.monotonic() + 80
            while len(os.listdir(row["folder"])) < 4:
                if time.monotonic() > until:
                    return 0.0
                time.sleep(0.01)
            return 1.0
    """
    pool = make_pool(code, workers=4, timeout_s=LIMIT_S)
    folder = pool.log_path.parent / "seen"
    folder.mkdir()
    grades = pool.grade([request(str(i), folder=str(folder)) for i in range(4)])
    assert grades == [Grade((1.0,))] * 4


def test_rewards_do_not_see_the_secret(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_SECRET", "hush")
    pool = make_pool("import os\ndef score(p, c, row): return float('RLCTL_SECRET' in os.environ)", workers=1)
    assert pool.grade([request("")]) == [Grade((0.0,))]


def test_a_process_that_is_replaced_runs_the_code_that_the_run_started_with(
    make_pool: MakePool, tmp_path: Path
) -> None:
    """The files are edited meanwhile: for the next run, or half."""
    (tmp_path / "tables").mkdir()
    for name, value in (("words.py", 1), ("tables/__init__.py", 10), ("tables/more.py", 100)):
        (tmp_path / name).write_text(f"VALUE = {value}\n")
    code = """
        import os, words, tables

        def score(prompt, completion, row):
            from tables import more
            return os._exit(3) if completion == "exit" else words.VALUE + tables.VALUE + more.VALUE
    """
    pool = make_pool(code, workers=1)
    assert pool.grade([request("a")]) == [Grade((111.0,))]
    for name in ("rewards.py", "words.py", "tables/__init__.py", "tables/more.py"):
        (tmp_path / name).write_text("VALUE = 2  # (\ndef score(prompt, completion, row): return 9.0")
    grades = pool.grade([request("exit"), request("a")])
    assert [grade.cause for grade in grades] == ["crashes", ""]
    assert grades[1] == Grade((111.0,))


def test_what_rewards_print_goes_to_the_log_as_a_terminal_may_show_it(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(NAUGHTY, workers=1)
    grades = pool.grade([request(how) for how in ("print", "print-no-text", "raise-no-text", "half")])
    assert wait_until(lambda: "\\x9b2J\n" in pool.log_path.read_text("utf-8")), "it comes a moment later"
    log = pool.log_path.read_text("utf-8")
    pool.log_path.unlink()
    assert pool.grade([request("3")]) == [Grade((3.0,))], "nobody needs the log"
    assert "to stderr" in log
    assert '{"i": 0, "t": [99.0]}' in log, "what looks like an answer, too"
    assert "red \\x1b]0;title\\x07 half \\ud800\n" in log
    assert "\\x9b2J\n" in log
    FailureLog(tmp_path / "failures.jsonl").append([{"text": grade.text} for grade in grades if grade.cause])
    failures = (tmp_path / "failures.jsonl").read_text("utf-8")
    assert "\\u001b]0;title" in failures
    assert not set(log + failures) & set("\x1b\x07\x9b\ud800")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = 1\n\nimport no_such_module_anywhere\n", "reward.terms[1]: "),
        ("import os\nos._exit(0)\n", "status 0"),
        ("import ctypes\nctypes.string_at(0)\n", "SIGSEGV"),
    ],
)
def test_a_reward_that_cannot_be_loaded_ends_the_start(make_pool: MakePool, code: str, words: str) -> None:
    good = {"kind": "regex", "pattern": "a", "weight": 1.0}
    with pytest.raises(RewardError) as error:
        make_pool(code, workers=1, terms=[good, {"kind": "function", "path": "rewards.py:score"}])
    assert words in error.value.message
    assert error.value.hint


def test_processes_die_with_their_parent(tmp_path: Path) -> None:
    """A parent that is killed leaves nothing, not even a reward in an endless loop."""
    (tmp_path / "rewards.py").write_text("def score(p, c, r):\n    while True: pass\n", "utf-8")
    code = f"""
        from pathlib import Path
        from workers.grading.pool import GraderPool
        from workers.grading.terms import GradeRequest, Setting
        terms = [{{"kind": "function", "path": "rewards.py:score"}}]
        folder = Path({str(tmp_path)!r})
        pool = GraderPool(terms, Setting("a", 8, str(folder)), workers=2, timeout_s=600, log_path=folder / "log")
        pool.start().wait_ready()
        print(*(process.process.pid for process in pool._processes.values()), flush=True)
        pool.grade([GradeRequest(0, "", {{}}, "", 0)] * 2)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait(60)
    parent.stdout.close()
    assert all(map(ended, pids))


# ── the built-in terms ────────────────────────────────────────────────────────────────────────────

SETTING = Setting("answer", max_response_tokens=10, base=".")


def value(table: dict[str, Any], completion: str, answer: Any = "", tokens: int = 1) -> float:
    return make_term(table, SETTING)(GradeRequest(0, "", {"answer": answer}, completion, tokens))


@pytest.mark.parametrize(
    ("completion", "answer", "partial", "ignore_case", "expected"),
    [
        (" 1234\n", "1234", False, False, 1.0),
        ("1243", "1234", False, False, 0.0),
        ("1243", "1234", True, False, 0.5),
        ("12345678", "1234", True, False, 0.5),
        ("", "1234", True, False, 0.0),
        ("Yes", "yes", False, True, 1.0),
        ("Yes", "yes", False, False, 0.0),
        ("72", "so 48+24\n#### 72", False, False, 1.0),
        ("72", 72, False, False, 1.0),
    ],
)
def test_exact_match(completion: str, answer: Any, partial: bool, ignore_case: bool, expected: float) -> None:
    table = {"kind": "exact_match", "partial": partial, "ignore_case": ignore_case}
    assert value(table, completion, answer) == expected


def test_regex() -> None:
    table = {"kind": "regex", "pattern": r"^<think>.*</think>\s*\d+$"}
    assert value(table, "<think>one\ntwo</think> 42") == 1.0
    assert value(table, "42") == 0.0


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("The answer is $\\boxed{72}$.", "72", 1.0),
        ("So she sold 72 clips", "half of 48 is 24\n#### 72", 1.0),
        ("$\\frac{144}{2}$", "72", 1.0),
        ("72.0", "72", 1.0),
        ("71", "72", 0.0),
        ("nothing", "72", 0.0),
        ("1080", "#### 1,080", 1.0),
        ("$x^2 + 2x + 1$", "$(x+1)^2$", 1.0),
        ("$\\boxed{3\\sqrt{2}}$", "3\\sqrt{2}", 1.0),
        ("$\\boxed{3}$", "3\\sqrt{2}", 0.0),
        ("$\\boxed{2}$", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", 0.0),
        ("$\\boxed{(-\\infty, 0]}$", "(-\\infty, 0]", 1.0),
        ("$\\boxed{0}$", "(-\\infty, 0]", 0.0),
        ("$\\boxed{3, 2}$", "2, 3", 1.0),
        ("$\\boxed{B}$", "B", 1.0),
        ("7", "7 cm^2", 1.0),
        ("20", "20 dollars", 1.0),
        ("1234.5", "$1,234.50", 1.0),
        ("12", "It is 12.", 1.0),
        ("72", "72 (seventy two)", 1.0),
    ],
)
def test_math_verify(completion: str, answer: str, expected: float) -> None:
    assert value({"kind": "math_verify"}, completion, answer) == expected


def test_math_verify_survives_a_blow_up(make_pool: MakePool) -> None:
    """A number that sympy would compute for ever costs its own sample the time limit, and nobody else's."""
    pool = make_pool("", workers=1, timeout_s=LIMIT_S, terms=[{"kind": "math_verify"}])
    requests = [GradeRequest(0, "", {"answer": "8"}, text, 1) for text in ("8", "$9^{9^{9^{9}}}$", "$2^3$", "9")]
    with given_up(pool, requests[1].completion, after_s=2.0):
        first, blow_up, *rest = pool.grade(requests)
    assert [first, *rest] == [Grade((1.0,)), Grade((1.0,)), Grade((0.0,))]
    assert blow_up.cause == "timeouts" or blow_up == Grade((0.0,))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = 1\ndef score(:\n", r"rewards\.py:2: SyntaxError"),
        ("x = 1\n\nimport no_such_module_anywhere\n", r"rewards\.py:3: ModuleNotFoundError"),
        ("def other(p, c, r): return 0\n", "defines no score"),
        ("score = 3\n", "is int, not a function"),
        ("import sys\nsys.exit(0)\n", r"rewards\.py:2: SystemExit"),
        ("", r"rewards\.py does not exist"),
    ],
)
def test_a_file_without_a_reward_is_named(tmp_path: Path, code: str, words: str) -> None:
    if code:
        (tmp_path / "rewards.py").write_text(code)
    with pytest.raises(RewardError, match=words) as error:
        make_term({"kind": "function", "path": "rewards.py:score"}, Setting("answer", 8, str(tmp_path)))
    assert error.value.hint


def test_what_one_term_does_to_an_episode_no_other_sees(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def score(messages): return len(messages.pop()['content'])\n")
    score = make_term({"kind": "function", "path": "rewards.py:score"}, Setting("answer", 8, str(tmp_path)))
    sample = GradeRequest(0, "", {}, "", 1, episode={"messages": [{"content": "a"}, {"content": "four"}]})
    assert [score(sample), score(sample)] == [4, 4]


def test_an_answer_without_a_value_is_no_zero() -> None:
    with pytest.raises(ValueError, match="no value"):
        value({"kind": "math_verify"}, "1", "none at all")


def test_the_failure_log_is_bounded(tmp_path: Path) -> None:
    log = FailureLog(tmp_path / "failures.jsonl")
    for start in range(0, 2 * MAX_RECORDS, 300):
        log.append([{"id": start + i, "completion": "c" * 100_000 if start == i == 0 else "c"} for i in range(300)])
    records = [json.loads(line) for line in log.path.read_text("utf-8").splitlines()]
    assert [record["id"] for record in records] == list(range(MAX_RECORDS))
    assert len(records[0]["completion"]) < 10_000

"""Reward functions as `check-config` calls them: one that hangs on some completions is not waited for long."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from corpus import write_case

from rlctl.check import reward_import
from rlctl.check.findings import examine

HANGS = """import time

def score(completion, answer):
    if "sure" in completion:
        time.sleep(60)
    return float(completion == answer)
"""


def test_a_function_that_hangs_on_a_likely_completion_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_import, "CALL_S", 2.0)
    for patience in ("_QUICK_S", "_MORE_S"):  # for a busy machine
        monkeypatch.setattr(reward_import, patience, 60.0)
    terms = {"reward.terms": [{"kind": "function", "path": "r.py:score"}]}
    started = time.monotonic()
    found = examine(write_case({"set": terms, "files": {"r.py": HANGS}}, tmp_path), ())
    assert time.monotonic() - started < 50
    (said,) = found.warnings
    assert 'called with the completion "I am not sure.", gives no score: it took more than 2 s' in said.message


def test_what_is_shown_for_the_rows_own_answer_is_for_an_answer(tmp_path: Path) -> None:
    changes = {"data.train": "d.jsonl", "reward.terms": [{"kind": "function", "path": "r.py:score"}]}
    rows = '{"prompt": "1+1=", "sum": "2"}\n{"prompt": "1+4=", "sum": "5"}\n'
    files = {"d.jsonl": rows, "r.py": "def score(completion, sum):\n    return float(completion == sum)\n"}
    for column, of_answer in (("answer", None), ("sum", 1.0)):
        case = {"set": changes | {"data.answer_column": column}, "files": files}
        (tried,) = examine(write_case(case, tmp_path), ()).tried
        assert (tried.own_answer, tried.empty) == (of_answer, 0.0)
        assert tried.without_answer == ("" if of_answer else "answer")


LATE = """import time

def score(completion, answer):
    if len(completion) > 1000:
        time.sleep(0.6)
    return float(completion == answer)
"""


def test_a_call_that_was_not_waited_for_is_no_answer_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_import, "_LONG_S", 0.3)
    for patience in ("_QUICK_S", "_MORE_S", "_GROWTH_S"):  # for a busy machine
        monkeypatch.setattr(reward_import, patience, 60.0)
    changes = {"data.max_response_tokens": 400, "model.path": "./model", "actor.micro_batch_tokens": 8192}
    terms = {"reward.terms": [{"kind": "function", "path": "r.py:score"}]}
    model = {"config.json": {"max_position_embeddings": 512}}
    found = examine(write_case({"set": changes | terms, "model": model, "files": {"r.py": LATE}}, tmp_path), ())
    (said,) = found.warnings
    assert "does not end for a completion of" in said.message

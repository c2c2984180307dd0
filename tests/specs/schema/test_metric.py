"""`docs/metrics.md` has every metric once. That runs write no others, `running.metrics` checks in each of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from declared_metrics import declared, matching
from running import metrics


def test_no_metric_is_declared_twice() -> None:
    names = [name for metric in declared() for name in metric.names]
    assert [name for name, times in Counter(names).items() if times > 1] == []
    for name in names:
        key = name.replace("<role>", "actor").replace("<set>", "held-out").replace("<i>", "0").replace("<k>", "8")
        assert matching(key.replace("<n>", "1")) == (name,)


def test_a_run_that_writes_another_one_fails_its_test(tmp_path: Path) -> None:
    line = {"step": 1, "reward/mean": 0.5, "eval/heldout/pass@8": 0.1}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert metrics(tmp_path) == [line]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**line, "actor/news": 1}) + "\n")
    with pytest.raises(AssertionError, match="actor/news"):
        metrics(tmp_path)

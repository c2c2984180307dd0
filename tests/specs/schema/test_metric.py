"""`docs/spec.md` has every metric once. That runs write no others, `running.metrics` checks in each of them."""

from __future__ import annotations

from collections import Counter

from declared_metrics import declared, matching


def test_no_metric_is_declared_twice() -> None:
    names = [name for metric in declared() for name in metric.names]
    assert [name for name, times in Counter(names).items() if times > 1] == []
    for name in names:
        key = name.replace("<role>", "actor").replace("<set>", "held-out").replace("<i>", "0").replace("<k>", "8")
        assert matching(key.replace("<n>", "1")) == (name,)

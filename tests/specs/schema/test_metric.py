"""`docs/metrics.md` has every metric once. That runs write no others, `running.metrics` checks in each of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from declared_metrics import declared, matching
from running import metrics

from specs.schema.roles import ROLES


def test_no_metric_is_declared_twice() -> None:
    names = [name for metric in declared() for name in metric.names]
    assert [name for name, times in Counter(names).items() if times > 1] == []
    for name in names:
        key = name.replace("<role>", "actor").replace("<set>", "held-out").replace("<i>", "0").replace("<k>", "8")
        assert matching(key.replace("<n>", "1")) == (name,)


def test_modules_and_losses_are_found() -> None:
    assert {
        "sync/verified",
        "reward/term_<i>",
        "time/wall_s",
        "reward/failed_crashes",
        "actor/loss",
        "critic/loss",
    } <= {metric.name for metric in declared()}
    clipped = next(metric for metric in declared() if metric.name == "actor/clip_fraction")
    assert "`ppo_clip`" in clipped.when
    assert "`sapo`" not in clipped.when
    assert next(metric for metric in declared() if metric.name == "actor/loss").when == "steps in which the role learns"


@pytest.mark.parametrize("role", ROLES)
def test_a_role_of_two_words_is_one_role(role: str) -> None:
    assert matching(f"mem/{role}_before_offload_GiB") == ("mem/<role>_before_offload_GiB",)


def test_a_run_that_writes_another_one_fails_its_test(tmp_path: Path) -> None:
    line = {"step": 1, "reward/mean": 0.5, "eval/heldout/pass@8": 0.1}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert metrics(tmp_path) == [line]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**line, "actor/news": 1}) + "\n")
    with pytest.raises(AssertionError, match="actor/news"):
        metrics(tmp_path)

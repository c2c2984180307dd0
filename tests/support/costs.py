"""What a run of tests cost, by test and by file; and the dearest files first in the next run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest

MEMORY = "rlctl/file_seconds"  # in pytest's cache
SHOWN = 10
WORTH_TELLING_S = 30.0


def sort_dearest_first(items: list[pytest.Item], config: pytest.Config) -> None:
    """Files in the order of what they cost last time; those that no run has seen come first when they are `slow`. A
    dear file started last would have a core to itself at the end."""
    known = _known(config)
    slow = {_file(item.nodeid) for item in items if item.get_closest_marker("slow")}

    def cost(item: pytest.Item) -> float:
        file = _file(item.nodeid)
        return known.get(file, float("inf") if file in slow else 0.0)

    items.sort(key=cost, reverse=True)  # stable: a file stays together


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_BEGAN] = time.monotonic()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: pytest.ExitCode, config: pytest.Config
) -> None:
    tests: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                tests[report.nodeid] += report.duration
    files: Counter[str] = Counter()
    for nodeid, seconds in tests.items():
        files[_file(nodeid)] += seconds
    if (cache := _cache(config)) and exitstatus == pytest.ExitCode.OK and not _some_of_a_file(config):
        cache.set(MEMORY, {**_known(config), **_seconds(files.items())})
    if sum(tests.values()) < WORTH_TELLING_S:
        return
    for title, costs in (("tests", tests), ("files", files)):
        terminalreporter.section(f"the {SHOWN} dearest {title}")
        for name, seconds in costs.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:7.1f} s  {name}")
    took = time.monotonic() - config.stash[_BEGAN]
    terminalreporter.write_line(f"all: {took:.0f} s, in which {sum(tests.values()):.0f} s of tests")


_BEGAN = pytest.StashKey[float]()


def _cache(config: pytest.Config) -> pytest.Cache | None:
    return getattr(config, "cache", None)  # absent with -p no:cacheprovider


def _known(config: pytest.Config) -> Mapping[str, float]:
    found: Mapping[str, float] = cache.get(MEMORY, {}) if (cache := _cache(config)) else {}
    return found


def _some_of_a_file(config: pytest.Config) -> bool:
    chosen = config.option.keyword or config.option.markexpr or config.option.lf
    return bool(chosen) or any("::" in argument for argument in config.args)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _seconds(costs: Iterable[tuple[str, float]]) -> dict[str, float]:
    return {name: round(seconds, 1) for name, seconds in costs}

"""Find evaluations in a line of metrics: `eval/<name>/<metric>`, and choose what is shown first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlctl.show.text_format import number

PREFIX = "eval/"
MEAN = "reward_mean"
SOLVED = "pass@"


def by_set(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return name → metric → value (a number, or a series that is not empty) of each evaluation that has a mean
    reward, in the order of the line."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in metrics.items():
        name, _, metric = key.removeprefix(PREFIX).rpartition("/")
        if key.startswith(PREFIX) and metric and isinstance(value, int | float | list) and value != []:
            found.setdefault(name, {})[metric] = value
    return {name: values for name, values in found.items() if MEAN in values}


def solved(metrics: Iterable[str]) -> list[str]:
    """Return the pass@k among the metrics, smallest k first."""
    found = [metric for metric in metrics if metric.startswith(SOLVED) and metric.removeprefix(SOLVED).isdecimal()]
    return sorted(dict.fromkeys(found), key=lambda metric: int(metric.removeprefix(SOLVED)))


def shown(metrics: Iterable[str]) -> list[str]:
    """Choose what is shown of a set where there is little room: its mean, pass@1 and the largest pass@k."""
    own = list(metrics)
    ends = solved(own)
    return [metric for metric in (MEAN, *dict.fromkeys(ends[:1] + ends[-1:])) if metric in own]


def words(values: Mapping[str, float]) -> str:
    """Write 0.553, pass@1 0.42, pass@8 0.71."""
    return ", ".join(f"{'' if metric == MEAN else metric + ' '}{number(values[metric])}" for metric in shown(values))


def keys(lines: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return heading → key of what is shown of every evaluation in these lines, in the order of the spec."""
    return {
        f"eval {name}{'' if metric == MEAN else ' ' + metric}": f"{PREFIX}{name}/{metric}"
        for name, metrics in by_set({key: True for line in lines for key in line}).items()
        for metric in shown(metrics)
    }

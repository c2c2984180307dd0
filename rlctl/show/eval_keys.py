"""Choose what of a run's metrics is shown first, and find evaluations in a line of them: `eval/<name>/<metric>`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlctl.show.text_format import number

PREFIX = "eval/"
MEAN = "reward_mean"
SOLVED = "pass@"
BESIDES = (MEAN, "reward_accuracy", "accuracy", "loss", "perplexity", "token_accuracy")  # besides what is first


@dataclass(frozen=True)
class Headline:
    """Name a number that says how a run goes: its word, its key in a line of metrics, its name in an evaluation."""

    word: str
    key: str
    metric: str
    falls: bool = False  # whether less is better


HEADLINES = (
    Headline("reward", "reward/mean", MEAN),
    Headline("accuracy", "actor/reward_accuracy", "reward_accuracy"),
    Headline("accuracy", "reward_model/accuracy", "accuracy"),
    Headline("loss", "actor/loss", "loss", falls=True),
)


def headline(lines: Iterable[Mapping[str, Any]]) -> Headline:
    """Return what a run with these lines of metrics is followed by: the first that one of them has."""
    keys = {key for line in lines for key in line}
    return next((each for each in HEADLINES if each.key in keys), HEADLINES[0])


def main(values: Container[str]) -> str:
    """Return the metric of an evaluation that is shown first; "" where it has none."""
    return next((each.metric for each in HEADLINES if each.metric in values), "")


def by_set(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return name → metric → value (a number, or a series that is not empty) of each evaluation that has one to
    show first, in the order of the line."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in metrics.items():
        name, _, metric = key.removeprefix(PREFIX).rpartition("/")
        if key.startswith(PREFIX) and metric and isinstance(value, int | float | list) and value != []:
            found.setdefault(name, {})[metric] = value
    return {name: values for name, values in found.items() if main(values)}


def word(values: Container[str]) -> str:
    """Return the word for what is shown first of an evaluation."""
    return next((each.word for each in HEADLINES if each.metric in values), "")


def solved(metrics: Iterable[str]) -> list[str]:
    """Return the pass@k among the metrics, smallest k first."""
    found = [metric for metric in metrics if metric.startswith(SOLVED) and metric.removeprefix(SOLVED).isdecimal()]
    return sorted(dict.fromkeys(found), key=lambda metric: int(metric.removeprefix(SOLVED)))


def shown(metrics: Iterable[str]) -> list[str]:
    """Choose what is shown of a set where there is little room: what comes first, pass@1 and the largest pass@k; of
    rows the loss."""
    own = list(metrics)
    ends = solved(own)
    return [metric for metric in dict.fromkeys((main(own), *ends[:1], *ends[-1:], *BESIDES)) if metric in own]


def words(values: Mapping[str, float]) -> str:
    """Write 0.553, pass@1 0.42, pass@8 0.71."""
    first = main(values)
    return ", ".join(f"{'' if metric == first else metric + ' '}{number(values[metric])}" for metric in shown(values))


def keys(lines: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return heading → key of what is shown of every evaluation in these lines, in the order of the spec."""
    return {
        f"eval {name}{'' if metric == main(metrics) else ' ' + metric}": f"{PREFIX}{name}/{metric}"
        for name, metrics in by_set({key: True for line in lines for key in line}).items()
        for metric in shown(metrics)
    }

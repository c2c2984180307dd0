"""A metric of `metrics.jsonl`. Each is declared where it is made: in the tuple `METRICS` of that module, or in
the table of its loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Parts of the name in angle brackets vary: `reward/term_<i>`."""

    name: str
    unit: str = ""
    meaning: str
    when: str = ""  # it is written; empty: at every step
    in_eval: bool = False  # evaluations have it too, under `eval/<set>/`

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, f"eval/<set>/{self.name.rpartition('/')[2]}") if self.in_eval else (self.name,)


def metrics(when: str, meanings: Mapping[str, str], *, in_eval: bool = False) -> tuple[Metric, ...]:
    """Declare metrics that are written at the same time. `meanings`: by their names, with the unit in brackets."""
    named = [(*name.removesuffix("]").partition(" ["), meaning) for name, meaning in meanings.items()]
    return tuple(Metric(name=n, unit=unit, meaning=text, when=when, in_eval=in_eval) for n, _, unit, text in named)

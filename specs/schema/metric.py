"""A metric of `metrics.jsonl`. Each is declared where it is made: in the tuple `METRICS` of that module, or in
the table of its loss."""

from __future__ import annotations

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

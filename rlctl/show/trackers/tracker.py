"""What a tracker is, and what it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from specs.load.dotted_keys import flattened

Ended = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True)
class Attempt:
    """What a tracker is opened with. `config`: every key of the spec; `state`: what it `remembers` of an earlier
    attempt of the same run, {} for a new one."""

    name: str
    run_dir: Path
    config: Mapping[str, Any]
    state: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Samples:
    """Decoded samples of a step, as a table."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    @staticmethod
    def of(step: int, samples: Sequence[Mapping[str, Any]]) -> Samples:
        """A table of lines of `samples.jsonl`. Columns are those that any of them has; each term of the reward has its
        own."""
        flat = [_flat_sample(step, sample) for sample in samples]
        columns = tuple(dict.fromkeys(name for sample in flat for name in sample))
        return Samples(columns, tuple(tuple(sample.get(name) for name in columns) for sample in flat))


class Tracker(ABC):
    """A tracker, opened by its table of `[[tracking]]`. `remembers`: how a later attempt finds the same run;
    `address`: where a person does."""

    hint: ClassVar[str]  # where it does not start
    remembers: Mapping[str, str] = {}
    address = ""

    def __init__(self, table: Any, attempt: Attempt) -> None:
        """Raises ImportError, or what its package raises."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float], samples: Samples | None) -> None:
        """What a step left. After a resume, a step may come a second time."""

    @abstractmethod
    def close(self, ended: Ended) -> None:
        """Write out what is pending."""


def hyperparameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved spec by dotted keys; keys without a value are left out."""
    return {key: value for key, value in flattened(config).items() if value not in (None, "", [], {})}


def _flat_sample(step: int, sample: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in sample.items() if name not in ("terms", "id")}
    terms = sample.get("terms") or []
    named = (
        terms.items() if isinstance(terms, Mapping) else ((f"term_{number}", one) for number, one in enumerate(terms))
    )
    plain = {name: value if isinstance(value, str | int | float | None) else str(value) for name, value in rest.items()}
    return {"step": step, **plain, **dict(named)}

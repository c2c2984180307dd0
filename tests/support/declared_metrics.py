"""Every metric that the modules and the tables of losses declare."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

from specs.load.keys import kind_of, tables_of
from specs.schema.algorithms.algorithm import AnyLoss, Loss
from specs.schema.algorithms.algorithm_tables import LOSS_TABLES
from specs.schema.metric import Metric
from specs.schema.objectives import BradleyTerry
from specs.schema.recipes import RECIPES, RlSpec

PLACES = ("rlctl.loop", "rlctl.recipes", "rlctl.run", "workers.grading")  # packages whose modules may have `METRICS`


@cache
def declared() -> tuple[Metric, ...]:
    return (*_of_modules(), *_of_losses())


def _of_modules() -> Iterator[Metric]:
    for place in PLACES:
        package = import_module(place)
        for module in walk_packages(package.__path__, f"{place}."):
            # Only modules that say so: importing is slow.
            found = Path(str(module.module_finder.path), f"{module.name.rpartition('.')[2]}.py")  # type: ignore[union-attr]
            if found.is_file() and "\nMETRICS: tuple[Metric, ...] = " in found.read_text(encoding="utf-8"):
                yield from import_module(module.name).METRICS


def _of_losses() -> Iterator[Metric]:
    """A metric of some losses alone says of which."""
    policies = [loss for loss in LOSS_TABLES if issubclass(loss, Loss)]
    objectives = [table for recipe in RECIPES.values() for table in _objectives(recipe)]
    of_actor = [table for table in objectives if table is not BradleyTerry]
    named = {metric.name for loss in policies for metric in loss.metrics}
    for losses in (policies, [loss for loss in LOSS_TABLES if loss not in policies], of_actor, [BradleyTerry]):
        for metric in dict.fromkeys(metric for loss in losses for metric in loss.metrics):
            if losses is of_actor and metric.name in named:
                continue
            having = [loss for loss in losses if metric in loss.metrics]
            when = "the run learns from rows" if losses is of_actor else "steps in which the role learns"
            if len(having) < len(losses):
                when += ", with the loss " + ", ".join(
                    f"`{kind_of(loss) or loss.model_fields['kind'].default}`" for loss in having
                )
            yield Metric(name=metric.name, unit=metric.unit, meaning=metric.meaning, when=when)


def _objectives(recipe: type[RlSpec]) -> list[type[AnyLoss]]:
    field = recipe.model_fields.get("objective")
    return [table for table in tables_of(field.annotation) if "kind" in table.model_fields] if field else []


@cache
def matching(key: str) -> tuple[str, ...]:
    """The declared names that a key of `metrics.jsonl` may be; there must be one."""
    names = (*(name for metric in declared() for name in metric.names), *_of_rows())
    return tuple(name for name in names if _pattern(name).fullmatch(key))


@cache
def _of_rows() -> tuple[str, ...]:
    """What docs/spec.md says in a sentence: evaluations on rows have the metrics of the objective."""
    tables = {table for recipe in RECIPES.values() for table in _objectives(recipe)}
    own = {metric.name.rpartition("/")[2] for table in tables for metric in table.metrics}
    return tuple(f"eval/<set>/{name}" for name in sorted({*own, "perplexity"}))


def undeclared(keys: Iterable[str]) -> list[str]:
    return sorted(key for key in keys if not matching(key))


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(
        "".join("[^/]+?" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", name))
    )

"""The registry of engines: the tables that `[actor]`, `[ref]` and `[rollout]` choose from by `engine.kind`.

A new engine adds its table here. Kinds that are none of these may be another package's
(`specs/schema/engines/foreign.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Union, get_args

from pydantic import Field, PlainSerializer, WrapValidator

from specs.schema.engines import foreign
from specs.schema.engines.ddp_table import DdpTable
from specs.schema.engines.engine_table import EngineTable, RolloutTable, TrainTable
from specs.schema.engines.fake_tables import FakeRolloutTable, FakeTrainTable
from specs.schema.engines.fsdp2_table import Fsdp2Table
from specs.schema.engines.megatron_table import MegatronTable
from specs.schema.engines.sglang_table import SglangTable
from specs.schema.engines.torch_rollout_table import TorchRolloutTable
from specs.schema.engines.vllm_table import VllmTable
from specs.schema.engines.zero_table import ZeroTable

_HELPERS = ("accelerate", "packaging")  # packages of engines that say nothing of what ran

TRAIN_TABLES: tuple[type[TrainTable], ...] = (DdpTable, Fsdp2Table, ZeroTable, MegatronTable, FakeTrainTable)
ROLLOUT_TABLES: tuple[type[RolloutTable], ...] = (TorchRolloutTable, VllmTable, SglangTable, FakeRolloutTable)

if TYPE_CHECKING:
    TrainEngineTable = TrainTable
    RolloutEngineTable = RolloutTable
else:
    TrainEngineTable = Annotated[
        Union[TRAIN_TABLES],  # noqa: UP007
        Field(discriminator="kind"),
        WrapValidator(foreign.or_foreign("train")),
        PlainSerializer(foreign.dump),
    ]
    RolloutEngineTable = Annotated[
        Union[ROLLOUT_TABLES],  # noqa: UP007
        Field(discriminator="kind"),
        WrapValidator(foreign.or_foreign("rollout")),
        PlainSerializer(foreign.dump),
    ]


@cache
def own_kinds(family: foreign.Family) -> Mapping[str, type[EngineTable]]:
    """Return kind → table of rlctl's own engines, aliases included."""
    tables: tuple[type[EngineTable], ...] = TRAIN_TABLES if family == "train" else ROLLOUT_TABLES
    return {kind: table for table in tables for kind in get_args(table.model_fields["kind"].annotation)}


def readers_of(engine: TrainTable) -> list[str]:
    """Return the kinds that can resume what this engine saves."""
    same = [
        kind
        for kind, table in own_kinds("train").items()
        if issubclass(table, TrainTable) and table.checkpoint_format == engine.checkpoint_format is not None
    ]
    return list(dict.fromkeys([engine.kind, *same]))


def table_of(family: foreign.Family, kind: str) -> type[EngineTable] | None:
    """Return the table of an engine, rlctl's own or another package's; None for a kind that nobody brings."""
    return own_kinds(family).get(kind) or foreign.foreign_table(family, kind)


@cache
def library_names() -> tuple[str, ...]:
    """Return the distributions that rlctl's engines are made of, aliases included: their versions say what ran."""
    found = ["torch", "transformers"]
    for table in (*ROLLOUT_TABLES, *TRAIN_TABLES):
        for package in table.packages or ():
            found += [package, *table.package_aliases.get(package, ())]
    return tuple(dict.fromkeys(name for name in found if name not in _HELPERS))

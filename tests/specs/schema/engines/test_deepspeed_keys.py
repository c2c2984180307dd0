"""The keys that may stand in `[actor.engine.deepspeed]` are those of the DeepSpeed that is installed."""

from __future__ import annotations

import datetime
import math
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest

from specs.schema.engines import deepspeed_keys
from specs.schema.engines.deepspeed_keys import Keys, key_problem
from specs.schema.engines.library_keys import Flag, Kind, Number, Text, Texts, leaves

FLAG, SHARE, COUNT = Flag(), Number(0, 1, whole=False), Number(0)

# name → type and bounds of every field of DeepSpeed's own classes, as it reads them from JSON
ASK = """
import json, sys
from annotated_types import Ge, Gt, Le, Lt
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

def fields(of):
    found = {}
    for name, field in of.model_fields.items():
        least = [one.ge for one in field.metadata if isinstance(one, Ge)]
        least += [one.gt + 1 for one in field.metadata if isinstance(one, Gt)]
        most = [one.le for one in field.metadata if isinstance(one, Le)]
        found[field.alias or name] = [str(field.annotation), *[next(iter(x), None) for x in (least, most)]]
    return found

print("KEYS " + json.dumps({
    "ZERO_OPTIMIZATION": fields(DeepSpeedZeroConfig),
    "OFFLOAD_PARAM": fields(DeepSpeedZeroOffloadParamConfig),
    "OFFLOAD_OPTIMIZER": fields(DeepSpeedZeroOffloadOptimizerConfig),
    "TENSORBOARD": fields(TensorBoardConfig),
    "WANDB": fields(WandbConfig),
    "CSV_MONITOR": fields(CSVConfig),
    "COMMS_LOGGER": fields(CommsLoggerConfig),
}))
"""


def installed() -> dict[str, dict[str, list[Any]]]:
    import json

    try:
        metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        pytest.skip("scripts/setup-engine deepspeed adds it")
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    found: dict[str, dict[str, list[Any]]] = json.loads(done.stdout.partition("KEYS ")[2])
    return found


def alike(kind: Kind | Keys, annotation: str, least: float | None, most: float | None) -> bool:
    match kind:
        case Flag():
            return "bool" in annotation
        case Number():
            bounds = (
                kind.least if math.isfinite(kind.least) else None,
                kind.most if math.isfinite(kind.most) else None,
            )
            whole = "float" not in annotation
            return ("int" in annotation or not whole) and kind.whole == whole and bounds == (least, most)
        case Text():
            return "str" in annotation or "Path" in annotation or "Enum" in annotation
        case Texts():
            return "list" in annotation.lower()
    return "Config" in annotation


@pytest.mark.slow
def test_every_key_is_one_of_deepspeeds_own_classes() -> None:
    for table, fields in installed().items():
        known: Keys = getattr(deepspeed_keys, table)
        assert known.keys() == fields.keys()
        for name, field in fields.items():
            own = known[name]
            bounded_by_an_enum = name == "stage"
            assert bounded_by_an_enum or alike(own, *field), (table, name, own, field)


@pytest.mark.parametrize(
    ("kind", "taken", "refused"),
    [
        (FLAG, [True, False], ["auto", 1, None, "true"]),
        (COUNT, [0, 3, 5e8], [-1, 1.5, math.nan, math.inf, "auto", "5", True, datetime.date(2024, 1, 1)]),
        (SHARE, [0, 0.5, 1], [-0.1, 1.5, math.nan, "0.5", False]),
        (Text(("fp32", "bf16")), ["fp32"], ["fp8", 32, None]),
        (Texts(), [[], ["a"], ("a", "b")], ["a", [1]]),
    ],
)
def test_what_a_key_takes(kind: Kind, taken: list[object], refused: list[object]) -> None:
    assert [value for value in taken if not kind.takes(value)] == []
    assert [value for value in refused if kind.takes(value)] == []


def test_a_value_where_a_table_is_and_a_table_where_a_value_is() -> None:
    def said(table: dict[str, Any]) -> str:
        (leaf,) = leaves(table)
        return str(key_problem("actor.engine.deepspeed", *leaf))

    assert "flops_profiler = true: is a table" in said({"flops_profiler": True})
    assert "steps_per_print: must be a whole number at least 1, not a table" in said({"steps_per_print": {"every": 3}})
    assert "comms: is not a key" in said({"comms": {"enabled": True}})
    assert said({"wall_clock_breakdown": True}) == "None"

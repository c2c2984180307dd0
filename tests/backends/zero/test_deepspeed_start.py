"""DeepSpeed itself checks the keys that a spec adds: names and values, with the whole key in the error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from optional import skip_without
from train_helpers import train_config

from backends.zero.deepspeed_start import check_keys, import_deepspeed
from specs.errors import ModelError
from specs.schema.engines.zero_table import ZeroTable

skip_without("deepspeed", "scripts/setup-engine deepspeed installs it")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"steps_per_prnt": 3}, "steps_per_prnt: DeepSpeed has no such key"),
        ({"zero_optimization": {"reduce_bucket_sise": 5}}, "zero_optimization.reduce_bucket_sise: DeepSpeed refuses"),
        ({"comms_logger": {"enabled": "maybe"}}, "comms_logger.enabled: DeepSpeed refuses it: Input should be a valid"),
        ({"communication_data_type": "fp8"}, "(communication_data_type): DeepSpeed refuses it: Invalid"),
    ],
)
def test_what_deepspeed_does_not_take_is_named(own: dict[str, Any], words: str) -> None:
    config = train_config(Path(), engine=ZeroTable(deepspeed=own))
    with pytest.raises(ModelError) as raised:
        check_keys(import_deepspeed("cpu"), config)
    assert raised.value.message.startswith("actor.engine.deepspeed")
    assert words in raised.value.message
    assert raised.value.hint


def test_what_deepspeed_takes_is_handed_on() -> None:
    own = {
        "steps_per_print": 10,
        "zero_optimization": {"stage3_max_live_parameters": 1000},
        "wall_clock_breakdown": True,
    }
    check_keys(import_deepspeed("cpu"), train_config(Path(), engine=ZeroTable(deepspeed=own)))
    check_keys(import_deepspeed("cpu"), train_config(Path(), engine=ZeroTable()))

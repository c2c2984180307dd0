"""The DeepSpeed engine on one rank. What it does on several is in `tests/backends/test_protocol_sharded.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from gpu import on_cpu_and_gpu
from optional import skip_without
from sharded_worker import bad_step
from train_helpers import QWEN2, build_engine, largest_gap, learn, train_config, weights_of, write_model

from backends.protocol import Rank
from backends.registry import train_engine
from backends.train.role_group import device_index
from specs.schema.engines.ddp_table import DdpTable
from specs.schema.engines.zero_table import ZeroTable
from specs.schema.role_section import Lora

skip_without("deepspeed", "scripts/setup-engine deepspeed installs it")


def test_one_engine_after_another_in_a_process(tmp_path: Path) -> None:
    """What is closed leaves no group behind that the next one would use."""
    folder = write_model(tmp_path / "model", QWEN2)
    for stage in (1, 2, 3, 1):
        engine = build_engine(train_config(folder, engine=ZeroTable(stage=stage)))
        assert engine.built().mesh == {"shard": 1}
        engine.close()


@pytest.mark.parametrize("device", on_cpu_and_gpu())
def test_a_rank_that_sees_only_its_own_device_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """The fourth rank of a host: DeepSpeed takes LOCAL_RANK for the number of a visible device."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    folder = write_model(tmp_path / "model", QWEN2)
    config = train_config(folder, engine=ZeroTable(stage=3), model={"device": device})
    engine = train_engine("zero").build(config, Rank(local_rank=3))
    visible = torch.cuda.device_count() if device == "cuda" else 1
    assert os.environ["LOCAL_RANK"] == str(device_index(Rank(local_rank=3), visible))
    assert learn(engine, 1)
    engine.close()


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_compute_in_bf16_as_those_of_other_engines(tmp_path: Path, stage: int) -> None:
    """The masters are fp32 and start as drawn; a build in two dtypes would be refused before training."""
    folder = write_model(tmp_path / "model", QWEN2)
    config = train_config(folder, lora=Lora(rank=4, alpha=12.0), model={"dtype": "bf16"})
    ddp = build_engine(config)
    zero = config.model_copy(update={"engine": ZeroTable(stage=stage)})
    planned, engine = train_engine("zero").on_meta(zero, Rank()), build_engine(zero)
    assert planned is not None
    assert engine.built().dtype == planned.model.dtype == "bf16"
    assert largest_gap(weights_of(engine, form="apart"), weights_of(ddp, form="apart")) == 0
    assert learn(engine, 2) == pytest.approx(learn(ddp, 2), rel=1e-3)
    engine.close()


@pytest.mark.parametrize("table", [{}, {"offload_optimizer": True}])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_skipped_step_leaves_no_gradient_to_the_next(tmp_path: Path, stage: int, table: dict[str, bool]) -> None:
    folder = write_model(tmp_path / "model", QWEN2)
    config = train_config(folder, model={"dtype": "bf16"}, engine=ZeroTable(stage=stage, **table))
    engine, ddp = build_engine(config), build_engine(config.model_copy(update={"engine": DdpTable()}))
    for each in (engine, ddp):
        assert bad_step(each, Rank())
    assert learn(engine, 2) == pytest.approx(learn(ddp, 2), rel=1e-3)
    assert largest_gap(weights_of(engine), weights_of(ddp)) < 1e-5
    engine.close()

"""The DeepSpeed engine on one rank. What it does on several is in `tests/backends/test_protocol_sharded.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from train_helpers import QWEN2, build_engine, train_config, write_model

from specs.schema.engines.zero_table import ZeroTable

pytest.importorskip("deepspeed")


@pytest.mark.parametrize("chunk", [3, 4096])
def test_the_table_decides_the_chunks_of_logits(tmp_path: Path, chunk: int) -> None:
    folder = write_model(tmp_path / "model", QWEN2)
    engine = build_engine(train_config(folder, engine=ZeroTable(stage=2, logits_chunk_tokens=chunk)))
    assert max(end - start for start, end in engine.policy.head.chunks(10_000)) == chunk
    engine.close()


def test_one_engine_after_another_in_a_process(tmp_path: Path) -> None:
    """What is closed leaves no group behind that the next one would use."""
    folder = write_model(tmp_path / "model", QWEN2)
    for stage in (1, 2, 3, 1):
        engine = build_engine(train_config(folder, engine=ZeroTable(stage=stage)))
        assert engine.built().mesh == {"shard": 1}
        engine.close()

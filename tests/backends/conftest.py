"""What tests of several engines begin with: a tiny model's folder, and an engine that holds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from train_helpers import ENGINES, QWEN2, build_engine, train_config, write_model

from backends.protocol import TrainEngine


@pytest.fixture
def qwen2(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", QWEN2)


@pytest.fixture(params=list(ENGINES))
def make(request: pytest.FixtureRequest, qwen2: Path) -> Callable[..., TrainEngine]:
    return lambda **changes: build_engine(train_config(qwen2, request.param, **changes))

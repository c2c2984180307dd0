"""A real vLLM for the tests of a file, and a trainer whose adapters it applies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm_process import VllmProcess
from vllm_syncing import trainer_of

from backends.train.engine import HfTrainEngine


@pytest.fixture(scope="module")
def process() -> Iterator[VllmProcess]:
    process = VllmProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def trainer() -> HfTrainEngine:
    return trainer_of()

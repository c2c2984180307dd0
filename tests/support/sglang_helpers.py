"""Puts the test's SGLang server where `python -m sglang.launch_server` finds it, and shares servers between tests."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import warm
from rollout_helpers import rollout_config

from backends.hf.model_shape import model_shape
from backends.protocol import Rank
from backends.rollout.stop_tokens import stop_tokens
from backends.sglang_rollout.client import ServerError
from backends.sglang_rollout.engine import SglangRolloutEngine
from backends.sglang_rollout.fingerprints import Fingerprints
from backends.sglang_rollout.server import Server, arguments
from specs.schema.engines.sglang_table import SglangTable
from specs.wire.role_config import RolloutConfig

REPO = Path(__file__).resolve().parents[2]
_running: dict[str, Server] = {}
_half_way: list[SglangRolloutEngine] = []  # the last engine: its test may have ended in the middle of a sync
FAULT = Path(tempfile.gettempdir()) / f"rlctl-test-sglang-fault-{os.getpid()}"
SERVER = REPO / "tests" / "support" / "sglang_server.py"


@contextmanager
def sglang_installed() -> Iterator[None]:
    """Inside, child processes find a package `sglang` whose launch_server is the test's."""
    with tempfile.TemporaryDirectory(prefix="rlctl-test-sglang-") as folder, pytest.MonkeyPatch.context() as patch:
        package = Path(folder) / "sglang"
        package.mkdir()
        (package / "__init__.py").touch()
        start = f"import runpy\nrunpy.run_path({str(SERVER)!r}, run_name='__main__')\n"
        (package / "launch_server.py").write_text(start)
        patch.setenv("PYTHONPATH", os.pathsep.join([folder, str(REPO)]))
        patch.setenv("SGLANG_TEST_FAULT", str(FAULT))
        yield


@contextmanager
def fault(kind: str) -> Iterator[None]:
    """Inside, every server has this fault (see `sglang_server.py`)."""
    FAULT.write_text(kind)
    try:
        yield
    finally:
        mend()


def mend() -> None:
    """End the fault before its block does."""
    FAULT.unlink(missing_ok=True)


class SharedSglang(SglangRolloutEngine):
    """The engine on a shared server: one start costs seconds."""

    @classmethod
    def build(cls, config: RolloutConfig, rank: Rank) -> SglangRolloutEngine:
        return engine_on_shared_server(config)


def build_sglang(folder: Path, **table: object) -> SglangRolloutEngine:
    return engine_on_shared_server(rollout_config(folder, "sglang", **table))


def engine_on_shared_server(config: RolloutConfig) -> SglangRolloutEngine:
    """A new engine with nothing imported, over a server that earlier tests with the same model and command line used:
    one start costs seconds. What they released is back; its weights are whatever they were."""
    assert isinstance(config.engine, SglangTable)
    if "weights_backup" not in config.engine.model_fields_set:  # every server can sleep at level 1
        table = config.engine.model_copy(update={"weights_backup": True})
        config = config.model_copy(update={"engine": table})
    shape = model_shape(config.model)
    text = Path(config.model.path, "config.json").read_text()
    key = text + " ".join(arguments(config, port=0)).replace(config.model.path, "")
    if key not in _running:
        with sglang_installed(), warm.children():
            _running[key] = Server.start(config)
        atexit.register(_running[key].stop)
    server = _running[key]
    for engine in _half_way:
        engine._drop_folder()
    for tag in ("weights", "kv_cache"):
        with suppress(ServerError):  # it was not released
            server.client.request("/resume_memory_occupation", {"tags": [tag]})
    engine = SglangRolloutEngine(config, shape, server, stop_tokens(shape.end_tokens, config, ask_tokenizer=True))
    engine._fingerprints = Fingerprints(())  # an earlier test may have loaded the same weights
    _half_way[:] = [engine]
    return engine

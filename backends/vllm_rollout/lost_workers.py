"""Detects dead worker processes of vLLM (with tensor parallelism, one per part of the model)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from specs.errors import SamplerDied

if TYPE_CHECKING:
    from vllm import LLM

DEATH_GRACE_S = 2.0  # an error caused by a dying worker may arrive before the process has ended
_POLL_S = 0.05


@contextmanager
def death_of_workers_told(llm: LLM) -> Iterator[None]:
    """Turns errors caused by a dead worker into SamplerDied, so that the driver restarts the sampler."""
    try:
        yield
    except Exception as error:
        ended = _ended_within(DEATH_GRACE_S, _workers(llm))
        if ended is None:
            raise
        raise SamplerDied(
            f"vLLM's worker process {ended.name} ended with exit code {ended.exitcode}",
            hint="see its last messages in this role's log",
        ) from error


def _workers(llm: LLM) -> list[Any]:
    """Processes of vLLM's workers; none where the model is in this one."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return [worker.proc for worker in getattr(executor, "workers", ())]


def _ended_within(grace_s: float, processes: list[Any]) -> Any | None:
    until = time.monotonic() + grace_s
    while processes:
        for process in processes:
            if not process.is_alive():
                return process
        if time.monotonic() > until:
            break
        time.sleep(_POLL_S)
    return None

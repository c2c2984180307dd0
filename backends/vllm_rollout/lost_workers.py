"""Workers that vLLM has beside this process, and what their end means: with tensor parallelism, one for each part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from specs.errors import SamplerDied

if TYPE_CHECKING:
    from vllm import LLM

DEATH_GRACE_S = 2.0  # an error that a dying worker caused may be here before its end is
_POLL_S = 0.05


@contextmanager
def death_of_workers_told(llm: LLM) -> Iterator[None]:
    """Errors that the end of a worker explains become SamplerDied: the sampler is to be started again."""
    try:
        yield
    except Exception as error:
        ended = _ended_within(DEATH_GRACE_S, _workers(llm))
        if ended is None:
            raise
        raise SamplerDied(
            f"vLLM's worker process {ended.name} ended with exit code {ended.exitcode}",
            hint="its last words stand in this role's log",
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

"""Run coroutines in a thread of their own, for code that others call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop that runs from `start` to `close`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self, end: Callable[[], Awaitable[None]], within_s: float) -> None:
        """Break off what is under way, and then run `end`; what does not end in time ends with the process."""
        wait([self.run(_break_off(end))], within_s)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(within_s)
        if not self._thread.is_alive():
            self.loop.close()


async def _break_off(end: Callable[[], Awaitable[None]]) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await end()

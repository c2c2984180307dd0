"""Say what this process does and how far it is: whoever computes counts, the heartbeat reads (`workers/connection.py`).

A process has one. A count costs less than a microsecond: once per decode step, micro-batch or weight is nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specs.wire.heartbeat import amount

_COLLECTIVES = f"{os.sep}torch{os.sep}distributed{os.sep}"  # Python files whose innermost frame means: waits for others


class _Now:
    """Written by the main thread, read by the heartbeat's: each field is replaced as a whole."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}  # of the process's life, by unit
        self.verb = ""  # empty: nothing to do
        self.what = self.unit = self.waits_for = ""
        self.call = self.before = self.of_all = 0
        self.began = 0.0
        self.counted = True


_now = _Now()


def begin(verb: str, call: int, *, counted: bool) -> None:
    """A verb begins. `counted`: one that goes well is short, or counts as it goes."""
    _now.what, _now.unit, _now.waits_for, _now.before, _now.of_all = verb, "", "", 0, 0
    _now.call, _now.counted, _now.began = call, counted, time.monotonic()
    _now.verb = verb


def end() -> None:
    _now.verb = ""


def verb() -> str:
    """The verb that is served; "" for none."""
    return _now.verb


def call() -> int:
    """The number of the verb that was begun last."""
    return _now.call


def describe(what: str, unit: str, *, counted: bool) -> None:
    """Say what the verb has to do, and what it will count: a singular noun. `counted`: whether it surely will."""
    _now.what, _now.unit, _now.counted = what, unit, counted
    _now.before = total(unit)


def describe_samples(samples: int, tokens: int, *, ranks: int = 1) -> None:
    """Say that the verb has to compute so many samples; on several `ranks`: those of all, shared. What it counts
    stays. Nothing outside a verb."""
    if _now.verb:
        shared = f", shared by {ranks} ranks" if ranks > 1 else ""
        _now.what = f"{_now.verb} of {amount(samples, 'sample')}, {tokens:,} tokens{shared}"


def count(unit: str, more: int = 1) -> None:
    """So many more are done."""
    _now.counts[unit] = total(unit) + more


def expect(more: int) -> None:
    """Say that the verb has so many more of its unit to do."""
    _now.of_all += more


def total(unit: str) -> int:
    """How many this process has done in its life."""
    return _now.counts.get(unit, 0)


@contextmanager
def waiting_for(peer: str) -> Iterator[None]:
    """Inside, this rank waits for `peer` and does nothing itself."""
    before, _now.waits_for = _now.waits_for, peer
    try:
        yield
    finally:
        _now.waits_for = before


def snapshot() -> dict[str, Any] | None:
    """For a heartbeat: the JSON of an `Activity`; None without a verb."""
    if not _now.verb:
        return None
    where, collective = _main_thread()
    counts = dict(_now.counts)
    return {
        "verb": _now.verb,
        "call": _now.call,
        "seconds": time.monotonic() - _now.began,
        "what": _now.what,
        "unit": _now.unit,
        "so_far": counts.get(_now.unit, 0) - _now.before if _now.unit else 0,
        "of_all": _now.of_all,
        "counts": counts,
        "counted": _now.counted,
        "waits_for": _now.waits_for or (f"the other ranks, in {collective}" if collective else ""),
        "where": where,
    }


def _main_thread() -> tuple[str, str]:
    """Where the main thread is in Python, and which collective of torch.distributed that is, if it is one."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "", ""
    code = frame.f_code
    where = f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
    return where, code.co_name if _COLLECTIVES in code.co_filename else ""

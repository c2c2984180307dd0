"""Streams as vector clocks: which work on the device is certainly done when other work, or the host, uses its memory.

Each stream counts what it was given; its clock says, for every stream, up to which count it has waited. So does the
host's. Memory remembers who wrote it last and who has read it since. A use that does not come after these in its own
stream's clock is a race, whatever happened to be first.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType

ROOT = str(Path(__file__).resolve().parents[3]) + "/"
HOST = -1  # as a stream
OURS = tuple(f"{ROOT}{wing}/" for wing in ("backends", "workers", "rlctl"))
TESTS, HERE = f"{ROOT}tests/", str(Path(__file__).parent)


def line() -> str:
    """Return the innermost line of the source tree that is being run in this thread, or else of a test."""
    frame: FrameType | None = sys._getframe(1)
    of_test = "the backward pass"
    while frame is not None:
        kind = _kind(name := frame.f_code.co_filename)
        if kind == "ours":
            return f"{name[len(ROOT) :]}:{frame.f_lineno}"
        if kind == "test" and of_test == "the backward pass":
            of_test = f"{name[len(ROOT) :]}:{frame.f_lineno}"
        frame = frame.f_back
    return of_test


@cache
def _kind(file: str) -> str:
    if file.startswith(OURS):
        return "ours"
    return "test" if file.startswith(TESTS) and not file.startswith(HERE) else ""


@dataclass(frozen=True, slots=True)
class Use:
    """A use of some bytes by a stream, at its own count."""

    stream: int
    count: int
    what: str
    where: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.what} at {self.where}"


@dataclass(slots=True)
class Held:
    """Memory that is in use. Whose bytes are those of a later use is forgotten."""

    stream: int  # to which it goes back
    written: list[Use] = field(default_factory=list)
    read: list[Use] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)  # streams by `record_stream`

    def before(self, now: Use, *, writes: bool) -> list[Use]:
        """Return what must be done first."""
        uses = [*self.written, *self.read] if writes else self.written
        return [use for use in uses if use.start < now.stop and now.start < use.stop and use.stream != now.stream]

    def add(self, now: Use, *, writes: bool) -> None:
        def stays(use: Use) -> bool:
            return not (now.start <= use.start and use.stop <= now.stop and (writes or use.stream == now.stream))

        self.read = [use for use in self.read if stays(use)]
        if writes:
            self.written = [use for use in self.written if stays(use)]
        (self.written if writes else self.read).append(now)


class Timeline:
    """Everything that was asked of the devices, in the order of the host."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.begin_anew()

    def begin_anew(self) -> None:
        self.clocks: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self.memory: dict[int, Held] = {}  # by address
        self.given_up: defaultdict[int, list[Use]] = defaultdict(list)  # by stream: uses not waited for
        self.faults: list[str] = []
        self.copies: Counter[str] = Counter()  # between host and device, by line
        self.waits: Counter[str] = Counter()  # of the host for the device, by line

    def begin(self, stream: int) -> None:
        """The host gives a stream one more piece of work, or does one itself."""
        self.join(stream, self.clocks[HOST])
        self.clocks[stream][stream] += 1

    def join(self, stream: int, clock: Counter[int]) -> None:
        """Have a stream wait until others are as far as `clock`."""
        self.clocks[stream] |= clock

    def host_waits(self, clock: Counter[int]) -> None:
        self.join(HOST, clock)
        self.waits[line()] += 1

    def everything(self) -> Counter[int]:
        return Counter({stream: clock[stream] for stream, clock in self.clocks.items()})

    # ── memory ────────────────────────────────────────────────────────────────────────────────────

    def use(self, address: int, span: tuple[int, int], stream: int, what: str, where: str, *, writes: bool) -> None:
        held = self.memory.get(address)
        if held is None:
            held = self.memory[address] = Held(stream)
        now = Use(stream, self.clocks[stream][stream], what, where, *span)
        for use in held.before(now, writes=writes):
            if not self._after(stream, use):
                self.faults.append(f"{now} uses memory of {use}, which may not be done")
        held.add(now, writes=writes)

    def _after(self, stream: int, use: Use) -> bool:
        return use.stream == stream or self.clocks[stream][use.stream] >= use.count

    def allocate(self, address: int, stream: int, what: str, where: str) -> None:
        """Take memory, which may be any that was given up to this stream. Pinned memory is the host's, and comes back
        when the copies that torch knows of are done."""
        for use in self.given_up.pop(stream, []):
            if not self._after(stream, use):
                self.faults.append(
                    f"{what} at {where} may get memory of {use}, which may not be done: no record_stream"
                )
        self.memory[address] = Held(stream)

    def free(self, address: int) -> None:
        held = self.memory.pop(address, None)
        if held is not None and held.stream != HOST:
            known = {held.stream, HOST, *held.recorded}
            self.given_up[held.stream] += [use for use in (*held.written, *held.read) if use.stream not in known]

"""Grade samples in a pool of isolated processes.

Each sample gets exactly one grade. If a process hangs or dies, only the sample that it was grading fails: the rest of
its job goes to others, and a new process replaces it.
"""

from __future__ import annotations

import selectors
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from backends import activity
from specs.errors import RewardError
from specs.schema.metric import Metric
from workers.grading.grader_process import GraderProcess, encode
from workers.grading.kept_sources import read_sources
from workers.grading.terms import Setting

CAUSES = ("timeouts", "crashes", "exceptions", "bad_values")
METRICS: tuple[Metric, ...] = (
    Metric(
        name="reward/failed_timeouts",
        meaning="Completions without a score: a reward function took longer than its limit.",
    ),
    Metric(name="reward/failed_crashes", meaning="Completions without a score: the process of a reward function died."),
    Metric(name="reward/failed_exceptions", meaning="Completions without a score: a reward function raised."),
    Metric(
        name="reward/failed_bad_values", meaning="Completions without a score: it is not a finite number, or too large."
    ),
)
TICK_S = 0.1  # how often dead processes whose pipe is still open are looked for
JOB_SAMPLES = 64  # max samples in one message
JOB_S = 0.005  # what a job should take at least, as far as earlier ones tell: shorter ones cost more than they grade
LOG_BYTES = 64 << 20  # size limit of the log of what reward code prints


@dataclass(frozen=True)
class GradeRequest:
    """A sample to grade. Requests of one row share `row_key`, `prompt` and `row`."""

    row_key: int
    prompt: str
    row: Mapping[str, Any]
    completion: str
    completion_tokens: int


@dataclass(frozen=True)
class Grade:
    """The value of each term, or the cause (one of CAUSES) and a text why there is none."""

    values: tuple[float, ...] = ()
    cause: str = ""
    text: str = ""


class GraderPool:
    """`workers` processes that hold all terms. Use as a context manager, in a thread that stays alive."""

    def __init__(
        self,
        terms: Sequence[Mapping[str, Any]],
        setting: Setting,
        *,
        workers: int,
        timeout_s: float,
        log_path: Path,
        start_timeout_s: float = 120.0,
        labels: Sequence[str] = (),
        sources: Mapping[str, str] | None = None,
        python: str = sys.executable,
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`labels`: how messages about each term begin. `sources`: the terms' code (`read_sources`); None: as it is
        now. `env`: what the processes have besides this one's environment."""
        self._labels = tuple(labels) or tuple(f"reward.terms[{number}]: " for number in range(len(terms)))
        self._python, self._env = python, env
        self.timeout_s, self.start_timeout_s, self.log_path = timeout_s, start_timeout_s, log_path
        sources = read_sources(terms, setting.base) if sources is None else dict(sources)
        hello = {"terms": [dict(term) for term in terms], "setting": asdict(setting), "sources": sources}
        self._hello = encode(hello)
        self._selector = selectors.DefaultSelector()
        self._processes: list[GraderProcess] = []
        self._requests: Sequence[GradeRequest] = ()
        self._grades: list[Grade | None] = []
        self._queue: deque[int] = deque()
        self._sample_s = JOB_S  # that a sample took lately
        for _ in range(workers):
            self._start()

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self) -> None:
        """Return when every process has made its terms. Raises RewardError naming the term that cannot be made."""
        while not all(process.ready for process in self._processes):
            self._turn()

    def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
        """Return one grade for each request, in order. Raises RewardError when a fresh process can no longer start."""
        assert self._processes, "the pool is closed"
        self._requests, self._grades = requests, [None] * len(requests)
        self._queue = deque(range(len(requests)))
        try:
            while any(process.job for process in self._processes) or self._queue:
                self._hand_out()
                self._turn()
        except RewardError:
            self.close()  # jobs are half done: the pool must not be used again
            raise
        self._trim_log()
        grades = [grade for grade in self._grades if grade is not None]
        assert len(grades) == len(requests), "a sample was lost"
        return grades

    def close(self) -> None:
        for process in self._processes:
            process.close()
        self._processes.clear()
        self._selector.close()

    # ── one turn of the loop ──────────────────────────────────────────────────────────────────────

    def _hand_out(self) -> None:
        for process in self._processes:
            if not self._queue:
                return
            if process.idle and not process.dead:
                # Large jobs first, small ones last: all processes finish at about the same time.
                size = max(len(self._queue) // (4 * len(self._processes)), int(JOB_S / self._sample_s), 1)
                self._give(process, [self._queue.popleft() for _ in range(min(size, JOB_SAMPLES, len(self._queue)))])

    def _give(self, process: GraderProcess, indices: Sequence[int]) -> None:
        rows: dict[str, tuple[str, Mapping[str, Any]]] = {}
        items = []
        for index in indices:
            request = self._requests[index]
            rows[str(request.row_key)] = (request.prompt, request.row)
            items.append((index, request.row_key, request.completion, request.completion_tokens))
        process.give(indices, {"rows": rows, "items": items}, self.timeout_s)
        self._watch(process)

    def _turn(self) -> None:
        """Wait for output of a process, a deadline or the tick; then handle all of them."""
        events = self._selector.select(self._wait_s())
        for key, event in events:
            process: GraderProcess = key.data
            if event & selectors.EVENT_WRITE:
                process.write()
                self._watch(process)
            if event & selectors.EVENT_READ:
                self._listen(process)
        now = time.monotonic()
        for process in list(self._processes):
            waited_for = process.job or not process.ready
            if process.dead if not events else process.closed:
                self._ended(process, "crashes")
            elif waited_for and now > process.deadline:
                self._ended(process, "timeouts")

    def _wait_s(self) -> float:
        deadlines = [process.deadline for process in self._processes if process.job or not process.ready]
        return max(0.0, min([TICK_S, *(deadline - time.monotonic() for deadline in deadlines)]))

    def _listen(self, process: GraderProcess) -> None:
        for message in process.lines():
            if not process.ready:
                self._started(process, message)
            elif process.job and message.get("i") == process.job[0]:
                self._grades[process.job.popleft()] = _grade_of(message, self._labels)
                activity.count("grade")
                process.deadline = time.monotonic() + self.timeout_s
                if not process.job:
                    self._sample_s = max(process.seconds_per_sample, self._sample_s / 2)
            else:
                process.kill()  # a result for another sample: reward code wrote to the pipe
                return

    def _started(self, process: GraderProcess, message: Mapping[str, Any]) -> None:
        if "error" in message:
            raise RewardError(f"{self._labels[int(message['term'])]}{message['error']}", hint=str(message["hint"]))
        process.ready = True

    def _ended(self, process: GraderProcess, cause: str) -> None:
        """Fail the sample that it was grading, requeue the rest of its job, and start a new process."""
        process.kill()
        self._listen(process)  # output that arrived before the end still counts
        if not process.ready:
            words = process.end_words() if cause == "crashes" else f"not ready after {self.start_timeout_s:g} s"
            hint = f"see {self.log_path}" if self.log_path.is_file() else "import its file with python to see why"
            raise RewardError(f"the reward terms cannot be loaded: {words}", hint=hint)
        if process.job:
            words = f"no score within {self.timeout_s:g} s" if cause == "timeouts" else process.end_words()
            self._grades[process.job.popleft()] = Grade(cause=cause, text=words)
            activity.count("grade")
            self._queue.extendleft(reversed(process.job))
        self._selector.unregister(process.stdout)
        if process.stdin in self._selector.get_map():
            self._selector.unregister(process.stdin)
        process.close()
        self._processes.remove(process)
        self._start()

    def _start(self) -> None:
        process = GraderProcess(self._hello, self.log_path, self.start_timeout_s, python=self._python, env=self._env)
        self._processes.append(process)
        self._selector.register(process.stdout, selectors.EVENT_READ, process)
        process.write()
        self._watch(process)

    def _watch(self, process: GraderProcess) -> None:
        """Watch its pipe for writability as long as there is something to send."""
        watched = process.stdin in self._selector.get_map()
        if process.wants_to_write and not watched:
            self._selector.register(process.stdin, selectors.EVENT_WRITE, process)
        elif watched and not process.wants_to_write:
            self._selector.unregister(process.stdin)

    def _trim_log(self) -> None:
        if self.log_path.stat().st_size > LOG_BYTES:
            with open(self.log_path, "r+b") as log:  # the processes append, so they continue at the new end
                log.truncate(0)
                log.write(b"(what rewards printed before was over the limit and is gone)\n")


def _grade_of(message: Mapping[str, Any], labels: Sequence[str]) -> Grade:
    if "t" in message:
        return Grade(tuple(float(value) for value in message["t"]))
    return Grade(cause=str(message["cause"]), text=f"{labels[int(message['term'])]}{message['text']}")

"""Grade samples in a pool of isolated processes, each with a thread that speaks to it.

Each sample gets exactly one grade. If a process hangs or dies, only the sample that it was grading fails: the rest of
its job goes to others, and a new process replaces it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from backends import activity
from specs.errors import RewardError
from specs.schema.metric import Metric, metrics
from specs.schema.rewards import MAX_SCORE
from workers.grading.grader_process import GraderEnded, GraderProcess, encode
from workers.grading.reward_sources import read_sources
from workers.grading.terms import GradeRequest, Setting

CAUSES = ("timeouts", "crashes", "exceptions", "bad_values")
METRICS: tuple[Metric, ...] = metrics(
    "",
    {
        "reward/failed_timeouts": "Completions without a score: a reward function took longer than its limit.",
        "reward/failed_crashes": "Completions without a score: the process of a reward function died.",
        "reward/failed_exceptions": "Completions without a score: a reward function raised.",
        "reward/failed_bad_values": "Completions without a score: it is not a finite number, or too large.",
    },
)
JOB_SAMPLES = 64  # max samples in one message
JOB_S = 0.005  # what a job should take at least, as far as earlier ones tell: shorter ones cost more than they grade


@dataclass(frozen=True)
class Grade:
    """The value of each term, or the cause (one of CAUSES) and a text why there is none."""

    values: tuple[float, ...] = ()
    cause: str = ""
    text: str = ""


class GraderPool:
    """`workers` processes that hold all terms. Use as a context manager, or `start` and `close` it."""

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
        now. `env`: variables of the processes besides those of this one."""
        self._labels = tuple(labels) or tuple(f"reward.terms[{number}]: " for number in range(len(terms)))
        self._python, self._env = python, env
        self.timeout_s, self.start_timeout_s, self.log_path = timeout_s, start_timeout_s, log_path
        functions = [term["path"] for term in terms if "path" in term]
        sources = read_sources(functions, setting.base) if sources is None else dict(sources)
        self._hello = encode({"terms": [dict(term) for term in terms], "setting": asdict(setting), "sources": sources})
        self._changed = threading.Condition()  # guards what follows
        self._closed = False
        self._processes: dict[int, GraderProcess] = {}  # by thread
        self._requests: Sequence[GradeRequest] = ()
        self._grades: list[Grade | None] = []
        self._queue: deque[int] = deque()
        self._left = 0  # samples without a grade
        self._sample_s = JOB_S  # that a sample took lately
        self._workers = workers
        self._threads = ThreadPoolExecutor(workers, "grading")  # starts none yet
        self._starts: list[Future[None]] = []

    def __enter__(self) -> GraderPool:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> GraderPool:
        """Start the processes, and return at once."""
        self._starts = [self._threads.submit(self._start, worker) for worker in range(self._workers)]
        return self

    def wait_ready(self) -> None:
        """Return when every process has made its terms. Raises RewardError naming the term that cannot be made."""
        self._join(self._starts)

    def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
        """Return one grade for each request, in order. Raises RewardError when a fresh process can no longer start;
        the pool is closed then."""
        assert not self._closed, "the pool is closed"
        self.wait_ready()
        self._requests, self._grades, self._left = requests, [None] * len(requests), len(requests)
        self._queue = deque(range(len(requests)))
        self._join([self._threads.submit(self._work, worker) for worker in range(self._workers)])
        grades = [grade for grade in self._grades if grade is not None]
        assert len(grades) == len(requests), "a sample was lost"
        return grades

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for process in self._processes.values():
            process.kill()
        self._threads.shutdown(cancel_futures=True)  # nobody waits at a pipe any more
        for process in self._processes.values():
            process.close()

    def _join(self, running: Sequence[Future[None]]) -> None:
        """Wait for threads, until one fails."""
        try:
            for ended in wait(running, return_when=FIRST_EXCEPTION).done:
                ended.result()
        except BaseException:
            self.close()  # jobs are half done: the pool must not be used again
            raise

    # ── in the thread of a process ────────────────────────────────────────────────────────────────

    def _start(self, worker: int) -> None:
        """Start a process, in place of one that ended. Raises RewardError where its terms cannot be made."""
        if worker in self._processes:
            self._processes[worker].close()
        with self._changed:
            if self._closed:
                raise RewardError("the pool is closed")
            process = self._processes[worker] = GraderProcess(self.log_path, python=self._python, env=self._env)
        process.deadline = time.monotonic() + self.start_timeout_s
        try:
            process.send(self._hello)
            message = process.receive()
        except GraderEnded as end:
            words = str(end) if end.cause == "crashes" else f"not ready after {self.start_timeout_s:g} s"
            hint = f"see {self.log_path}" if self.log_path.is_file() else "import its file with python to see why"
            raise RewardError(f"the reward terms cannot be loaded: {words}", hint=hint) from None
        if "error" in message:
            raise RewardError(f"{self._labels[int(message['term'])]}{message['error']}", hint=str(message["hint"]))

    def _work(self, worker: int) -> None:
        """Grade samples until none is left, also what processes that ended leave."""
        while job := self._next_job():
            if self._processes[worker].dead:
                self._start(worker)
            try:
                self._grade(self._processes[worker], job)
            except GraderEnded as end:
                text = str(end) if end.cause == "crashes" else f"no score within {self.timeout_s:g} s"
                with self._changed:
                    self._note(job.popleft(), Grade(cause=end.cause, text=text))
                    self._queue.extendleft(reversed(job))
                    self._changed.notify_all()

    def _next_job(self) -> deque[int]:
        """Return samples to grade, none where all are graded. Large jobs come first, small ones last: all processes
        finish at about the same time."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or not self._left or self._closed)
            size = max(len(self._queue) // (4 * self._workers), int(JOB_S / self._sample_s), 1)
            count = 0 if self._closed else min(size, JOB_SAMPLES, len(self._queue))
            return deque(self._queue.popleft() for _ in range(count))

    def _grade(self, process: GraderProcess, job: deque[int]) -> None:
        """Have samples graded; each leaves the job when it is. Raises GraderEnded."""
        requests = [self._requests[index] for index in job]
        rows = {str(request.row_key): (request.prompt, request.row) for request in requests}
        items = [
            (index, request.row_key, request.completion, request.completion_tokens, request.episode)
            for index, request in zip(job, requests, strict=True)
        ]
        process.job, began = job, time.monotonic()
        process.deadline = began + self.timeout_s
        process.send(encode({"rows": rows, "items": items}))
        while job:
            message = process.receive()
            if message.get("i") != job[0]:  # reward code wrote to the pipe
                raise process.ended()
            process.deadline = time.monotonic() + self.timeout_s
            with self._changed:
                self._note(job.popleft(), _grade_of(message, self._labels))
        self._sample_s = max((time.monotonic() - began) / len(requests), self._sample_s / 2)

    def _note(self, index: int, grade: Grade) -> None:
        self._grades[index] = grade
        self._left -= 1
        activity.count("grade")
        if not self._left:
            self._changed.notify_all()


def too_large(label: str, value: float) -> Grade | None:
    """Return why a value of a term is none; None where it is one."""
    if not abs(value) > MAX_SCORE:
        return None
    text = f"{label}{value:g}, beyond ±{MAX_SCORE:g}: nothing can be learned from so large a number"
    return Grade(cause="bad_values", text=text)


def _grade_of(message: Mapping[str, Any], labels: Sequence[str]) -> Grade:
    for label, value in zip(labels, message.get("t", ()), strict=False):
        if bad := too_large(label, value):
            return bad
    if "t" in message:
        return Grade(tuple(float(value) for value in message["t"]))
    return Grade(cause=str(message["cause"]), text=f"{labels[int(message['term'])]}{message['text']}")

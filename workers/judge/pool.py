"""The pool of isolated processes that judge samples.

Each sample gets exactly one verdict. A process that hangs or dies takes only the sample it was at with it: the rest
of its job goes to others, and a new process takes its place.
"""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specs.errors import RewardError
from workers.judge.process import JudgeProcess, encode
from workers.judge.terms import Setting

CAUSES = ("timeouts", "crashes", "exceptions", "bad_values")
TICK_S = 0.1  # how often a death without an end of its pipe is looked for
JOB_SAMPLES = 64  # most samples in one message
LOG_BYTES = 64 << 20  # what rewards print is kept up to here


@dataclass(frozen=True)
class Request:
    """A sample to judge. Requests of one row share `row_key`, `prompt` and `row`."""

    row_key: int
    prompt: str
    row: Mapping[str, Any]
    completion: str
    completion_tokens: int


@dataclass(frozen=True)
class Verdict:
    """The value of each term, or the cause (one of CAUSES) and the words for why there is none."""

    values: tuple[float, ...] = ()
    cause: str = ""
    text: str = ""


class JudgePool:
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
    ) -> None:
        self.timeout_s, self.start_timeout_s, self.log_path = timeout_s, start_timeout_s, log_path
        self._hello = encode({"terms": [dict(term) for term in terms], "setting": asdict(setting)})
        self._selector = selectors.DefaultSelector()
        self._processes: list[JudgeProcess] = []
        self._requests: Sequence[Request] = ()
        self._verdicts: list[Verdict | None] = []
        self._queue: deque[int] = deque()
        for _ in range(workers):
            self._start()

    def __enter__(self) -> JudgePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self) -> None:
        """Return when every process has made its terms. Raises RewardError naming the term that cannot be made."""
        while not all(process.ready for process in self._processes):
            self._turn()

    def judge(self, requests: Sequence[Request]) -> list[Verdict]:
        """A verdict for each request, in order. Raises RewardError when a fresh process can no longer start."""
        assert self._processes, "the pool is closed"
        self._requests, self._verdicts = requests, [None] * len(requests)
        self._queue = deque(range(len(requests)))
        try:
            while any(process.job for process in self._processes) or self._queue:
                self._hand_out()
                self._turn()
        except RewardError:
            self.close()  # jobs are half done: nothing may be judged with what is left
            raise
        self._trim_log()
        verdicts = [verdict for verdict in self._verdicts if verdict is not None]
        assert len(verdicts) == len(requests), "a sample was lost"
        return verdicts

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
                # large jobs first, single samples last: no process is left with a long tail
                size = max(1, min(JOB_SAMPLES, len(self._queue) // (4 * len(self._processes))))
                self._give(process, [self._queue.popleft() for _ in range(size)])

    def _give(self, process: JudgeProcess, indices: Sequence[int]) -> None:
        rows: dict[str, tuple[str, Mapping[str, Any]]] = {}
        items = []
        for index in indices:
            request = self._requests[index]
            rows[str(request.row_key)] = (request.prompt, request.row)
            items.append((index, request.row_key, request.completion, request.completion_tokens))
        process.give(indices, {"rows": rows, "items": items}, self.timeout_s)
        self._watch(process)

    def _turn(self) -> None:
        """Wait until a process speaks, a deadline passes or a tick is over; then deal with all of it."""
        for key, events in self._selector.select(self._wait_s()):
            process: JudgeProcess = key.data
            if events & selectors.EVENT_WRITE:
                process.write()
                self._watch(process)
        now = time.monotonic()
        for process in list(self._processes):
            self._listen(process)
            waited_for = process.job or not process.ready
            if process.dead:
                self._ended(process, "crashes")
            elif waited_for and now > process.deadline:
                self._ended(process, "timeouts")

    def _wait_s(self) -> float:
        deadlines = [process.deadline for process in self._processes if process.job or not process.ready]
        return max(0.0, min([TICK_S, *(deadline - time.monotonic() for deadline in deadlines)]))

    def _listen(self, process: JudgeProcess) -> None:
        for message in process.lines():
            if not process.ready:
                self._started(process, message)
            elif process.job and message.get("i") == process.job[0]:
                index = process.job.popleft()
                self._verdicts[index] = _verdict(message)
                process.deadline = time.monotonic() + self.timeout_s
            else:
                process.kill()  # it answers what was not asked: reward code got hold of the pipe
                return

    def _started(self, process: JudgeProcess, message: Mapping[str, Any]) -> None:
        if "error" in message:
            raise RewardError(f"reward.terms[{message['term']}]: {message['error']}", hint=str(message["hint"]))
        process.ready = True

    def _ended(self, process: JudgeProcess, cause: str) -> None:
        """Blame the sample that it was at, put the rest of its job back, and start another in its place."""
        process.kill()
        self._listen(process)  # what it said last counts
        if not process.ready:
            words = process.end_words() if cause == "crashes" else f"not ready after {self.start_timeout_s:g} s"
            raise RewardError(f"the reward terms cannot be loaded: {words}", hint=f"see {self.log_path}")
        if process.job:
            words = f"no score within {self.timeout_s:g} s" if cause == "timeouts" else process.end_words()
            self._verdicts[process.job.popleft()] = Verdict(cause=cause, text=words)
            self._queue.extendleft(reversed(process.job))
        self._selector.unregister(process.stdout)
        if process.stdin in self._selector.get_map():
            self._selector.unregister(process.stdin)
        process.close()
        self._processes.remove(process)
        self._start()

    def _start(self) -> None:
        process = JudgeProcess(self._hello, self.log_path, self.start_timeout_s)
        self._processes.append(process)
        self._selector.register(process.stdout, selectors.EVENT_READ, process)
        process.write()
        self._watch(process)

    def _watch(self, process: JudgeProcess) -> None:
        """Listen for room in its pipe as long as there is something to send."""
        watched = process.stdin in self._selector.get_map()
        if process.wants_to_write and not watched:
            self._selector.register(process.stdin, selectors.EVENT_WRITE, process)
        elif watched and not process.wants_to_write:
            self._selector.unregister(process.stdin)

    def _trim_log(self) -> None:
        if self.log_path.stat().st_size > LOG_BYTES:
            with open(self.log_path, "r+b") as log:  # the processes append, so they go on at the new end
                log.truncate(0)
                log.write(b"(what rewards printed before was over the limit and is gone)\n")


def _verdict(message: Mapping[str, Any]) -> Verdict:
    if "t" in message:
        return Verdict(tuple(float(value) for value in message["t"]))
    return Verdict(cause=str(message["cause"]), text=f"reward.terms[{message['term']}]: {message['text']}")

"""Judges: reward terms whose scores other models give, over HTTP. Requests go out at once, many at a time, from threads
of the reward role; nobody waits for them before `collect`, so they take place beside all other grading.

Whatever a judge does, each sample gets exactly one grade: a score, or a cause.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from backends import activity
from specs.schema.metric import Metric
from specs.schema.rewards import Judge as JudgeTable
from workers.grading.judge_cache import JudgeCache, Reply, request_key
from workers.grading.judge_health import DOWN, JudgeHealth
from workers.grading.judge_line import Address, JudgeError, Line
from workers.grading.judge_score import read_reply, read_score, request_body
from workers.grading.pool import Grade, Request
from workers.grading.terms import Sample, Setting

JUDGE_CAUSES = ("judge_timeouts", "judge_errors", "judge_replies", DOWN)
COUNTS = ("requests", "retries", "cached", "prompt_tokens", "completion_tokens", "cost")
_WITH_JUDGE = "a reward term is a judge"
METRICS: tuple[Metric, ...] = (
    Metric(
        name="reward/failed_judge_timeouts",
        meaning="Completions without a score: the judge did not answer in time.",
        when=_WITH_JUDGE,
    ),
    Metric(
        name="reward/failed_judge_errors",
        meaning="Completions without a score: the judge's server refused or failed.",
        when=_WITH_JUDGE,
    ),
    Metric(
        name="reward/failed_judge_replies",
        meaning="Completions without a score: no score was found in the judge's reply.",
        when=_WITH_JUDGE,
    ),
    Metric(
        name="reward/failed_judge_down",
        meaning="Completions without a score: the judge was taken to be down, and not asked.",
        when=_WITH_JUDGE,
    ),
    Metric(
        name="reward/judge_requests",
        meaning="Requests to judges, tries again included.",
        when=_WITH_JUDGE,
        in_eval=True,
    ),
    Metric(
        name="reward/judge_retries",
        meaning="Requests that were tries again.",
        when=_WITH_JUDGE,
        in_eval=True,
    ),
    Metric(
        name="reward/judge_cached",
        meaning="Completions whose judgement was known already.",
        when=_WITH_JUDGE,
        in_eval=True,
    ),
    Metric(
        name="reward/judge_prompt_tokens",
        unit="tokens",
        meaning="That judges say they read.",
        when=_WITH_JUDGE,
        in_eval=True,
    ),
    Metric(
        name="reward/judge_completion_tokens",
        unit="tokens",
        meaning="That judges say they wrote.",
        when=_WITH_JUDGE,
        in_eval=True,
    ),
    Metric(
        name="reward/judge_cost",
        meaning="What they cost at the prices of `reward.terms`, in the currency of those.",
        when=_WITH_JUDGE,
        in_eval=True,
    ),
)
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
LONGEST_ASKED_S = 120.0  # that a server's Retry-After is obeyed
TICK_S = 1.0
PATH = "chat/completions"


@dataclass(frozen=True)
class Pending:
    """Samples that judges are at: `grades[i][j]` will be of judge i, sample j."""

    requests: Sequence[Request]
    grades: Sequence[Sequence[Future[Grade]]]


class JudgePanel:
    """All judges of a run. `start` and `collect` belong to one thread."""

    def __init__(self, terms: Mapping[int, JudgeTable], setting: Setting, run_dir: Path) -> None:
        """`terms`: by their number in `reward.terms`. Raises RewardError where a cache cannot be opened."""
        caches: dict[Path, JudgeCache] = {}
        self._judges: dict[int, Judge] = {}
        for number, term in terms.items():
            where = (
                Path(setting.base, term.cache_file).expanduser() if term.cache_file else run_dir / "judge_cache.jsonl"
            )
            path = where.resolve()
            cache = caches.setdefault(path, JudgeCache(path)) if term.cache else JudgeCache(None)
            self._judges[number] = Judge(term, number, setting.answer_column, cache)
        self._pending: dict[int, Pending] = {}
        self._tickets = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the judges' terms, in the order in which `collect` gives grades."""
        return tuple(self._judges)

    def start(self, requests: Sequence[Request]) -> int:
        """Send the samples out; returns the ticket to collect their grades with."""
        self._tickets += 1
        grades = [[judge.start(request) for request in requests] for judge in self._judges.values()]
        self._pending[self._tickets] = Pending(requests, grades)
        return self._tickets

    def waiting(self, tickets: Sequence[int]) -> int:
        """How many samples these tickets are for."""
        return sum(len(self._pending[ticket].requests) for ticket in tickets)

    def collect(self, tickets: Sequence[int]) -> tuple[list[Request], list[list[Grade]]]:
        """Wait for the samples of these tickets: they, and for each judge their grades. An attempt that has come to its
        end counts as progress, also one that failed."""
        taken = [self._pending.pop(ticket) for ticket in tickets]
        left = {future for pending in taken for row in pending.grades for future in row}
        attempts = self._attempts()
        while left:
            done, left = wait(left, TICK_S)
            now = self._attempts()
            activity.count("grade", max(len(done), now - attempts))
            attempts = now
        requests = [request for pending in taken for request in pending.requests]
        rows = [
            [future.result() for pending in taken for future in pending.grades[index]]
            for index in range(len(self._judges))
        ]
        return requests, rows

    def take_counts(self) -> dict[str, float]:
        """What the judges have cost since the last call, as metrics."""
        taken = [judge.take_counts() for judge in self._judges.values()]
        return {f"judge_{name}": sum(counts[name] for counts in taken) for name in COUNTS}

    def close(self) -> None:
        for judge in self._judges.values():
            judge.close()
            judge.cache.close()

    def _attempts(self) -> int:
        return sum(judge.attempts for judge in self._judges.values())


class Judge:
    """One term: its threads, each with a connection, and its cache."""

    def __init__(self, term: JudgeTable, number: int, answer_column: str, cache: JudgeCache) -> None:
        self.term, self.number, self.answer_column, self.cache = term, number, answer_column, cache
        self.address = Address(term.base_url, term.key_env)
        self.attempts = 0  # of its life, failed ones too
        self.health = JudgeHealth()
        self._table = term.model_dump()
        self._threads = ThreadPoolExecutor(term.concurrency, thread_name_prefix="judge")
        self._own, self._lines = threading.local(), list[Line]()  # a connection for each thread
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTS, 0.0)
        self._asked: dict[str, Future[Grade]] = {}  # by request, while it is under way
        self._closing = threading.Event()

    def start(self, request: Request) -> Future[Grade]:
        """The grade to come. A request that is under way, or has been answered, is not made again."""
        sample = Sample(request.prompt, request.completion, request.row, request.completion_tokens)
        try:
            content = request_body(self._table, sample, self.answer_column)
        except KeyError as error:
            return _done(self._failed("exceptions", f"the row has no column {error.args[0]!r}, which prompt names"))
        if not self.term.cache:
            return self._threads.submit(self._graded, content, "")
        key = request_key(self.address.url(PATH), content)
        with self._lock:
            if (under_way := self._asked.get(key)) is not None:
                self._counts["cached"] += 1
                return under_way
            future = self._asked[key] = self._threads.submit(self._graded, content, key)
        future.add_done_callback(lambda _: self._forget(key))
        return future

    def take_counts(self) -> dict[str, float]:
        with self._lock:
            taken, self._counts = self._counts, dict.fromkeys(COUNTS, 0.0)
        million = (
            taken["prompt_tokens"] * self.term.prompt_price + taken["completion_tokens"] * self.term.completion_price
        )
        return {**taken, "cost": million / 1e6}

    def close(self) -> None:
        """Give up what is under way."""
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for line in self._lines:
            line.cut() if line.busy else line.close()

    def _forget(self, key: str) -> None:
        with self._lock:
            self._asked.pop(key, None)

    def _graded(self, content: bytes, key: str) -> Grade:
        """Runs in a thread; never raises."""
        try:
            reply = self.cache.get(key) if key else None
            if reply is not None:
                self._add(cached=1)
                return Grade((read_score(self._table, reply.text),))
            reply = self._asked_for(content)
            score = read_score(self._table, reply.text)
        except JudgeError as error:
            return self._failed(error.cause, str(error))
        except Exception as error:  # a defect of ours must be a failed grade, not a lost sample
            return self._failed("exceptions", f"{type(error).__name__}: {self.address.without_key(str(error))}")
        if key:
            self.cache.put(key, reply)
        return Grade((score,))

    def _asked_for(self, content: bytes) -> Reply:
        """The reply, of as many tries as the term allows. Raises JudgeError, of the last one, and at once while the
        judge is down."""
        tries = self.health.tries(self.term.retries + 1)
        for tried in range(tries):
            try:
                reply = self._try(content)
            except JudgeError as error:
                last = not error.again or tried + 1 == tries or self.health.down
                if last or self._closing.wait(wait_s(tried, error.wait_s)) or self.health.down:
                    self.health.failed(error)
                    raise
                self._add(retries=1)
            else:
                self.health.answered()
                return reply
        raise AssertionError("unreachable: the last try returns or raises")

    def _try(self, content: bytes) -> Reply:
        if not hasattr(self._own, "line"):
            self._own.line = Line(self.address)
            self._lines.append(self._own.line)
        try:
            reply = read_reply(self._own.line.request("POST", PATH, content, self.term.timeout_s))
        finally:
            self._add(requests=1)
            with self._lock:
                self.attempts += 1
        self._add(prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens)
        return Reply(self.address.without_key(reply.text), reply.prompt_tokens, reply.completion_tokens)

    def _add(self, **counts: int) -> None:
        with self._lock:
            for name, more in counts.items():
                self._counts[name] += more

    def _failed(self, cause: str, text: str) -> Grade:
        return Grade(cause=cause, text=f"reward.terms[{self.number}]: {self.address.without_key(text)}")


def wait_s(tried: int, asked_s: float) -> float:
    """Seconds before the next try: doubling, at random within the upper half so that many do not come back at once; at
    least what the server asks for."""
    backoff = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0**tried) * random.uniform(0.5, 1.0)
    return max(backoff, min(asked_s, LONGEST_ASKED_S))


def _done(grade: Grade) -> Future[Grade]:
    future: Future[Grade] = Future()
    future.set_result(grade)
    return future

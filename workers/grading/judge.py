"""Judges: reward terms whose scores other models give, over HTTP. Requests go out at once, many at a time, from a
thread of their own, beside all other grading; `collect` waits for their grades.

Whatever a judge does, each sample gets exactly one grade: a score, or a cause.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from backends import activity
from specs.schema.metric import Metric
from specs.schema.rewards import Judge
from specs.wire.heartbeat import amount
from workers.grading.judge_cache import JudgeCache, Reply, request_key
from workers.grading.judge_client import JudgeClient, JudgeError
from workers.grading.judge_score import read_reply, read_score, request_body
from workers.grading.loop_thread import LoopThread
from workers.grading.pool import Grade
from workers.grading.terms import GradeRequest, Setting

if TYPE_CHECKING:
    from tenacity import RetryCallState

JUDGE_CAUSES = {
    "judge_timeouts": "the judge did not reply in time",
    "judge_errors": "the judge's server refused or failed",
    "judge_replies": "no score was found in the judge's reply",
    "judge_down": "the judge was taken to be down, and not asked",
}
_COUNTS = {  # what is counted of each judge: its unit and meaning
    "requests": ("", "Requests to judges, retries included."),
    "retries": ("", "Requests that were retries."),
    "cached": ("", "Completions whose judgement was known already."),
    "prompt_tokens": ("tokens", "Tokens that judges say they read."),
    "completion_tokens": ("tokens", "Tokens that judges say they wrote."),
    "waited_s": ("s", "Waits before retries of all requests, as judges asked for (HTTP 429) or to let them recover."),
}
_PRICE = ("", "What they cost at the prices of `reward.terms`, in the currency of those.")
_WITH_JUDGE = "a reward term is a judge"
METRICS: tuple[Metric, ...] = (
    *(
        Metric(name=f"reward/failed_{cause}", meaning=f"Completions without a score: {why}.", when=_WITH_JUDGE)
        for cause, why in JUDGE_CAUSES.items()
    ),
    *(
        Metric(name=f"reward/judge_{name}", unit=unit, meaning=meaning, when=_WITH_JUDGE, in_eval=True)
        for name, (unit, meaning) in {**_COUNTS, "cost": _PRICE}.items()
    ),
)
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 30.0
MAX_ASKED_S = 120.0  # of a server's Retry-After
DOWN_AFTER, DOWN_S = 8, 30.0  # requests in a row that failed for good, and for how long none is sent then
TICK_S = 1.0
PATH = "chat/completions"
_CLOSE_S = 5.0

JudgedSamples = Mapping[int, Sequence[Future[Grade]]]


class JudgePanel:
    """All judges, as one host asks them. Use as a context manager, or `open` and `close` it. `start` belongs to one
    thread."""

    def __init__(self, terms: Mapping[int, Judge], setting: Setting, run_dir: Path, whose: str = "") -> None:
        """`terms`: by their number in `reward.terms`; `whose`: ends the names of files that this host alone writes."""
        self._terms, self._setting, self._run_dir, self._whose = terms, setting, run_dir, whose
        self._judges: dict[int, JudgeGrader] = {}
        self._requests = LoopThread("judges")
        self._counting = threading.Lock()

    def __enter__(self) -> JudgePanel:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> JudgePanel:
        """Open the caches, and begin to take requests. Raises RewardError where a cache cannot be opened."""
        for number, term in self._terms.items():
            own = Path(self._setting.base, Path(term.cache_file).expanduser())
            path = (own if term.cache_file else self._run_dir / "judge_cache.sqlite").resolve()
            path = path.with_name(f"{path.stem}{self._whose}{path.suffix}")
            cache = JudgeCache(path) if term.cache else None
            self._judges[number] = JudgeGrader(term, number, self._setting.answer_column, cache)
        self._requests.start()
        return self

    def start(self, requests: Sequence[GradeRequest]) -> JudgedSamples:
        """Send samples out; return their grades to come, by the number of each judge."""
        thread = self._requests
        return {number: [judge.start(one, thread) for one in requests] for number, judge in self._judges.items()}

    def collect(self, judged: JudgedSamples) -> dict[int, list[Grade]]:
        """Wait for grades; return them by the number of each judge. A request that ended counts as progress, also one
        that failed; so does a wait that a judge asked for."""
        left = {future for row in judged.values() for future in row}
        activity.describe(f"judges' grades of {amount(len(left), 'completion')}", "grade", counted=True)
        sent = self._sent()
        while left:
            pauses = ", ".join(judge.pause for judge in self._judges.values() if judge.pause)
            with activity.waiting_for(pauses):
                done, left = wait(left, TICK_S)
            if pauses:
                activity.count("wait for a judge")
            before, sent = sent, self._sent()
            activity.count("grade", max(len(done), sent - before))
        return {number: [future.result() for future in row] for number, row in judged.items()}

    def take_counts(self) -> dict[str, float]:
        """Return what the judges have cost since the last call, as metrics."""
        with self._counting:
            taken = [judge.take_counts() for judge in self._judges.values()]
        return {f"judge_{name}": sum(counts[name] for counts in taken) for name in (*_COUNTS, "cost")}

    def close(self) -> None:
        """Break off what is under way; a connection that does not close in time ends with the process."""
        self._requests.close(self._end, _CLOSE_S)
        for judge in self._judges.values():
            if judge.cache is not None:
                judge.cache.close()

    async def _end(self) -> None:
        for judge in self._judges.values():
            await judge.client.aclose()

    def _sent(self) -> int:
        return int(sum(judge.counts["requests"] for judge in self._judges.values()))


class JudgeGrader:
    """One term: its connections, and its cache. All but `start` and `take_counts` runs in the event loop."""

    def __init__(self, term: Judge, number: int, answer_column: str, cache: JudgeCache | None) -> None:
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

        self.term, self.number, self.answer_column, self.cache = term, number, answer_column, cache
        self.client = JudgeClient(term.base_url, term.key_env, term.concurrency)
        self.counts = dict.fromkeys(_COUNTS, 0.0)  # of its life
        self.pause = ""  # what the last request that waits for a retry waits for
        self._taken = dict(self.counts)
        self._table = term.model_dump()
        self._slots = asyncio.Semaphore(term.concurrency)
        self._under_way: dict[str, Future[Grade]] = {}  # by request
        self._failed, self._down_until, self._pausing = 0, 0.0, 0  # requests in a row; of the clock; requests
        self._retrying = AsyncRetrying(
            stop=stop_after_attempt(term.retries + 1),
            retry=retry_if_exception(lambda e: isinstance(e, JudgeError) and e.again and self._failed < DOWN_AFTER),
            wait=_wait_s,
            before_sleep=self._note,
            sleep=self._sleep,
            reraise=True,
        )

    def start(self, request: GradeRequest, thread: LoopThread) -> Future[Grade]:
        """Return the grade to come. A request that is under way, or has been answered, is not made again."""
        try:
            content = request_body(self._table, request, self.answer_column)
        except KeyError as error:
            done: Future[Grade] = Future()
            done.set_result(self._lost("exceptions", f"the row has no column {error.args[0]!r}, which prompt names"))
            return done
        key = request_key(self.client.url(PATH), content) if self.cache else ""
        if under_way := self._under_way.get(key):
            self.counts["cached"] += 1
            return under_way
        future = thread.run(self._grade(content, key))
        if key:
            self._under_way[key] = future
            future.add_done_callback(lambda _: self._under_way.pop(key, None))
        return future

    def take_counts(self) -> dict[str, float]:
        """Return what was counted since the last call, and what it cost."""
        now = dict(self.counts)
        new, self._taken = {name: now[name] - self._taken[name] for name in now}, now
        cost = new["prompt_tokens"] * self.term.prompt_price + new["completion_tokens"] * self.term.completion_price
        return {**new, "cost": cost / 1e6}

    async def _grade(self, content: bytes, key: str) -> Grade:
        """Return a grade, whatever happens."""
        try:
            async with self._slots:
                known = self.cache.get(key) if self.cache else None
                self.counts["cached"] += known is not None
                reply = known or await self._ask(content)
            score = read_score(self._table, reply)
        except JudgeError as error:
            return self._lost(error.cause, str(error))
        except Exception as error:  # a defect of ours must be a failed grade, not a lost sample
            return self._lost("exceptions", f"{type(error).__name__}: {error}")
        if self.cache and known is None:
            self.cache.put(key, reply)
        return Grade((score,))

    async def _ask(self, content: bytes) -> Reply:
        """Return the reply, of as many tries as the term allows. Raises JudgeError of the last one, and at once while
        the judge is down."""
        if self._failed >= DOWN_AFTER and time.monotonic() < self._down_until:
            text = f"the judge is down, and not asked: {self._failed} requests in a row failed"
            raise JudgeError("judge_down", text, again=False)
        try:
            reply: Reply = await self._retrying(self._try, content)
        except JudgeError as error:
            answered = error.cause == "judge_errors" and 0 < error.status < 500  # one that refuses or is busy is up
            self._failed = 0 if answered else self._failed + 1
            self._down_until = time.monotonic() + DOWN_S
            raise
        self._failed = 0
        return reply

    async def _try(self, content: bytes) -> Reply:
        try:
            reply = read_reply(await self.client.request("POST", PATH, content, self.term.timeout_s))
        finally:
            self.counts["requests"] += 1
        self.counts["prompt_tokens"] += reply.prompt_tokens
        self.counts["completion_tokens"] += reply.completion_tokens
        return replace(reply, text=self.client.without_key(reply.text))

    def _note(self, state: RetryCallState) -> None:
        """Name what a request waits for before its retry."""
        error = state.outcome.exception() if state.outcome else None
        self.pause = f"the judge at {self.client.base_url}, to be asked again ({error})"

    async def _sleep(self, seconds: float) -> None:
        self.counts["retries"] += 1
        self.counts["waited_s"] += seconds
        self._pausing += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self._pausing -= 1
            self.pause = self.pause if self._pausing else ""

    def _lost(self, cause: str, text: str) -> Grade:
        return Grade(cause=cause, text=f"reward.terms[{self.number}]: {self.client.without_key(text)}")


def _wait_s(state: RetryCallState) -> float:
    """Return the seconds before the next try: doubling, at random within the upper half so that many do not come back
    at once; at least what the server asks for."""
    error = state.outcome.exception() if state.outcome else None
    asked_s = error.wait_s if isinstance(error, JudgeError) else 0.0
    backoff = min(MAX_WAIT_S, FIRST_WAIT_S * 2.0 ** (state.attempt_number - 1)) * random.uniform(0.5, 1.0)
    return max(backoff, min(asked_s, MAX_ASKED_S))

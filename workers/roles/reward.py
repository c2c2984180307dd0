"""The reward role: it decodes completions and has them graded, each with the row of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends import activity
from backends.hf.tokenizer import TextCodec, load_codec
from backends.protocol import Rank
from specs.schema.rewards import MAX_SCORE, Judge
from specs.schema.row_values import gold_answer
from specs.wire import bodies
from specs.wire.batch import Batch, Column
from specs.wire.heartbeat import amount
from specs.wire.messages import COLUMNS, Verb
from specs.wire.role_config import RewardConfig
from workers.grading.completions_text import completion_texts, longest_stretches, prompt_texts
from workers.grading.judge import JUDGE_CAUSES, JudgePanel
from workers.grading.pool import CAUSES, Grade, GradeRequest, GraderPool
from workers.grading.reward_failures import FailureLog
from workers.grading.score_text import MODEL_CAUSES, ScoreTexts, Told
from workers.grading.terms import Setting
from workers.rank_report import as_built
from workers.serve import Emit, Handler, Reply, Request, TypedHandler, typed


class Reward:
    """A rank of the reward role. The first one, on the driver's host, also asks judges and makes tokens for the reward
    model."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._config: RewardConfig | None = None
        self._codec: TextCodec | None = None
        self._own: list[int] = []  # numbers of the terms that the grading processes hold
        self._pool: GraderPool | None = None
        self._judges: JudgePanel | None = None
        self._score_texts: ScoreTexts | None = None
        self._awaited: dict[int, Awaited] = {}  # by the ticket of their judges' grades
        self._failures: FailureLog | None = None

    def build(self, call: Request[RewardConfig], emit: Emit) -> Reply:
        """Start the grading processes and load the tokenizer. Raises RewardError or ModelError."""
        config = self._config = call.body
        logs = Path(config.run_dir, "logs")
        logs.mkdir(parents=True, exist_ok=True)
        whose = f"_rank{self.rank.rank}" if self.rank.rank else ""  # no file has writers on two hosts
        self._failures = FailureLog(Path(config.run_dir, f"reward_failures{whose}.jsonl"))
        setting = Setting(config.answer_column, config.max_response_tokens, config.spec_dir)
        terms = dict(enumerate(config.reward.terms))
        self._own = [number for number, term in terms.items() if term.graded_by == "processes"]
        if self._own:
            self._pool = GraderPool(
                [terms[number].model_dump() for number in self._own],
                setting,
                workers=config.reward.workers,
                timeout_s=config.reward.timeout_s,
                log_path=logs / f"reward_output{whose}.log",
                labels=[f"reward.terms[{number}]: " for number in self._own],
                sources=config.sources,
            )
        judges = {number: term for number, term in terms.items() if isinstance(term, Judge)}
        if judges and not whose:
            self._judges = JudgePanel(judges, setting, Path(config.run_dir))
        self._codec = load_codec(config.model_path, trust_remote_code=config.trust_remote_code)  # they start meanwhile
        if config.score_text is not None and not whose:
            self._score_texts = ScoreTexts(config.score_text, self._codec)
        if self._pool is not None:
            self._pool.wait_ready()
        return as_built(config.role, self.rank, engine="grader", device="cpu", model=None).model_dump(), {}

    def score(self, call: Request[bodies.Score], emit: Emit) -> Reply:
        """Have every sample graded. The body brings, under `rows`, the rows of these samples by number
        (`workers/roles/data.py`), and says in `what` whether they are of training or evaluation.

        `term_<i>_B` is 0 where grading failed, and `scored_B` is 0 there. Terms of judges are not among them (`judge`).
        """
        assert self._config is not None, "build comes first"
        batch = call.batch
        batch.require(COLUMNS[Verb.SCORE].needs, Verb.SCORE)
        requests, ids = self._requests(batch, call.body.rows), batch["id_B"].tolist()
        graders = amount(self._config.reward.workers, "process", "es")
        activity.describe(f"score of {amount(len(requests), 'completion')} by {graders}", "grade", counted=True)
        grades = self._pool.grade(requests) if self._pool is not None else [Grade()] * len(requests)
        weights = np.array([self._config.reward.terms[number].weight for number in self._own])
        columns, grades = weigh(grades, weights, self._config.reward.fallback, self._own)
        wheres = [call.body.rows[str(request.row_key)].where for request in requests]
        self._record_failures(call.body.what, wheres, requests, grades, ids)
        body = {
            "failures": {cause: sum(grade.cause == cause for grade in grades) for cause in CAUSES},
            "first_failure": _first_failure(grades, wheres, ids, _last_line),
            "samples": self._examples(batch, requests, columns, call.body.samples),
        }
        return body, columns

    def render(self, call: Request[bodies.Render], emit: Emit) -> Reply:
        """Return samples in the tokens of the reward model: those that it can read, by their ids."""
        assert self._score_texts is not None, "the run has no reward model"
        batch, rows = call.batch, call.body.rows
        batch.require(COLUMNS[Verb.RENDER].needs, Verb.RENDER)
        requests, ids = self._requests(batch, rows), batch["id_B"].tolist()
        told = [Told(one.prompt, rows[str(one.row_key)].messages, one.completion) for one in requests]
        found = self._score_texts.tokens(told)
        grades = [one if isinstance(one, Grade) else Grade() for one in found]
        wheres = [rows[str(request.row_key)].where for request in requests]
        self._record_failures(call.body.what, wheres, requests, grades, ids)
        fitting = [(sample, one) for sample, one in zip(ids, found, strict=True) if not isinstance(one, Grade)]
        tokens = [np.array(one, dtype=np.int32) for _, one in fitting]
        columns: dict[str, Column] = {
            "tokens_T": np.concatenate(tokens) if tokens else np.zeros(0, dtype=np.int32),
            "length_B": np.array([len(one) for one in tokens], dtype=np.int64),
            "id_B": np.array([sample for sample, _ in fitting], dtype=np.int64),
        }
        failures = {cause: sum(one.cause == cause for one in grades) for cause in MODEL_CAUSES}
        return {"failures": failures, "first_failure": _first_failure(grades, wheres, ids, _one_line)}, columns

    def judge(self, call: Request[bodies.SendToJudges], emit: Emit) -> Reply:
        """Send samples to the judges, and do not wait."""
        assert self._judges is not None, "no term is a judge's"
        batch, rows = call.batch, call.body.rows
        batch.require(COLUMNS[Verb.JUDGE].needs, Verb.JUDGE)
        requests = self._requests(batch, rows)
        ticket = self._judges.start(requests)
        wheres = [rows[str(request.row_key)].where for request in requests]
        self._awaited[ticket] = Awaited(batch["id_B"].tolist(), wheres)
        return {"ticket": ticket}, {}

    def await_judges(self, call: Request[bodies.AwaitJudges], emit: Emit) -> Reply:
        """Wait for the judges' grades of earlier calls. `term_<i>_B` is 0 where one of them failed, and `scored_B`."""
        assert self._judges is not None, "no term is a judge's"
        tickets, lost = call.body.tickets, frozenset(call.body.lost)
        waiting = amount(self._judges.waiting(tickets), "completion")
        activity.describe(f"judges' grades of {waiting}", "grade", counted=True)
        requests, rows = self._judges.collect(tickets)
        awaited = Awaited.joined([self._awaited.pop(ticket) for ticket in tickets])
        grades = [next((one for one in of_all if one.cause), Grade()) for of_all in zip(*rows, strict=True)]
        counted = [
            Grade() if sample in lost else grade for grade, sample in zip(grades, awaited.ids, strict=True)
        ]  # a completion is lost once
        self._record_failures(call.body.what, awaited.wheres, requests, counted, awaited.ids)
        scored = np.array([not grade.cause for grade in grades], dtype=bool)
        columns: dict[str, Column] = {"scored_B": scored.astype(np.uint8)}
        for number, row in zip(self._judges.numbers, rows, strict=True):
            columns[f"term_{number}_B"] = np.array([(one.values or (0.0,))[0] for one in row], dtype=np.float32)
        failures = {cause: sum(grade.cause == cause for grade in counted) for cause in (*CAUSES, *JUDGE_CAUSES)}
        first = _first_failure(counted, awaited.wheres, awaited.ids, _one_line)
        return {"failures": failures, "first_failure": first, "counts": self._judges.take_counts()}, columns

    def close(self, call: Request[bodies.Nothing], emit: Emit) -> Reply:
        if self._pool is not None:
            self._pool.close()
        if self._judges is not None:
            self._judges.close()
        return {}, {}

    def _requests(self, batch: Batch, rows: Mapping[str, bodies.Row]) -> list[GradeRequest]:
        """Return one request per sample, with the text that the policy wrote."""
        assert self._codec is not None
        texts, longest = completion_texts(batch, self._codec), longest_stretches(batch)
        return [
            GradeRequest(row, rows[str(row)].prompt, rows[str(row)].values, completion, tokens)
            for row, completion, tokens in zip(batch["row_B"].tolist(), texts, longest, strict=True)
        ]

    def _record_failures(
        self,
        what: bodies.What,
        wheres: Sequence[str],
        requests: Sequence[GradeRequest],
        grades: Sequence[Grade],
        ids: Sequence[int],
    ) -> None:
        assert self._failures is not None
        self._failures.append(
            [
                {
                    "what": what,
                    "id": sample,
                    "row": where,
                    "cause": grade.cause,
                    "text": grade.text,
                    "prompt": request.prompt,
                    "completion": request.completion,
                }
                for sample, where, request, grade in zip(ids, wheres, requests, grades, strict=True)
                if grade.cause
            ]
        )

    def _examples(
        self, batch: Batch, requests: Sequence[GradeRequest], columns: Mapping[str, Column], count: int
    ) -> list[dict[str, Any]]:
        """Return `count` samples spread over the batch, as readable text."""
        if not count:
            return []
        assert self._config is not None
        assert self._codec is not None
        answer = self._config.answer_column
        terms = [f"term_{number}_B" for number in self._own]
        chosen = np.unique(np.linspace(0, len(requests) - 1, min(count, len(requests))).astype(int)).tolist()
        shown = batch.select(np.array(chosen, dtype=np.int64))
        raw = completion_texts(shown, self._codec, special_tokens=True)
        prompts = prompt_texts(shown, self._codec)
        return [
            {
                "id": int(batch["id_B"][index]),
                "prompt": prompt,
                "completion": requests[index].completion,
                "completion_raw": text,
                "finished": bool(batch["finished_B"][index]),
                "answer": gold_answer(requests[index].row[answer]) if answer in requests[index].row else None,
                "reward": float(columns["reward_B"][index]),
                "scored": bool(columns["scored_B"][index]),
                "terms": [float(columns[name][index]) for name in terms],
            }
            for index, prompt, text in zip(chosen, prompts, raw, strict=True)
        ]

    def handlers(self) -> Mapping[Verb, Handler]:
        verbs: Mapping[Verb, TypedHandler] = {
            Verb.BUILD: self.build,
            Verb.SCORE: self.score,
            Verb.RENDER: self.render,
            Verb.JUDGE: self.judge,
            Verb.AWAIT_JUDGES: self.await_judges,
            Verb.CLOSE: self.close,
        }
        return typed(verbs, {Verb.BUILD: RewardConfig})


@dataclass(frozen=True)
class Awaited:
    """Samples that judges are at: their ids, and where their rows stand."""

    ids: list[int]
    wheres: list[str]

    @staticmethod
    def joined(parts: Sequence[Awaited]) -> Awaited:
        return Awaited(*([item for part in parts for item in getattr(part, name)] for name in ("ids", "wheres")))


def weigh(
    grades: Sequence[Grade], weights: NDArray[np.float64], fallback: float, numbers: Sequence[int] = ()
) -> tuple[dict[str, Column], list[Grade]]:
    """Return weighted sums as columns. A value or a sum beyond MAX_SCORE, with which a step cannot compute, is a bad
    value. `numbers`: those of the terms in `reward.terms`, where they are not all."""
    numbers = numbers or range(len(weights))
    values = np.array([grade.values or (0.0,) * len(weights) for grade in grades]).reshape(len(grades), len(weights))
    with np.errstate(over="ignore", invalid="ignore"):
        total = values @ weights
    failed = np.array([bool(grade.cause) for grade in grades], dtype=bool)
    usable = (np.abs(total) <= MAX_SCORE) & (np.abs(values) <= MAX_SCORE).all(axis=1)
    checked = [
        grade if grade.cause or fits else Grade(cause="bad_values", text=_too_large(grade.values, float(one), numbers))
        for grade, fits, one in zip(grades, usable, total, strict=True)
    ]
    scored = usable & ~failed
    columns: dict[str, Column] = {
        "reward_B": np.where(scored, total, fallback).astype(np.float32),
        "scored_B": scored.astype(np.uint8),
    }
    for index, number in enumerate(numbers):
        columns[f"term_{number}_B"] = np.where(scored, values[:, index], 0.0).astype(np.float32)
    return columns, checked


def _first_failure(
    grades: Sequence[Grade], wheres: Sequence[str], ids: Sequence[int], short: Callable[[str], str]
) -> str:
    """Return why the first sample without a score failed, made `short`, its row and its id; empty where all have
    one."""
    for grade, where, sample in zip(grades, wheres, ids, strict=True):
        if grade.cause:
            return f"{short(grade.text) or grade.cause} ({where}, sample {sample})"
    return ""


def _last_line(text: str) -> str:
    """Return the last line of a traceback."""
    return (text.strip().splitlines() or [""])[-1]


def _one_line(text: str) -> str:
    """Return all of the text in one line: a server's reply may be part of it."""
    return " ".join(text.split())


def _too_large(values: Sequence[float], total: float, numbers: Sequence[int]) -> str:
    """Say what of one sample is beyond the limit."""
    found = next(((n, value) for n, value in zip(numbers, values, strict=True) if not abs(value) <= MAX_SCORE), None)
    what = f"the weighted sum of the terms is {total:g}" if found is None else f"reward.terms[{found[0]}]: {found[1]:g}"
    return f"{what}, beyond ±{MAX_SCORE:g}: nothing can be learned from so large a number"


def handlers(rank: Rank) -> Mapping[Verb, Handler]:
    return Reward(rank).handlers()

"""The reward role: it decodes completions and has them graded, each with the row of its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from backends import activity
from backends.hf.tokenizer import TextCodec, load_codec
from backends.protocol import Rank
from specs.schema.environment import STOP_REASONS, UNSCORED
from specs.schema.rewards import JUDGED_PARTS, Judge
from specs.schema.row_values import gold_answer
from specs.wire import bodies
from specs.wire.batch import Batch, Column
from specs.wire.heartbeat import amount
from specs.wire.messages import COLUMNS, Verb
from specs.wire.role_config import RewardConfig
from workers.grading.completions_text import completion_texts, longest_stretches, prompt_texts
from workers.grading.judge import JUDGE_CAUSES, JudgePanel
from workers.grading.pool import CAUSES, Grade, GraderPool, too_large
from workers.grading.reward_failures import FailureLog, last_line
from workers.grading.score_text import MODEL_CAUSES, ScoreTexts
from workers.grading.terms import GradeRequest, Setting
from workers.rank_report import as_built
from workers.roles import handlers_of
from workers.serve import Emit, Handlers, Reply, Request

if TYPE_CHECKING:
    from workers.episodes.episode_runner import EpisodeRunner


@dataclass(frozen=True)
class Graded:
    """Hold what this host says of some requests: why they have no score, if so, the values of its terms by number, and
    the tokens that the reward model is to read."""

    grades: Sequence[Grade]
    values: dict[int, list[float]]
    rendered: Sequence[Sequence[int]] = ()


class Reward:
    """A rank of the reward role: it grades and runs episodes, asks judges, and makes tokens for the reward model."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._config: RewardConfig | None = None
        self._codec: TextCodec | None = None
        self._own: list[int] = []  # numbers of the terms that the grading processes hold
        self._pool: GraderPool | None = None
        self._judges: JudgePanel | None = None
        self._score_texts: ScoreTexts | None = None
        self._log: FailureLog | None = None
        self._runner: EpisodeRunner | None = None
        self._grading = ThreadPoolExecutor(1, "grading of a call")
        self._waiting = ThreadPoolExecutor(JUDGED_PARTS, "judges' grades")  # threads that wait

    def build(self, call: Request[RewardConfig], emit: Emit) -> Reply:
        """Start the grading processes and load the tokenizer. Raises RewardError or ModelError."""
        config = self._config = call.body
        logs = Path(config.run_dir, "logs")
        logs.mkdir(parents=True, exist_ok=True)
        whose = f"_rank{self.rank.rank}" if self.rank.rank else ""  # no file has writers on two hosts
        self._log = FailureLog(Path(config.run_dir, f"reward_failures{whose}.jsonl"))
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
            ).start()
        judges = {number: term for number, term in terms.items() if isinstance(term, Judge)}
        if judges:
            self._judges = JudgePanel(judges, setting, Path(config.run_dir), whose).open()
        trusted, today = config.trust_remote_code, config.today
        self._codec = load_codec(config.model_path, trust_remote_code=trusted, today=today)  # they start meanwhile
        if config.score_text is not None:
            self._score_texts = ScoreTexts(config.score_text, self._codec)
        if config.environments:
            from workers.episodes.episode_runner import EpisodeRunner

            log_path = logs / f"environment_output{whose}.log"
            self._runner = EpisodeRunner(config, self._codec, self.rank.rank, log_path).open()
        if self._pool is not None:
            self._pool.wait_ready()
        return as_built(config.role, self.rank, engine="grader", device="cpu", model=None).model_dump(), {}

    def score(self, call: Request[bodies.Score], emit: Emit) -> Future[Reply]:
        """Have every sample graded, by this host and by judges at the same time; return `samples` of them as text, too,
        and what the reward model is to read. The body brings the rows of these samples by number
        (`workers/roles/data.py`)."""
        requests, request_B = self._requests(call)
        if (judges := self._judges) is None:
            return self._grading.submit(lambda: self._scores(call, requests, request_B, self._grade(requests), {}))
        judged, graded = judges.start(requests), self._grading.submit(self._grade, requests)
        return self._waiting.submit(
            lambda: self._scores(call, requests, request_B, graded.result(), judges.collect(judged))
        )

    def _grade(self, requests: Sequence[GradeRequest]) -> Graded:
        """Return what the terms of the grading processes say, and what the reward model is to read."""
        assert self._config is not None, "build comes first"
        graders = amount(self._config.reward.workers, "process", "es")
        activity.describe(f"score of {amount(len(requests), 'completion')} by {graders}", "grade", counted=True)
        terms = enumerate(self._config.reward.terms)
        given = [f"reward.terms[{number}]: " for number, term in terms if term.graded_by == "environment"]
        grades = [_lost(request.episode, given) for request in requests]
        if self._pool is not None:
            left = [place for place, grade in enumerate(grades) if not grade.cause]
            for place, grade in zip(left, self._pool.grade([requests[place] for place in left]), strict=True):
                grades[place] = grade
        values = {
            number: [grade.values[place] if grade.values else 0.0 for grade in grades]
            for place, number in enumerate(self._own)
        }
        if self._score_texts is None:
            return Graded(grades, values)
        rendered = self._score_texts.tokens(requests)
        pairs = zip(grades, rendered, strict=True)
        grades = [one if isinstance(one, Grade) and not grade.cause else grade for grade, one in pairs]
        return Graded(grades, values, [[] if isinstance(one, Grade) else one for one in rendered])

    def _scores(
        self,
        call: Request[bodies.Score],
        requests: Sequence[GradeRequest],
        request_B: Sequence[int],
        here: Graded,
        by_judges: Mapping[int, Sequence[Grade]],
    ) -> Reply:
        of_each = zip(here.grades, *by_judges.values(), strict=True)
        grades = [next((one for one in of_one if one.cause), Grade()) for of_one in of_each]
        values = here.values | {number: [(one.values or (0.0,))[0] for one in row] for number, row in by_judges.items()}
        columns: dict[str, Column] = {
            "scored_B": np.array([not grade.cause for grade in grades], dtype=np.uint8)[request_B],
            **{f"term_{number}_B": np.array(row, float)[request_B] for number, row in sorted(values.items())},
        }
        causes = [*CAUSES, *(JUDGE_CAUSES if self._judges else ())]
        if self._score_texts is not None:
            causes += MODEL_CAUSES
            tokens = [np.array(here.rendered[number], dtype=np.int32) for number in request_B]
            columns["rendered_T"] = np.concatenate([np.zeros(0, dtype=np.int32), *tokens])
            columns["rendered_B"] = np.array([*map(len, tokens)], dtype=np.int64)
        body = self._failures_of(call.body.what, requests, grades, causes)
        samples = self._examples(call.batch, [requests[number] for number in request_B], call.body.samples)
        return {**body, "samples": samples, "counts": self._judges.take_counts() if self._judges else {}}, columns

    def episodes(self, call: Request[bodies.Episodes], emit: Emit) -> Future[Reply]:
        """Run episodes; their parts ask for turns, and bring their samples."""
        assert self._runner is not None, "the spec has no environment"
        activity.describe(f"{amount(len(call.batch), 'episode')}", "turn", counted=True)
        return self._runner.episodes(call, emit)

    def turns(self, call: Request[bodies.Nothing], emit: Emit) -> Reply:
        """Let episodes continue with what the sampler wrote."""
        assert self._runner is not None, "the spec has no environment"
        self._runner.turns(call)
        activity.count("turn", len(call.batch))
        return {}, {}

    def close(self, call: Request[bodies.Nothing], emit: Emit) -> Reply:
        for threads in (self._grading, self._waiting):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._runner is not None:
            self._runner.close()
        if self._pool is not None:
            self._pool.close()
        if self._judges is not None:
            self._judges.close()
        return {}, {}

    def _requests(self, call: Request[bodies.Score]) -> tuple[list[GradeRequest], list[int]]:
        """Return one request per rollout, with the text that the policy wrote in all of its samples, and the request of
        each sample."""
        assert self._codec is not None
        batch, rows, episodes = call.batch, call.body.rows, call.body.episodes
        batch.require(COLUMNS[Verb.SCORE].needs, Verb.SCORE)
        texts, longest = completion_texts(batch, self._codec), longest_stretches(batch)
        samples = zip(batch["row_B"].tolist(), texts, longest, batch["id_B"].tolist(), strict=True)
        request_of: dict[int, int] = {}
        request_B = [request_of.setdefault(rollout, len(request_of)) for rollout in batch["rollout_B"].tolist()]
        requests: list[GradeRequest] = []
        for place, (number, text, tokens, sample) in zip(request_B, samples, strict=True):
            if place < len(requests):
                first = requests[place]
                written, most = [one for one in (first.completion, text) if one], max(first.completion_tokens, tokens)
                requests[place] = replace(first, completion="\n".join(written), completion_tokens=most)
            else:
                row = rows[str(number)]
                what = number, row.prompt, row.values, text, tokens, sample, row.where, row.messages, row.tools
                requests.append(GradeRequest(*what, episodes.get(str(sample))))
        return requests, request_B

    def _failures_of(
        self, what: bodies.What, requests: Sequence[GradeRequest], grades: Sequence[Grade], causes: Sequence[str]
    ) -> dict[str, Any]:
        """Write down the rollouts without a score; return their number by cause, and why the first of them has none,
        its row and the id of its first sample."""
        assert self._log is not None
        failed = [(request, grade) for request, grade in zip(requests, grades, strict=True) if grade.cause]
        self._log.append(
            [
                {
                    "what": what,
                    "id": request.sample,
                    "row": request.where,
                    "cause": grade.cause,
                    "text": grade.text,
                    "prompt": request.prompt,
                    "completion": request.completion,
                }
                for request, grade in failed
            ]
        )
        return {
            "failures": {cause: sum(grade.cause == cause for _, grade in failed) for cause in causes},
            "first_failure": next((_said(request, grade) for request, grade in failed), ""),
        }

    def _examples(self, batch: Batch, requests: Sequence[GradeRequest], ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the samples with these ids as readable text. `requests`: that of each sample."""
        if not ids:
            return []
        assert self._config is not None
        assert self._codec is not None
        answer = self._config.answer_column
        chosen = np.flatnonzero(np.isin(batch["id_B"], ids))
        shown = batch.select(chosen)
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
                **self._turns(batch.select([index]), requests[index].episode),
            }
            for index, prompt, text in zip(chosen.tolist(), prompts, raw, strict=True)
        ]

    def _turns(self, sample: Batch, episode: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return an episode's sample for people: why it ended, and its text piece by piece, with the log-prob of each
        token that the policy learns from."""
        if episode is None:
            return {}
        assert self._codec is not None
        tokens, logprobs = sample["tokens_T"].tolist(), sample["rollout_logprob_T"].tolist()
        pieces: list[dict[str, Any]] = []
        for by_policy, run in groupby(range(len(tokens)), key=lambda at: bool(sample["loss_mask_T"][at])):
            places = [*run]
            piece: dict[str, Any] = {
                "text": self._codec.decode([[tokens[at] for at in places]], special_tokens=True)[0]
            }
            if by_policy:
                texts = self._codec.decode([[tokens[at]] for at in places], special_tokens=True)
                piece["tokens"] = [[text, round(logprobs[at], 4)] for text, at in zip(texts, places, strict=True)]
            pieces.append(piece)
        asked = {"requests": episode["requests"]} if "requests" in episode else {}
        return {"stop": episode["stop"], "environment_reward": episode["reward"], "pieces": pieces, **asked}


def _lost(episode: Mapping[str, Any] | None, given: Sequence[str]) -> Grade:
    """Return why an episode has no score: its environment was lost, took too long, or gave a number that is too large.
    An empty grade for others. `given`: labels of terms that are what it gave."""
    if episode is None:
        return Grade()
    if STOP_REASONS.index(episode["stop"]) not in UNSCORED:
        return next((bad for label in given if (bad := too_large(label, episode["reward"]))), Grade())
    return Grade(cause="environment_lost", text=episode["why"] or "the episode took longer than episode_timeout_s")


def _said(request: GradeRequest, grade: Grade) -> str:
    """Return why a sample has no score, its row and its id."""
    # Of a traceback the last line counts; a server's reply may be part of another text.
    text = last_line(grade.text) if grade.cause in CAUSES else " ".join(grade.text.split())
    return f"{text or grade.cause} ({request.where}, sample {request.sample})"


def handlers(rank: Rank) -> Handlers:
    return handlers_of(Reward(rank))

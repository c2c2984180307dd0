"""The reward role: it holds the tokenizer and the data, hands out prompts, and has answers judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.protocol import Rank
from backends.text import TextCodec, load_codec
from specs.batch import Batch, Column
from specs.messages import COLUMNS, Message, Verb
from specs.role_config import RewardConfig
from workers.data import Prompts, RunData, open_data
from workers.judge.failures import FailureLog
from workers.judge.pool import CAUSES, JudgePool, Request, Verdict
from workers.judge.terms import Setting, gold_answer
from workers.report import as_built
from workers.serve import Emit, Handler, Reply


class Reward:
    """The one rank of the reward role."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._config: RewardConfig | None = None
        self._codec: TextCodec | None = None
        self._pool: JudgePool | None = None
        self._data: RunData | None = None
        self._failures: FailureLog | None = None

    def build(self, message: Message, emit: Emit) -> Reply:
        """Start the judging processes and load the tokenizer. Raises RewardError or ModelError."""
        config = self._config = RewardConfig.model_validate(message.body)
        logs = Path(config.run_dir, "logs")
        logs.mkdir(parents=True, exist_ok=True)
        self._failures = FailureLog(Path(config.run_dir, "reward_failures.jsonl"))
        self._pool = JudgePool(
            [term.model_dump() for term in config.reward.terms],
            Setting(config.data.answer_column, config.data.max_response_tokens, config.spec_dir),
            workers=config.reward.workers,
            timeout_s=config.reward.timeout_s,
            log_path=logs / "reward_output.log",
        )
        self._codec = load_codec(config.model_path, trust_remote_code=config.trust_remote_code)  # they start meanwhile
        self._pool.wait_ready()
        return as_built("reward", self.rank, engine="judge", device="cpu", model=None).model_dump(), {}

    def open_data(self, message: Message, emit: Emit) -> Reply:
        """Read and tokenise all data. Raises DataError naming the file and row."""
        assert self._config is not None, "build comes first"
        assert self._codec is not None
        self._data = open_data(self._config, self._codec)
        return self._data.report(self._config.data.answer_column), {}

    def prompts(self, message: Message, emit: Emit) -> Reply:
        """The prompts at a position of the cursor, each repeated for its group."""
        body = message.body
        columns, state = self._prompts(body).draw(int(body["position"]), int(body["count"]), int(body["group_size"]))
        return state, columns

    def score(self, message: Message, emit: Emit) -> Reply:
        """Have every sample judged. `term_<i>_B` is 0 where judging failed, and `scored_B` is 0 there."""
        assert self._config is not None, "build comes first"
        assert self._pool is not None
        batch = message.batch
        batch.require(COLUMNS[Verb.SCORE].needs, Verb.SCORE)
        requests = self._requests(batch, self._prompts(message.body))
        verdicts = self._pool.judge(requests)
        weights = np.array([term.weight for term in self._config.reward.terms])
        columns, verdicts = weigh(verdicts, weights, self._config.reward.fallback)
        self._record_failures(message, batch, requests, verdicts)
        body = {
            "failures": {cause: sum(verdict.cause == cause for verdict in verdicts) for cause in CAUSES},
            "samples": self._examples(batch, requests, columns, int(message.body.get("samples", 0))),
        }
        return body, columns

    def close(self, message: Message, emit: Emit) -> Reply:
        if self._pool is not None:
            self._pool.close()
        return {}, {}

    def _prompts(self, body: Mapping[str, Any]) -> Prompts:
        assert self._data is not None, "open_data comes first"
        return self._data.prompts(str(body.get("what", "train")))

    def _requests(self, batch: Batch, prompts: Prompts) -> list[Request]:
        """What is judged of each sequence: from its first answer token to its end, as text."""
        assert self._codec is not None
        masks = batch.sequences("loss_mask_T")
        answers = [
            tokens[int(mask.argmax()) :].tolist() if mask.any() else []
            for tokens, mask in zip(batch.sequences("tokens_T"), masks, strict=True)
        ]
        table = prompts.table
        return [
            Request(row, table.prompts[row], table.rows[row], completion, int(mask.sum()))
            for row, completion, mask in zip(batch["row_B"].tolist(), self._codec.decode(answers), masks, strict=True)
        ]

    def _record_failures(
        self, message: Message, batch: Batch, requests: Sequence[Request], verdicts: Sequence[Verdict]
    ) -> None:
        assert self._failures is not None
        wheres = self._prompts(message.body).table.wheres
        self._failures.append(
            [
                {
                    "what": message.body.get("what", "train"),
                    "id": sample,
                    "row": wheres[request.row_key],
                    "cause": verdict.cause,
                    "text": verdict.text,
                    "prompt": request.prompt,
                    "completion": request.completion,
                }
                for sample, request, verdict in zip(batch["id_B"].tolist(), requests, verdicts, strict=True)
                if verdict.cause
            ]
        )

    def _examples(
        self, batch: Batch, requests: Sequence[Request], columns: Mapping[str, Column], count: int
    ) -> list[dict[str, Any]]:
        """`count` samples spread over the batch, as a person reads them."""
        assert self._config is not None
        answer = self._config.data.answer_column
        terms = [f"term_{index}_B" for index in range(len(self._config.reward.terms))]
        chosen = np.unique(np.linspace(0, len(requests) - 1, min(count, len(requests))).astype(int)).tolist()
        return [
            {
                "id": int(batch["id_B"][index]),
                "prompt": requests[index].prompt,
                "completion": requests[index].completion,
                "answer": gold_answer(requests[index].row, answer) if answer in requests[index].row else None,
                "reward": float(columns["reward_B"][index]),
                "scored": bool(columns["scored_B"][index]),
                "terms": [float(columns[name][index]) for name in terms],
            }
            for index in chosen
        ]

    def handlers(self) -> Mapping[Verb, Handler]:
        return {
            Verb.BUILD: self.build,
            Verb.OPEN_DATA: self.open_data,
            Verb.PROMPTS: self.prompts,
            Verb.SCORE: self.score,
            Verb.CLOSE: self.close,
        }


def weigh(
    verdicts: Sequence[Verdict], weights: NDArray[np.float64], fallback: float
) -> tuple[dict[str, Column], list[Verdict]]:
    """Weighted sums as columns. A sum beyond float32 makes its verdict a bad value: an infinite reward ends a run."""
    values = np.array([verdict.values or (0.0,) * len(weights) for verdict in verdicts]).reshape(-1, len(weights))
    failed = np.array([bool(verdict.cause) for verdict in verdicts], dtype=bool)
    with np.errstate(over="ignore", invalid="ignore"):
        total = (values @ weights).astype(np.float32)
        terms = values.astype(np.float32)
    unusable = ~failed & ~(np.isfinite(total) & np.isfinite(terms).all(axis=1))
    beyond = Verdict(cause="bad_values", text="the weighted sum of the terms is beyond float32")
    checked = [beyond if bad else verdict for verdict, bad in zip(verdicts, unusable, strict=True)]
    scored = ~(failed | unusable)
    columns: dict[str, Column] = {
        "reward_B": np.where(scored, total, np.float32(fallback)).astype(np.float32),
        "scored_B": scored.astype(np.uint8),
    }
    for index in range(len(weights)):
        columns[f"term_{index}_B"] = np.where(scored, terms[:, index], np.float32(0.0)).astype(np.float32)
    return columns, checked


def handlers(rank: Rank) -> Mapping[Verb, Handler]:
    return Reward(rank).handlers()

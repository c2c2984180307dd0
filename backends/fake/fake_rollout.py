"""The fake sampler: a bigram model in numpy, under the same contract as a real engine. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from backends import activity
from backends.completions import Completion, SampleRequest
from backends.fake import bigram
from backends.hf.tokenizer import end_tokens_of
from backends.protocol import OnMeta, Rank, WeightSpec
from backends.rollout.stop_tokens import stop_tokens
from backends.rollout.synced_sampler import WEIGHTS, SyncedSampler
from backends.rollout.uniform import request_keys, uniform
from backends.weights.checksum import checksum_bytes
from specs.wire.as_built import ModelBuilt
from specs.wire.batch import Batch
from specs.wire.role_config import RolloutConfig, Sampling

Floats = NDArray[np.float32]


class FakeRolloutEngine(SyncedSampler):
    """Next-token logits are `bigram.weight[previous] + bias.weight`; always fp32."""

    counts_progress = True

    def __init__(self, config: RolloutConfig, vocab: int) -> None:
        held = {spec.name: spec for spec in bigram.weight_specs(vocab, "fp32")}
        super().__init__(config, held, "the fake model", vocab)
        self._weights: dict[str, Floats] = {}
        self._queue: deque[SampleRequest] = deque()
        self.stops = stop_tokens(end_tokens_of(Path(config.model.path)), config, ask_tokenizer=False)

    @classmethod
    def on_meta(cls, config: RolloutConfig, rank: Rank) -> OnMeta:
        return OnMeta(cls.build(config, rank).built())  # weights have no memory before the first sync

    @classmethod
    def build(cls, config: RolloutConfig, rank: Rank) -> FakeRolloutEngine:
        assert config.model.dtype == "fp32", "specs/schema/engines/fake_tables.py"
        return cls(config, bigram.read_vocab_size(config.model))

    def built(self) -> ModelBuilt:
        unset = {spec.name: np.empty(spec.shape, dtype=np.float32) for spec in self.weight_specs()}
        return bigram.describe(unset, self.config.model, learns=False, checksum=False)

    # ── weights ───────────────────────────────────────────────────────────────────────────────────

    def import_weight(self, spec: WeightSpec, buffer: NDArray[np.uint8]) -> str:
        weight = np.empty(self._arrive(spec, len(buffer)).shape, dtype=np.float32)
        weight.reshape(-1).view(np.uint8)[:] = buffer
        self._weights[spec.name] = weight
        return checksum_bytes(weight.reshape(-1).view(np.uint8))

    # ── sampling ──────────────────────────────────────────────────────────────────────────────────

    def _begin(self, requests: Sequence[SampleRequest]) -> None:
        self._queue.extend(requests)

    def _advance(self) -> Sequence[Completion]:
        """Write the completion whose turn it is."""
        completion = self._completion(self._queue.popleft())
        activity.count("token", len(completion.tokens))
        return [completion]

    def _drop(self, ids: Collection[int]) -> None:
        self._queue = deque(request for request in self._queue if request.id not in ids)

    def _written(self) -> Sequence[Completion]:
        return ()  # a completion is written in one step

    def score(self, batch: Batch, temperature: float) -> Floats:
        self._check_usable("score", (WEIGHTS,))
        logprob_T = np.zeros(batch.num_tokens, dtype=np.float32)
        for start, stop in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            tokens = batch["tokens_T"][start:stop].astype(np.int64)
            if len(tokens) > 1:
                scores = bigram.log_softmax(self._weights, tokens[:-1], temperature)
                logprob_T[start + 1 : stop] = scores[np.arange(len(tokens) - 1), tokens[1:]]
        return logprob_T

    def _completion(self, request: SampleRequest) -> Completion:
        sampling, last, tokens, logprobs = request.sampling, int(request.tokens[-1]), [], []
        key = request_keys([request])
        for position in range(request.position, request.position + sampling.max_response_tokens):
            draw = uniform(key, np.array([position]))[0]
            last, logprob = sample(bigram.logits(self._weights, np.array([last]))[0], float(draw), sampling)
            tokens.append(last)
            logprobs.append(logprob)
            if last in self.stops:
                break
        written = np.array(tokens, dtype=np.int64), np.array(logprobs, dtype=np.float32)
        return Completion(request.id, *written, tokens[-1] in self.stops)

    # ── sleep ─────────────────────────────────────────────────────────────────────────────────────

    def _fall_asleep(self, level: int) -> None:
        if level == 2:
            self._weights.clear()


def sample(logits: NDArray[np.float64], draw: float, sampling: Sampling) -> tuple[int, float]:
    """One token of `logits` [V] and its log-prob: temperature, top-k, top-p, then the inverse CDF at `draw`."""
    if sampling.greedy:
        token = int(logits.argmax())
        return token, float(bigram.normalised(logits)[token])
    logits = logits / sampling.temperature
    order = np.argsort(-logits, kind="stable")
    kept = order[: sampling.top_k] if sampling.top_k else order
    if sampling.top_p < 1.0:
        probability = np.exp(bigram.normalised(logits[kept]))
        inside = np.cumsum(probability) - probability < sampling.top_p
        inside[0] = True
        kept = kept[inside]
    restricted = np.full_like(logits, -np.inf)
    restricted[kept] = logits[kept]
    scores = bigram.normalised(restricted)
    cdf = np.exp(scores).cumsum()
    token = int(np.searchsorted(cdf, draw * cdf[-1], side="right"))
    return token, float(scores[token])

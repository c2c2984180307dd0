"""The fake sampler: a bigram model in numpy, under the same contract as a real engine. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends import activity
from backends.fake import bigram
from backends.protocol import Emit, OnMeta, Rank, RolloutEngine, WeightSpec
from backends.rollout.completions import Completions
from backends.rollout.refusals import check_arrival, check_complete, check_lengths, check_usable
from backends.rollout.stop_tokens import end_tokens_of, stop_tokens
from backends.rollout.uniform import sample_keys, uniform
from backends.weights.checksum import checksum_bytes
from specs.errors import ModelError
from specs.wire.as_built import ModelBuilt
from specs.wire.batch import Batch
from specs.wire.role_config import RolloutConfig, Sampling

Floats = NDArray[np.float32]


class FakeRolloutEngine(RolloutEngine):
    """Next-token logits are `bigram.weight[previous] + bias.weight`; always fp32."""

    counts_progress = True
    mixes_greedy = True

    def __init__(self, config: RolloutConfig, vocab: int) -> None:
        self.config, self.vocab = config, vocab
        self._weights: dict[str, Floats] = {}
        self._imported: set[str] = set()
        self._ready = False
        self._awake = {"weights", "kv_cache"}
        self.stops = stop_tokens(end_tokens_of(Path(config.model.path)), config, ask_tokenizer=False)

    @classmethod
    def on_meta(cls, config: RolloutConfig, rank: Rank) -> OnMeta:
        return OnMeta(cls.build(config, rank).built())  # weights have no memory before the first sync

    @classmethod
    def build(cls, config: RolloutConfig, rank: Rank) -> FakeRolloutEngine:
        if config.model.dtype != "fp32":
            raise ModelError("the fake engine computes in fp32 only", hint='set rollout.dtype = "fp32"')
        return cls(config, bigram.read_vocab_size(config.model))

    def built(self) -> ModelBuilt:
        unset = {spec.name: np.empty(spec.shape, dtype=np.float32) for spec in self.weight_specs()}
        return bigram.describe(unset, self.config.model, learns=False, checksum=False)

    # ── weights ───────────────────────────────────────────────────────────────────────────────────

    def weight_specs(self) -> Sequence[WeightSpec]:
        return bigram.weight_specs(self.vocab, "fp32")

    def import_weight(self, spec: WeightSpec, buffer: NDArray[np.uint8]) -> str:
        known = {one.name: one for one in self.weight_specs()}.get(spec.name)
        held = check_arrival(spec, len(buffer), known, "the fake model", awake="weights" in self._awake)
        self._ready = False
        weight = np.empty(held.shape, dtype=np.float32)
        weight.reshape(-1).view(np.uint8)[:] = buffer
        self._weights[spec.name] = weight
        self._imported.add(spec.name)
        return checksum_bytes(weight.reshape(-1).view(np.uint8))

    def finish_import(self) -> None:
        check_complete(sorted(bigram.shapes(self.vocab)), self._imported)
        self._imported.clear()
        self._ready = True

    # ── sampling ──────────────────────────────────────────────────────────────────────────────────

    def generate(self, prompts: Batch, sampling: Sampling, emit: Emit) -> Mapping[str, Any]:
        check_usable("generate", ("weights", "kv_cache"), self._awake, self._ready)
        completions = Completions(prompts, emit)
        longest = max((len(prompt) for prompt in completions.prompt_tokens), default=0)
        if completions.queue:
            check_lengths(longest, sampling, self.config.model.max_sequence_tokens)
        key_B = sample_keys(sampling.seed, prompts["id_B"].astype(np.int64))
        written = 0
        for index in completions.queue:
            prompt, drawn = completions.prompt_tokens[index].astype(np.int64), int(prompts["position_B"][index])
            own = completions.sampling_of(index, sampling)
            completions.finish(index, *self._complete(prompt, key_B[index], drawn, own))
            activity.count("token", completions.generated_tokens - written)
            written = completions.generated_tokens
            completions.flush()
        completions.close()
        longest = sampling.max_response_tokens if len(prompts) else 0
        return {"generated_tokens": completions.generated_tokens, "decode_steps": longest}

    def score(self, batch: Batch, temperature: float) -> Floats:
        check_usable("score", ("weights",), self._awake, self._ready)
        logprob_T = np.zeros(batch.num_tokens, dtype=np.float32)
        for start, stop in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            tokens = batch["tokens_T"][start:stop].astype(np.int64)
            if len(tokens) > 1:
                scores = bigram.log_softmax(self._weights, tokens[:-1], temperature)
                logprob_T[start + 1 : stop] = scores[np.arange(len(tokens) - 1), tokens[1:]]
        return logprob_T

    def _complete(
        self, prompt: NDArray[np.int64], key: np.uint64, drawn: int, sampling: Sampling
    ) -> tuple[NDArray[np.int64], Floats, bool]:
        last, tokens, logprobs = int(prompt[-1]), [], []
        for position in range(drawn, drawn + sampling.max_response_tokens):
            draw = uniform(np.array([key]), np.array([position]))[0]
            last, logprob = sample(self._logits(np.array([last]))[0], float(draw), sampling)
            tokens.append(last)
            logprobs.append(logprob)
            if last in self.stops:
                break
        return np.array(tokens, dtype=np.int64), np.array(logprobs, dtype=np.float32), tokens[-1] in self.stops

    def _logits(self, previous: NDArray[np.int64]) -> NDArray[np.float64]:
        return bigram.logits(self._weights, previous)

    # ── sleep ─────────────────────────────────────────────────────────────────────────────────────

    def sleep(self, level: int) -> None:
        assert level in (1, 2), f"sleep level {level}"
        self._awake.clear()
        if level == 2:
            self._weights.clear()
            self._imported.clear()
            self._ready = False

    def wake(self, tags: Sequence[str]) -> None:
        self._awake |= set(tags)


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

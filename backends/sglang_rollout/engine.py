"""The `sglang` rollout engine: an SGLang server (0.5.23 or later) as a child process, one per replica.

What it says about each token is SGLang's own: log softmax(logits / temperature) of the sampled token, which is the
distribution sampled from as long as top_p and top_k are off; with them on it is not, so they are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from packaging.version import Version

from backends import activity
from backends.hf.model_shape import ModelShape, model_shape, shape_on_meta
from backends.protocol import Emit, OnMeta, Rank, RolloutEngine, WeightSpec
from backends.rollout.completions import Completions
from backends.rollout.refusals import check_arrival, check_complete, check_lengths, check_usable
from backends.rollout.stop_tokens import stop_tokens
from backends.rollout.uniform import request_seeds
from backends.sglang_rollout.client import ServerError, ServerSample, Unreachable, parse_sample, parse_scores
from backends.sglang_rollout.fingerprints import Fingerprints, rank_hashes
from backends.sglang_rollout.server import DTYPES, ENDING_S, Server
from backends.sglang_rollout.weights_folder import WeightsFolder
from specs.errors import ModelError, RlctlError, SyncError
from specs.schema.engines.sglang_table import SglangTable
from specs.wire.as_built import ModelBuilt
from specs.wire.batch import Batch
from specs.wire.role_config import RolloutConfig, Sampling

WEIGHTS, KV_CACHE = "weights", "kv_cache"
OLDEST = "0.5.23"  # what this was written and tested against; older ones differ in what a log-prob means


class SglangRolloutEngine(RolloutEngine):
    """Samples with the same prompt are one request: its reply comes when the last of them is done, and no request waits
    for another."""

    mixes_greedy = True

    def __init__(self, config: RolloutConfig, shape: ModelShape, server: Server, stops: frozenset[int]) -> None:
        assert isinstance(config.engine, SglangTable)
        self.config, self.table, self.shape, self.server = config, config.engine, shape, server
        self.stops = stops
        self._model_info: Mapping[str, Any] = server.client.get("/model_info")
        self._server_info: Mapping[str, Any] = server.client.get("/server_info")
        self._check_version()
        self._fingerprints = Fingerprints(self._hashes())
        self._folder: WeightsFolder | None = None  # while weights come in
        self._ready = False  # a complete set of weights has arrived
        self._awake = {WEIGHTS, KV_CACHE}

    @classmethod
    def build(cls, config: RolloutConfig, rank: Rank) -> SglangRolloutEngine:
        """Starts the server and waits for it. Raises ModelError where the model, the server or its version is unfit."""
        shape = model_shape(config.model)
        stops = stop_tokens(shape.end_tokens, config, ask_tokenizer=True)
        server = Server.start(config)
        try:
            return cls(config, shape, server, stops)
        except BaseException:
            server.stop()
            raise

    @classmethod
    def on_meta(cls, config: RolloutConfig, rank: Rank) -> OnMeta:
        """Without SGLang itself, which chooses its attention when it starts."""
        return shape_on_meta(config.model)

    def _check_version(self) -> None:
        version = str(self._server_info.get("version", "0"))
        if Version(version) < Version(OLDEST):
            raise ModelError(
                f"SGLang {version} is older than {OLDEST}, whose interface rlctl speaks",
                hint="install a newer one into the interpreter of [rollout] python",
            )

    def built(self) -> ModelBuilt:
        """Class, path, dtype and attention as the server reports them; sizes from the model's config."""
        dtypes = {name: ours for ours, name in DTYPES.items()}
        backend = str(self._server_info.get("attention_backend"))
        return ModelBuilt(
            model_class=str((self._model_info.get("architectures") or ["unknown"])[0]),
            path=str(self._model_info["model_path"]),
            parameters=self.shape.parameters,
            trainable_parameters=0,
            hidden_size=self.shape.hidden_size,
            layers=self.shape.layers,
            vocab_size=self.shape.vocab_size,
            dtype=dtypes.get(str(self._server_info["dtype"]), str(self._server_info["dtype"])),
            attn_implementation=backend,
            attn_function=f"sglang {self._server_info['version']}: {backend}",
            tied_embeddings=self.shape.tied_embeddings,
            weights_checksum="",
        )

    # ── weights ───────────────────────────────────────────────────────────────────────────────────

    def weight_specs(self) -> Sequence[WeightSpec]:
        return list(self.shape.weights.values())

    def import_weight(self, spec: WeightSpec, buffer: NDArray[np.uint8]) -> str:
        """Writes into the folder that the server will load; the checksum is of the bytes read back from there, because
        the server shows none of its own. What it made of them is checked in `finish_import`, and by the probe."""
        known, awake = self.shape.weights.get(spec.name), WEIGHTS in self._awake
        held = check_arrival(spec, len(buffer), known, self.config.model.path, awake=awake)
        self._ready = False
        if self._folder is None:
            self._folder = WeightsFolder(self.shape.weights, self.table.weights_dir)
        return self._folder.write(held, buffer)

    def finish_import(self) -> None:
        folder, arrived = self._folder, {} if self._folder is None else self._folder.checksums
        check_complete(self.shape.weights, arrived)
        assert folder is not None, "a model has weights"
        try:
            # `safetensors`, not `auto`: that one falls back to pickled files.
            request = {"model_path": str(folder.path), "load_format": "safetensors", "flush_cache": True}
            reply = self._post("/update_weights_from_disk", request)
            if not reply["success"]:
                raise SyncError(f"the SGLang server did not load the weights: {reply['message']}")
        finally:
            folder.delete()
            self._folder = None
        self._fingerprints.check(arrived, self._hashes())
        self._ready = True

    def _hashes(self) -> tuple[Mapping[str, str], ...]:
        return rank_hashes(self._post("/weights_checker", {"action": "checksum"}))

    # ── sampling ──────────────────────────────────────────────────────────────────────────────────

    def generate(self, prompts: Batch, sampling: Sampling, emit: Emit) -> Mapping[str, Any]:
        """Raises RlctlError for top_p or top_k: SGLang's log-probs leave them out."""
        check_usable("generate", (WEIGHTS, KV_CACHE), self._awake, self._ready)
        if not sampling.greedy and (sampling.top_p < 1.0 or sampling.top_k):
            raise RlctlError(
                f"top_p {sampling.top_p:g}, top_k {sampling.top_k}: the log-probs that SGLang returns leave both out",
                hint="sample with top_p = 1 and top_k = 0",
            )
        completions = Completions(prompts, emit)
        if not completions.queue:
            return {"generated_tokens": 0, "cached_tokens": 0}
        check_lengths(int(prompts["length_B"].max()), sampling, self.config.model.max_sequence_tokens)
        seeds = request_seeds(sampling.seed, prompts["id_B"], prompts["position_B"])
        cached = 0
        # As many requests in flight as the server has slots, so that it never waits for us and queues by itself.
        with ThreadPoolExecutor(min(len(completions.prefixes), self.table.max_sequences)) as pool:
            asked = {
                pool.submit(self._ask, completions, members, seeds, sampling): members
                for members in completions.prefixes
            }
            try:
                for done in as_completed(asked):
                    for index, sample in zip(asked[done], done.result(), strict=True):
                        completions.finish(index, sample.tokens, sample.logprobs, sample.finished)
                        activity.count("token", len(sample.tokens))
                        cached += sample.cached_tokens
                    completions.flush()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._abort()
                raise
        completions.close()
        return {"generated_tokens": completions.generated_tokens, "cached_tokens": cached}

    def _ask(
        self, completions: Completions, members: list[int], seeds: list[int], sampling: Sampling
    ) -> list[ServerSample]:
        """One request for all samples with one prompt; runs in a thread of its own."""
        body = {
            "input_ids": [completions.prompt_tokens[index].tolist() for index in members],
            "sampling_params": [
                self._sampling_params(completions.sampling_of(index, sampling), seeds[index]) for index in members
            ],
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        found = self._post("/generate", body, timeout_s=None)
        if not isinstance(found, list) or len(found) != len(members):
            raise ServerError(f"the SGLang server did not return {len(members)} samples: {found!r:.200}")
        return [parse_sample(one, sampling.max_response_tokens) for one in found]

    def _sampling_params(self, sampling: Sampling, seed: int) -> dict[str, Any]:
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_response_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "stop_token_ids": sorted(self.stops),
        }
        if self.table.deterministic and not sampling.greedy:
            params["sampling_seed"] = seed
        return params

    def score(self, batch: Batch, temperature: float) -> NDArray[np.float32]:
        """Each token as the next one of its prefix: what SGLang returns for tokens of a prompt knows no temperature.
        Needs a KV cache: a sleeping one gets memory for as long as it takes."""
        check_usable("score", (WEIGHTS,), self._awake, self._ready)
        logprob_T = np.zeros(batch.num_tokens, dtype=np.float32)
        prefixes, tokens, places = [], [], []
        for first, sequence in zip(batch.offsets[:-1], batch.sequences("tokens_T"), strict=True):
            for end in range(1, len(sequence)):
                prefixes.append(sequence[:end].tolist())
                tokens.append(int(sequence[end]))
                places.append(int(first) + end)
        if places:
            body = {
                "input_ids": prefixes,
                "sampling_params": {"max_new_tokens": 1, "temperature": temperature},
                "return_logprob": True,
                "token_ids_logprob": [[token] for token in tokens],
            }
            with self._cache_for_a_moment():
                logprob_T[places] = parse_scores(self._post("/generate", body, timeout_s=None), tokens)
        return logprob_T

    def _abort(self) -> None:
        """Have the server drop what it still writes; the error that led here counts, not this one's."""
        with suppress(RlctlError):
            self._post("/abort_request", {"rid": "", "abort_all": True})

    def _post(self, path: str, body: Mapping[str, Any], timeout_s: float | None = 600.0) -> Any:
        try:
            return self.server.client.post(path, body, timeout_s)
        except Unreachable:
            self.server.check_alive(ENDING_S)
            raise

    # ── sleep ─────────────────────────────────────────────────────────────────────────────────────

    def sleep(self, level: int) -> None:
        """Raises RlctlError at level 1 where the server was started without room for the weights on the host."""
        assert level in (1, 2), f"sleep level {level}"
        if level == 1 and not self.table.weights_backup:
            raise RlctlError(
                "the SGLang server cannot keep its weights on the host while it sleeps",
                hint="set rollout.engine.weights_backup = true, or sleep at level 2",
            )
        self._release(set(self._awake))
        if level == 2:
            self._ready = False
            self._drop_folder()

    def wake(self, tags: Sequence[str]) -> None:
        unknown = set(tags) - {WEIGHTS, KV_CACHE}
        assert not unknown, f"unknown tags {unknown}"
        if missing := sorted(set(tags) - self._awake):
            self._post("/resume_memory_occupation", {"tags": missing})
            self._awake |= set(missing)

    def _release(self, tags: set[str]) -> None:
        if tags:
            self._post("/release_memory_occupation", {"tags": sorted(tags)})
            self._awake -= tags

    @contextmanager
    def _cache_for_a_moment(self) -> Iterator[None]:
        asleep = KV_CACHE not in self._awake
        if asleep:
            self.wake([KV_CACHE])
        try:
            yield
        finally:
            if asleep:
                self._release({KV_CACHE})

    def close(self) -> None:
        self._drop_folder()
        self.server.stop()

    def _drop_folder(self) -> None:
        if self._folder is not None:
            self._folder.delete()
            self._folder = None

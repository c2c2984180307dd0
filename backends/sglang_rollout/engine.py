"""The `sglang` rollout engine: an SGLang server (0.5.23 or later) as a child process, one per replica.

What it says about each token is SGLang's own: log softmax(logits / temperature) of the sampled token, which is the
distribution sampled from as long as top_p and top_k are off; with them on it is not, so specs with them are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from packaging.version import Version

from backends import activity
from backends.completions import Completion, SampleRequest
from backends.hf.model_shape import ModelShape, model_shape, shape_on_meta
from backends.protocol import OnMeta, Rank, WeightSpec
from backends.rollout.stop_tokens import stop_tokens
from backends.rollout.synced_sampler import KV_CACHE, WEIGHTS, SyncedSampler
from backends.rollout.uniform import request_seeds
from backends.sglang_rollout.client import ServerError, Unreachable, parse_sample, parse_scores
from backends.sglang_rollout.fingerprints import Fingerprints, rank_hashes
from backends.sglang_rollout.server import DTYPES, ENDING_S, Server
from backends.sglang_rollout.weights_folder import WeightsFolder
from specs.errors import ModelError, RlctlError, SyncError
from specs.schema.engines.sglang_table import SglangTable
from specs.wire.as_built import ModelBuilt
from specs.wire.batch import Batch
from specs.wire.role_config import RolloutConfig, Sampling

OLDEST = "0.5.23"  # what this was written and tested against; older ones differ in what a log-prob means


class SglangRolloutEngine(SyncedSampler):
    """Samples with the same prompt are one request: its reply comes when the last of them is done, and no request waits
    for another."""

    def __init__(self, config: RolloutConfig, shape: ModelShape, server: Server, stops: frozenset[int]) -> None:
        assert isinstance(config.engine, SglangTable)
        super().__init__(config, shape.weights, config.model.path, shape.about.vocab_size)
        self.table, self.shape, self.server = config.engine, shape, server
        self.stops = stops
        self._model_info: Mapping[str, Any] = server.client.request("/model_info")
        self._server_info: Mapping[str, Any] = server.client.request("/server_info")
        self._check_version()
        self._fingerprints = Fingerprints(self._hashes())
        self._folder: WeightsFolder | None = None  # while weights come in
        self._pool: ThreadPoolExecutor | None = None
        self._asked: dict[Future[list[Mapping[str, Any]]], list[SampleRequest]] = {}

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
        backend, dtype = str(self._server_info.get("attention_backend")), str(self._server_info["dtype"])
        found = {
            "model_class": str((self._model_info.get("architectures") or ["unknown"])[0]),
            "path": str(self._model_info["model_path"]),
            "dtype": next((ours for ours, name in DTYPES.items() if name == dtype), dtype),
            "attn_implementation": backend,
            "attn_function": f"sglang {self._server_info['version']}: {backend}",
        }
        return self.shape.about.model_copy(update=found)

    # ── weights ───────────────────────────────────────────────────────────────────────────────────

    def import_weight(self, spec: WeightSpec, buffer: NDArray[np.uint8]) -> str:
        """Writes into the folder that the server will load; the checksum is of the bytes read back from there, because
        the server shows none of its own. What it made of them is checked in `finish_import`, and by the probe."""
        held = self._arrive(spec, len(buffer))
        if self._folder is None:
            self._folder = WeightsFolder(self.shape.weights, self.table.weights_dir)
        return self._folder.write(held, buffer)

    def _adopt(self) -> None:
        folder = self._folder
        assert folder is not None, "a model has weights"
        try:
            # `safetensors`, not `auto`: that one falls back to pickled files.
            request = {"model_path": str(folder.path), "load_format": "safetensors", "flush_cache": True}
            reply = self._post("/update_weights_from_disk", request)
            if not reply["success"]:
                raise SyncError(f"the SGLang server did not load the weights: {reply['message']}")
            hashes = self._hashes()  # of all ranks: the reply to a load is that of the first, and others may still read
        finally:
            self._drop_folder()
        self._fingerprints.check(folder.checksums, hashes)

    def _hashes(self) -> tuple[Mapping[str, str], ...]:
        return rank_hashes(self._post("/weights_checker", {"action": "checksum"}))

    # ── sampling ──────────────────────────────────────────────────────────────────────────────────

    def _begin(self, requests: Sequence[SampleRequest]) -> None:
        """Ask for the samples of each prefix in one request, as many at a time as the server has slots, so that it
        never waits for us and queues by itself."""
        prefixes: dict[int, list[SampleRequest]] = {}
        for request in requests:
            prefixes.setdefault(request.prefix, []).append(request)
        self._pool = self._pool or ThreadPoolExecutor(self.table.max_sequences)
        self._asked |= {self._pool.submit(self._ask, members): members for members in prefixes.values()}

    def _advance(self) -> Sequence[Completion]:
        """Wait for the next answer of the server."""
        found: list[Completion] = []
        for done in wait(self._asked, return_when=FIRST_COMPLETED).done:
            members = self._asked.pop(done)
            for request, sample in zip(members, done.result(), strict=True):
                if self._open.get(request.id) is request:  # else it was aborted, perhaps to be asked for again
                    completion, cached = parse_sample(sample, request)
                    self.counts["reused_tokens"] += cached
                    self.counts["prefilled_tokens"] += len(request.tokens) - cached
                    found.append(completion)
                    activity.count("token", len(completion.tokens))
        return found

    def _drop(self, ids: Collection[int]) -> None:
        """Have the server drop what it still writes; an error that led here counts, not this one's."""
        for asked in [asked for asked, members in self._asked.items() if all(one.id in ids for one in members)]:
            if asked.cancel():
                del self._asked[asked]
        with suppress(RlctlError):
            if self._open:
                for id_ in ids:
                    self._post("/abort_request", {"rid": f"{id_}.", "abort_all": False})
            else:
                self._asked.clear()
                self._post("/abort_request", {"rid": "", "abort_all": True})

    def _ask(self, members: Sequence[SampleRequest]) -> list[Mapping[str, Any]]:
        """Return the server's replies to requests with one prompt; runs in a thread of its own."""
        body = {
            "rid": [f"{request.id}." for request in members],  # aborts take all that begin with a name
            "input_ids": [request.tokens.tolist() for request in members],
            "sampling_params": [
                self._sampling_params(request.sampling, seed)
                for request, seed in zip(members, request_seeds(members), strict=True)
            ],
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        found = self._post("/generate", body, timeout_s=None)
        if not isinstance(found, list) or len(found) != len(members):
            raise ServerError(f"the SGLang server did not return {len(members)} samples: {found!r:.200}")
        return found

    def _sampling_params(self, sampling: Sampling, seed: int) -> dict[str, Any]:
        assert sampling.greedy or (sampling.top_p == 1.0 and not sampling.top_k), "specs/schema/engines/sglang_table.py"
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
        self._check_usable("score", (WEIGHTS,))
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

    def _post(self, path: str, body: Mapping[str, Any], timeout_s: float | None = 600.0) -> Any:
        try:
            return self.server.client.request(path, body, timeout_s)
        except Unreachable:
            self.server.check_alive(ENDING_S)
            raise

    # ── sleep ─────────────────────────────────────────────────────────────────────────────────────

    def _fall_asleep(self, level: int) -> None:
        """Raise RlctlError at level 1 where the server was started without room for the weights on the host."""
        if level == 1 and not self.table.weights_backup:
            raise RlctlError(
                "the SGLang server cannot keep its weights on the host while it sleeps",
                hint="set rollout.engine.weights_backup = true, or sleep at level 2",
            )
        if self._awake:
            self._release(self._awake)
        if level == 2:
            self._drop_folder()

    def _wake_up(self, tag: str) -> None:
        self._post("/resume_memory_occupation", {"tags": [tag]})

    def _release(self, tags: Collection[str]) -> None:
        self._post("/release_memory_occupation", {"tags": sorted(tags)})

    @contextmanager
    def _cache_for_a_moment(self) -> Iterator[None]:
        asleep = KV_CACHE not in self._awake
        if asleep:
            self._wake_up(KV_CACHE)
        try:
            yield
        finally:
            if asleep:
                self._release([KV_CACHE])

    def close(self) -> None:
        self._drop_folder()
        self.server.stop()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _drop_folder(self) -> None:
        if self._folder is not None:
            self._folder.delete()
            self._folder = None

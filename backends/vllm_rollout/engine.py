"""The `vllm` rollout engine: vLLM samples, in the role's own process and interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from backends import activity
from backends.completions import Completion, SampleRequest
from backends.hf.adapter_names import place_of
from backends.hf.model_shape import ModelShape, model_shape, shape_on_meta
from backends.memory import hand_back
from backends.protocol import Buffer, OnMeta, Rank, WeightSpec
from backends.replica_span import ReplicaSpan
from backends.rollout.stop_tokens import stop_tokens
from backends.rollout.synced_sampler import KV_CACHE, WEIGHTS, SyncedSampler
from backends.rollout.uniform import request_seeds
from backends.vllm_rollout.lent_bytes import Lender
from backends.vllm_rollout.read_back import checksum_of, word_sum_of
from backends.vllm_rollout.vllm_adapters import adapter_request
from backends.vllm_rollout.vllm_start import has_sleep_mode, hold_part, naming_dead_workers, start_vllm
from specs.errors import ModelError, SyncError
from specs.schema.engines.vllm_table import VllmTable
from specs.schema.spec import WeightForm
from specs.wire.as_built import ModelBuilt
from specs.wire.batch import Batch
from specs.wire.role_config import RolloutConfig, Sampling

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs

    from backends.vllm_rollout.worker import SummedPiece, WorkerModel


class VllmRolloutEngine(SyncedSampler):
    """Token ids in, token ids out. Weights come by `import_weight`, never from the model folder."""

    counts_progress = True
    progress_unit = "decode step"

    def __init__(self, config: RolloutConfig, table: VllmTable, model: ModelShape, llm: LLM) -> None:
        held = {**model.weights, **model.adapters}
        super().__init__(config, held, f"{model.about.model_class} here", model.about.vocab_size)
        self.table, self.model, self.llm = table, model, llm
        self.stops = stop_tokens(model.end_tokens, config, ask_tokenizer=True)
        self.request = None if config.lora is None else adapter_request()
        self._has_model = False  # apart from its adapters
        self._whole = table.tensor_parallel == 1  # one worker, in this process
        self._lender = Lender()
        self._names: dict[int, str] = {}  # what vLLM calls the open requests
        self._finished: list[RequestOutput] = []  # in the batch that was in flight when they were suspended
        self._released: set[str] = set()  # tags without memory, where vLLM has no sleep mode
        self._sleep_mode = has_sleep_mode()
        self._clear_adapters()

    @classmethod
    def build(cls, config: RolloutConfig, rank: Rank) -> VllmRolloutEngine:
        """Raises ModelError when vLLM is not there or cannot run the model so."""
        assert isinstance(config.engine, VllmTable)
        model = model_shape(config.model, config.lora)
        stop_tokens(model.end_tokens, config, ask_tokenizer=True)  # raises before the wait
        llm = start_vllm(config, model, rank.span)
        return cls(config, config.engine, model, llm)

    @classmethod
    def hold_part(cls, config: RolloutConfig, span: ReplicaSpan, address: str, port: int) -> None:
        hold_part(config, model_shape(config.model, config.lora), span, address, port)

    @classmethod
    def on_meta(cls, config: RolloutConfig, rank: Rank) -> OnMeta:
        """Without vLLM itself, which chooses its attention when it starts."""
        return shape_on_meta(config.model)

    def built(self) -> ModelBuilt:
        """Read back from vLLM's model; the attention is the backend that vLLM chose."""
        workers: list[WorkerModel] = self._call("rlctl_describe")
        first = workers[0]
        text = self.llm.llm_engine.model_config.hf_text_config
        return ModelBuilt(
            model_class=first.model_class,
            path=self.llm.llm_engine.model_config.model,
            parameters=first.parameters
            if self._whole
            else sum(int(np.prod(s.shape)) for s in self.model.weights.values()),
            trainable_parameters=0,
            hidden_size=text.hidden_size,
            layers=text.num_hidden_layers,
            vocab_size=text.vocab_size,
            dtype=",".join(first.dtypes),
            attn_implementation=",".join(first.attention),
            attn_function=",".join(first.attention_classes),
            tied_embeddings=first.tied_embeddings,
            mesh={"tensor": len(workers)} if len(workers) > 1 else {},
            weights_checksum="",
        )

    # ── weights ───────────────────────────────────────────────────────────────────────────────────

    def weight_form(self) -> WeightForm:
        if self.config.lora is None:
            return "merged"
        return "adapters" if self._has_model else "apart"

    def import_weight(self, spec: WeightSpec, buffer: NDArray[np.uint8]) -> str:
        self._take([(spec, buffer)])
        (sent,) = [buffer] if self._whole else self._lender.lend([buffer])
        parts = self._load("rlctl_load", spec.name, spec.dtype, spec.shape, sent)
        return checksum_of(spec, [piece for pieces in parts for piece in pieces])

    def import_from_device(self, weights: Sequence[tuple[WeightSpec, Buffer]]) -> list[str]:
        """All at once. Straight into vLLM's own tensors where one worker, in this process, holds the whole model; to
        several they go through host memory. Either way workers answer with sums."""
        self._take(weights)
        buffers = [buffer for _, buffer in weights]
        sent = buffers if self._whole else self._lender.lend([buffer.cpu().numpy() for buffer in buffers])
        named = [((spec.name, spec.dtype, spec.shape), one) for (spec, _), one in zip(weights, sent, strict=True)]
        workers: list[list[list[SummedPiece]]] = self._load("rlctl_load_and_sum", named)
        return [
            word_sum_of(spec, [piece for pieces in workers for piece in pieces[number]])
            for number, (spec, _) in enumerate(weights)
        ]

    def _take(self, weights: Sequence[tuple[WeightSpec, Buffer]]) -> None:
        for spec, buffer in weights:
            self._arrive(spec, len(buffer))
            self._has_model = self._has_model and spec.name in self.model.adapters  # a change of it must be whole

    def _load(self, method: str, *args: Any) -> list[Any]:
        try:
            return self._call(method, *args)
        except (ValueError, KeyError, AssertionError, RuntimeError) as error:
            raise SyncError(f"vLLM does not load what arrived: {error}") from error

    def _needed(self) -> Iterable[str]:
        return self.model.adapters if self._has_model else self._held

    def _adopt(self) -> None:
        self._call("rlctl_derive")
        self._forget_prefixes()
        self._has_model = True

    def _clear_adapters(self) -> None:
        if self.config.lora is not None:
            layers = sorted({place_of(name)[0] for name in self.model.adapters})
            self._call("rlctl_clear_adapters", self.config.lora.rank, tuple(layers))

    def _forget_prefixes(self) -> None:
        """Cached keys and values belong to the old weights."""
        manager = self._scheduler.kv_cache_manager
        if self._open:
            manager.evict_blocks(set(range(manager.block_pool.num_gpu_blocks)))
        elif not self.llm.llm_engine.reset_prefix_cache():
            raise SyncError("vLLM did not reset its prefix cache: requests are still running")

    # ── sampling ──────────────────────────────────────────────────────────────────────────────────

    def _begin(self, requests: Sequence[SampleRequest]) -> None:
        """Hand them to vLLM, those of a prefix next to each other: they share its cached blocks.

        Each has a seed of its own, made of `sampling.seed`, the sample's id and its position.
        """
        for request, seed in zip(requests, request_seeds(requests), strict=True):
            params = sampling_params(request.sampling, seed, self.stops)
            self._names[request.id] = self._ask(str(request.id), request.tokens, params)

    def _advance(self) -> Sequence[Completion]:
        self.counts["decode_steps"] += 1
        found, self._finished = [*self._finished, *self._step()], []
        for output in found:
            del self._names[int(output.request_id)]
            cached = output.num_cached_tokens or 0
            self.counts["reused_tokens"] += cached
            self.counts["prefilled_tokens"] += len(output.prompt_token_ids or ()) - cached
        return [completion_of(output) for output in found]

    def _drop(self, ids: Collection[int]) -> None:
        self._finished = [output for output in self._finished if int(output.request_id) not in ids]
        names = [self._names.pop(id_) for id_ in ids if id_ in self._names]
        self.llm.llm_engine.abort_request(names, internal=True)

    def suspend(self) -> Sequence[Completion]:
        if self.table.keep_cache:
            self._settle()
            return super().suspend()
        found = super().suspend()
        self._drain()
        return found

    def _keeps_cache(self) -> bool:
        return self.table.keep_cache

    def _settle(self) -> None:
        """Take in the batch in flight, which the weights of now draw, and begin no other."""
        from vllm.v1.core.sched.interface import PauseState

        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while self._core.batch_queue:
                self._finished += self._step()
        finally:
            self._scheduler.set_pause_state(PauseState.UNPAUSED)

    def _written(self) -> Iterator[Completion]:
        from vllm.v1.engine import FinishReason

        yield from map(completion_of, self._finished)
        states = self.llm.llm_engine.output_processor.request_states
        for name in self._names.values():
            if name in states:
                output = states[name].make_request_output([], None, FinishReason.ABORT, None)
                if output.outputs[0].token_ids:
                    yield completion_of(output, ends=("abort",))

    def score(self, batch: Batch, temperature: float) -> NDArray[np.float32]:
        """Through vLLM's log-probs of prompts, with the logits divided by `temperature` where they leave the model.
        Needs cache blocks: a sleeping cache gets memory for as long as it takes."""
        from vllm import SamplingParams

        self._check_usable("score", (WEIGHTS,))
        self._check_still("the rollout was asked for log-probs")
        logprob_T = np.zeros(batch.num_tokens, dtype=np.float32)
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, flat_logprobs=True, detokenize=False, ignore_eos=True
        )
        sequences = batch.sequences("tokens_T")
        requests = [(str(i), tokens, params) for i, tokens in enumerate(sequences) if len(tokens) > 1]
        with self._cache_for_a_moment(), self._open_ones_wait(batch), self._logits_over(temperature):
            outputs = self._run(requests)
        for output in outputs:
            index = int(output.request_id)
            start, tokens = batch.offsets[index], sequences[index].tolist()
            logprob_T[start + 1 : start + len(tokens)] = logprobs_of(output.prompt_logprobs, tokens[1:])
        return logprob_T

    def _ask(self, name: str, tokens: NDArray[np.int64], params: SamplingParams) -> str:
        """Add a request; return vLLM's own name for it."""
        from vllm.inputs import tokens_input

        prompt = tokens_input(tokens.tolist())
        return str(self.llm.llm_engine.add_request(name, prompt, params, lora_request=self.request))

    def _step(self) -> list[RequestOutput]:
        """Have vLLM take a step; return what finished in it."""
        with naming_dead_workers(self.llm):
            outputs = self.llm.llm_engine.step()
        activity.count("decode step")
        return [output for output in outputs if output.finished]

    def _run(self, requests: Sequence[tuple[str, NDArray[np.int64], SamplingParams]]) -> list[RequestOutput]:
        """Return what became of all requests. Leaves none behind, however it ends."""
        engine, waiting = self.llm.llm_engine, set[str]()
        found: list[RequestOutput] = []
        try:
            for request in requests:
                waiting.add(self._ask(*request))
            while len(found) < len(requests):
                found += self._step()
            waiting.clear()
        finally:
            if waiting:
                engine.abort_request(list(waiting), internal=True)
        return found

    @contextlib.contextmanager
    def _open_ones_wait(self, batch: Batch) -> Iterator[None]:
        """Keep the open requests, which are drawn at another temperature, out of vLLM's batches. They keep their places
        in the worker, and their blocks, unless `batch` finds too few beside them: then they are computed again."""
        scheduler = self._scheduler
        if self._open:
            groups = len(scheduler.kv_cache_config.kv_cache_groups)
            needed = groups * sum(length // scheduler.block_size + 2 for length in batch["length_B"].tolist())
            if scheduler.kv_cache_manager.block_pool.get_num_free_blocks() < needed:
                self.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        held = scheduler.running, scheduler.waiting, scheduler.max_num_active_reqs
        scheduler.running, scheduler.waiting = [], type(scheduler.waiting)()
        scheduler.max_num_active_reqs = scheduler.max_num_running_reqs - len(held[0])
        try:
            yield
        finally:
            scheduler.running, scheduler.waiting, scheduler.max_num_active_reqs = held

    @contextlib.contextmanager
    def _logits_over(self, temperature: float) -> Iterator[None]:
        self._call("rlctl_temperature", temperature)
        try:
            yield
        finally:
            self._call("rlctl_temperature", None)

    # ── sleep ─────────────────────────────────────────────────────────────────────────────────────

    def _fall_asleep(self, level: int) -> None:
        """Use vLLM's sleep mode, levels as its own. On the CPU, which has none, give the cache's memory back to the
        host, at level 2 the weights' too."""
        self._forget_prefixes()
        if self._sleep_mode:
            if self._awake:
                with naming_dead_workers(self.llm):
                    self.llm.sleep(level)
        else:
            self._release(KV_CACHE)
            if level == 2:
                self._release(WEIGHTS)
        if level == 2:
            self._has_model = False

    def _wake_up(self, tag: str) -> None:
        if self._sleep_mode:
            with naming_dead_workers(self.llm):
                self.llm.wake_up([tag])
        if tag in self._released:
            self._call("rlctl_reclaim", tag)
            self._released.discard(tag)
        if tag == WEIGHTS and not self._has_model:
            self._clear_adapters()

    @contextlib.contextmanager
    def _cache_for_a_moment(self) -> Iterator[None]:
        if KV_CACHE in self._awake:
            yield
            return
        self._wake_up(KV_CACHE)
        try:
            yield
        finally:
            self._drain()
            self._forget_prefixes()
            if self._sleep_mode:
                self.llm.sleep(level=0)
                self.llm.release_kv_cache_memory()
            else:
                self._release(KV_CACHE)

    def _drain(self) -> None:
        """Step until vLLM is idle, or it does not give its cache back: its scheduler tells the workers which requests
        are done with the next batch, and on a GPU it has one (empty) batch more in flight."""
        with naming_dead_workers(self.llm):
            while self._scheduler.has_requests() or self._core.batch_queue:
                self.llm.llm_engine.step()

    @property
    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core  # of the client in this process

    @property
    def _scheduler(self) -> Any:
        return self._core.scheduler

    def gpu_memory_GiB(self) -> tuple[float, float] | None:
        if self.config.model.device == "cpu":
            return None
        held, peak = zip(*self._call("rlctl_memory"), strict=True)
        return max(held), max(peak)

    def _release(self, tag: str) -> None:
        if tag not in self._released:
            self._call("rlctl_release", tag)
            self._released.add(tag)
            hand_back("cpu")

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        self._ready = False

    def _call(self, method: str, *args: Any) -> list[Any]:
        """A method of `WorkerExtension` on every worker."""
        with naming_dead_workers(self.llm):
            results: list[Any] = self.llm.collective_rpc(method, args=args)
        return results


def sampling_params(sampling: Sampling, seed: int, stops: Collection[int]) -> SamplingParams:
    """`sampling` as vLLM's parameters. `seed` has 63 bits: vLLM's are signed."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    choice: dict[str, Any] = {"temperature": 0.0}
    if not sampling.greedy:
        restricted = {"top_p": sampling.top_p, "top_k": sampling.top_k}
        choice = {"temperature": sampling.temperature, **restricted, "seed": seed}
    return SamplingParams(
        **choice,
        max_tokens=sampling.max_response_tokens,
        stop_token_ids=sorted(stops),
        ignore_eos=True,  # the stops have it
        logprobs=0,
        flat_logprobs=True,  # else an object per token
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion_of(output: RequestOutput, *, ends: Collection[str] = ("stop", "length")) -> Completion:
    """Return what vLLM wrote for a request. Raises ModelError where that ended otherwise."""
    written = output.outputs[0]
    if written.finish_reason not in ends:
        raise ModelError(f"vLLM ended a request by itself: {written.finish_reason}")
    tokens = list(written.token_ids)
    logprobs = logprobs_of(written.logprobs, tokens)
    finished = written.finish_reason == "stop"
    return Completion(int(output.request_id), np.array(tokens, dtype=np.int64), logprobs, finished)


def logprobs_of(flat: FlatLogprobs, tokens: list[int]) -> NDArray[np.float32]:
    """Log-prob of each of `tokens`, where vLLM was asked for no other tokens' (`logprobs=0`)."""
    if flat.token_ids != tokens:
        raise ModelError("vLLM's log-probs are of other tokens than its completion")
    return np.array(flat.logprobs, dtype=np.float32)

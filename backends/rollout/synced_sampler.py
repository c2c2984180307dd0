"""Base of the rollout engines: which weights have arrived, what is awake, and the refusals that follow from both."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from backends.completions import Completion, SampleRequest
from backends.protocol import RolloutEngine, WeightSpec
from specs.errors import BatchError, RlctlError, SyncError
from specs.wire.role_config import RolloutConfig

WEIGHTS, KV_CACHE = "weights", "kv_cache"


class SyncedSampler(RolloutEngine):
    """A rollout engine whose weights come by `import_weight`. Engines fill in the hooks `_adopt`, `_begin`, …"""

    def __init__(self, config: RolloutConfig, held: Mapping[str, WeightSpec], holder: str, vocab: int) -> None:
        """`held`: all weights that must arrive. `holder` names the model, of so many tokens, in messages."""
        self.config, self._held, self._holder, self._vocab = config, held, holder, vocab
        self._imported: set[str] = set()
        self._ready = False  # a complete set of weights has arrived
        self._awake = {WEIGHTS, KV_CACHE}
        self._open: dict[int, SampleRequest] = {}  # by id
        self._suspended = False  # those that are open wait for the next step, and weights may change
        self.counts: Counter[str] = Counter()  # what `counters` returns

    # ── weights ───────────────────────────────────────────────────────────────────────────────────

    def weight_specs(self) -> Sequence[WeightSpec]:
        return list(self._held.values())

    def _arrive(self, spec: WeightSpec, nbytes: int) -> WeightSpec:
        """Note that a weight arrives in `nbytes` bytes, and return it as the engine holds it. Raises SyncError where
        there is none of that name, where the weights are asleep, or where it does not fit."""
        self._check_still(f"weight {spec.name} arrived")
        held = self._held.get(spec.name)
        if held is None:
            raise SyncError(f"weight {spec.name} arrived, but {self._holder} has none of that name")
        if WEIGHTS not in self._awake:
            raise SyncError(
                f"weight {spec.name} arrived while the weights are asleep", hint='call wake(["weights"]) first'
            )
        if (spec.dtype, tuple(spec.shape), nbytes) != (held.dtype, held.shape, held.nbytes):
            raise SyncError(
                f"weight {spec.name} arrived as {spec.dtype} {list(spec.shape)}, {nbytes} bytes; "
                f"the rollout holds {held.dtype} {list(held.shape)}, {held.nbytes} bytes"
            )
        self._ready = False
        self._imported.add(spec.name)
        return held

    def finish_import(self) -> None:
        self._check_still("an import of weights ended")
        missing = [name for name in self._needed() if name not in self._imported]
        if missing:
            raise SyncError(f"{len(missing)} weights did not arrive, first {missing[0]}")
        self._imported.clear()
        self._adopt()
        self._ready = True

    def _needed(self) -> Iterable[str]:
        """Names of the weights that this import must bring."""
        return self._held

    def _adopt(self) -> None:
        """Begin to use the weights, which are all there."""

    # ── sampling ──────────────────────────────────────────────────────────────────────────────────

    @property
    def open_requests(self) -> int:
        return len(self._open)

    def add(self, requests: Sequence[SampleRequest]) -> None:
        self._check_usable("generate", (WEIGHTS, KV_CACHE))
        self._check(requests)
        if not requests:
            return
        new = {request.id: request for request in requests}
        self._open |= new
        try:
            self._begin(requests)
        except BaseException:
            self.abort(new)
            raise

    def step(self) -> Sequence[Completion]:
        if not self._open:
            return ()
        self._suspended = False
        try:
            found = self._advance()
        except BaseException:
            self.abort()
            raise
        for completion in found:
            del self._open[completion.id]
        return found

    def abort(self, ids: Collection[int] | None = None) -> None:
        dropped = [id_ for id_ in (list(self._open) if ids is None else ids) if id_ in self._open]
        for id_ in dropped:
            del self._open[id_]
        if dropped:
            self._drop(dropped)

    def suspend(self) -> Sequence[Completion]:
        found = [*self._written()] if self._open else []
        if self._keeps_cache():
            self._suspended = True
        else:
            self.abort()
        return found

    def _keeps_cache(self) -> bool:
        """Return whether open requests keep their keys and values when weights change."""
        return False

    def _written(self) -> Iterable[Completion]:
        """Return what has been written of the open requests that have a token."""
        raise NotImplementedError(f"{type(self).__name__} does not tell what it has written before the end")

    def counters(self) -> Mapping[str, int]:
        return dict(self.counts)

    def _check(self, requests: Sequence[SampleRequest]) -> None:
        """Raise BatchError where a request cannot be taken in."""
        limit, firsts = self.config.model.max_sequence_tokens, dict[int, SampleRequest]()
        names = Counter(request.id for request in requests)
        for request in requests:
            prompt, most = len(request.tokens), request.sampling.max_response_tokens
            first = firsts.setdefault(request.prefix, request)
            if request.id in self._open or names[request.id] > 1:
                raise BatchError(f"sample {request.id} is being drawn already")
            if prompt == 0:
                raise BatchError(f"prompt {request.id} is empty; a completion needs a token to start from")
            if (last := int(request.tokens.max())) >= self._vocab:
                message = f"prompt {request.id} has token {last}, and the model knows those below {self._vocab}"
                raise BatchError(message, hint="its tokenizer has more: make its embeddings larger, or drop such rows")
            if prompt + most > limit:
                message = f"a prompt of {prompt} tokens with a completion of up to {most} makes {prompt + most} tokens"
                raise BatchError(f"{message}; the rollout was built for {limit}")
            if request.position < 0:
                raise BatchError("position_B is negative; it counts the tokens that a sample has drawn so far")
            if not np.array_equal(first.tokens, request.tokens):
                raise BatchError(
                    f"samples {first.id} and {request.id} have prefix_B {request.prefix} but different prompts; "
                    "a prefix needs equal prompts"
                )

    @abstractmethod
    def _begin(self, requests: Sequence[SampleRequest]) -> None:
        """Take in requests that are in order, of which there is at least one."""

    @abstractmethod
    def _advance(self) -> Sequence[Completion]:
        """Go on with the open requests, of which there is at least one; return those that have finished."""

    @abstractmethod
    def _drop(self, ids: Collection[int]) -> None:
        """Forget requests that are not among the open ones any more."""

    def _check_still(self, what: str) -> None:
        if not self._suspended:
            self._check_idle(what)

    def _check_idle(self, what: str) -> None:
        if self._open:
            raise SyncError(
                f"{what} while {len(self._open)} samples are being drawn", hint="finish or abort their requests first"
            )

    def _check_usable(self, verb: str, needs: Iterable[str]) -> None:
        """Raise RlctlError where a tag that `verb` needs is asleep, SyncError where the weights are not all there."""
        for tag in needs:
            if tag not in self._awake:
                raise RlctlError(f"the rollout cannot {verb}: its {tag} are asleep", hint=f'call wake(["{tag}"]) first')
        if not self._ready:
            raise SyncError(
                f"the rollout cannot {verb}: it holds no complete set of weights", hint="sync the weights first"
            )

    # ── sleep ─────────────────────────────────────────────────────────────────────────────────────

    def sleep(self, level: int) -> None:
        assert level in (1, 2), f"sleep level {level}"
        self._check_idle("the rollout was put to sleep")
        self._fall_asleep(level)
        if level == 2:
            self._ready = False
            self._imported.clear()
        self._awake.clear()

    def wake(self, tags: Sequence[str]) -> None:
        unknown = set(tags) - {WEIGHTS, KV_CACHE}
        assert not unknown, f"unknown tags {unknown}"
        for tag in (WEIGHTS, KV_CACHE):
            if tag in tags and tag not in self._awake:
                self._wake_up(tag)
                self._awake.add(tag)

    @abstractmethod
    def _fall_asleep(self, level: int) -> None:
        """Free what is awake, as `sleep` promises."""

    def _wake_up(self, tag: str) -> None:
        """Bring back the memory of a tag that is asleep."""

"""Base of the rollout engines: which weights have arrived, what is awake, and the refusals that follow from both."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from backends.protocol import Emit, RolloutEngine, WeightSpec
from backends.rollout.completions import Completions
from specs.errors import BatchError, RlctlError, SyncError
from specs.wire.batch import Batch
from specs.wire.role_config import RolloutConfig, Sampling

WEIGHTS, KV_CACHE = "weights", "kv_cache"


class SyncedSampler(RolloutEngine):
    """A rollout engine whose weights come by `import_weight`. Engines fill in the hooks `_adopt`, `_complete`, …"""

    mixes_greedy = True

    def __init__(self, config: RolloutConfig, held: Mapping[str, WeightSpec], holder: str) -> None:
        """`held`: all weights that must arrive. `holder` names the model in messages."""
        self.config, self._held, self._holder = config, held, holder
        self._imported: set[str] = set()
        self._ready = False  # a complete set of weights has arrived
        self._awake = {WEIGHTS, KV_CACHE}

    # ── weights ───────────────────────────────────────────────────────────────────────────────────

    def weight_specs(self) -> Sequence[WeightSpec]:
        return list(self._held.values())

    def _arrive(self, spec: WeightSpec, nbytes: int) -> WeightSpec:
        """Note that a weight arrives in `nbytes` bytes, and return it as the engine holds it. Raises SyncError where
        there is none of that name, where the weights are asleep, or where it does not fit."""
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

    def generate(self, prompts: Batch, sampling: Sampling, emit: Emit) -> Mapping[str, Any]:
        self._check_usable("generate", (WEIGHTS, KV_CACHE))
        completions = Completions(prompts, emit)
        counters: Mapping[str, int] = {}
        if completions.queue:
            longest, limit = int(prompts["length_B"].max()), self.config.model.max_sequence_tokens
            if (total := longest + sampling.max_response_tokens) > limit:
                raise BatchError(
                    f"a prompt of {longest} tokens with a completion of up to {sampling.max_response_tokens} makes "
                    f"{total} tokens; the rollout was built for {limit}"
                )
            counters = self._complete(completions, sampling)
        completions.close()
        return {"generated_tokens": completions.generated_tokens, **counters}

    @abstractmethod
    def _complete(self, completions: Completions, sampling: Sampling) -> Mapping[str, int]:
        """Finish every sample of `completions`, of which there is at least one; return counters."""

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

"""Keep the open requests of a rollout rank, and which weights drew which of their tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from backends.protocol import RolloutEngine
from backends.sample_requests import Completion, SampleRequest
from specs.wire.batch import Batch

NO_VERSION = -1  # of a token that was not sampled here


@dataclass(frozen=True)
class Stretch:
    """Tokens that the same weights drew."""

    completion: Completion
    version: int


class OpenRequests:
    """Requests that an engine is to complete. While it is suspended, its weights may change; then each continues behind
    what it has written, all of which is computed with the new weights."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._open: dict[int, SampleRequest] = {}
        self._written: defaultdict[int, list[Stretch]] = defaultdict(list)  # with earlier weights
        self._drawn_by: dict[int, NDArray[np.int64]] = {}  # by completion: versions of the weights of each token
        self.suspended = False

    def __len__(self) -> int:
        return len(self._open)

    def add(self, requests: Sequence[SampleRequest]) -> None:
        """Begin requests, or note them while the engine is suspended."""
        if not self.suspended:
            self._engine.add(requests)
        self._open |= {request.id: request for request in requests}

    def step(self, version: int) -> list[Completion]:
        """Draw a token or more of each with the weights of this version; return what has finished, from its first token
        on. An error leaves none open."""
        try:
            found = self._engine.step()
        except BaseException:
            for kept in (self._open, self._written, self._drawn_by):
                kept.clear()
            raise
        return [self._whole(Stretch(completion, version)) for completion in found]

    def suspend(self, version: int) -> None:
        """Break off what this version draws, if anything is open."""
        if self._open and not self.suspended:
            for completion in self._engine.suspend():
                self._written[completion.id].append(Stretch(completion, version))
            self.suspended = True

    def resume(self) -> None:
        """Go on with what was broken off."""
        if self.suspended:
            self.suspended = False
            self._engine.add([*self._continued()])

    def versions_of(self, batch: Batch) -> Batch:
        """Return completions with the versions of the weights that drew each token, and of each sample the oldest."""
        drawn = [self._drawn_by.pop(id_) for id_ in batch["id_B"].tolist()]
        version_T = np.full(batch.num_tokens, NO_VERSION)
        version_T[batch["loss_mask_T"] != 0] = np.concatenate(drawn)
        return batch.with_columns(version_T=version_T, version_B=np.array([each.min() for each in drawn]))

    def _whole(self, last: Stretch) -> Completion:
        found = last.completion
        del self._open[found.id]
        stretches = [*self._written.pop(found.id, ()), last]
        each = [(stretch.completion, np.full(len(stretch.completion.tokens), stretch.version)) for stretch in stretches]
        self._drawn_by[found.id] = np.concatenate([version_N for _, version_N in each])
        if len(each) == 1:
            return found
        tokens = np.concatenate([one.tokens for one, _ in each])
        return Completion(found.id, tokens, np.concatenate([one.logprobs for one, _ in each]), found.finished)

    def _continued(self) -> Iterable[SampleRequest]:
        """Yield the open requests behind what is written of them, in the order in which they came. Those that still
        have equal tokens share their computation."""
        numbers: dict[bytes, int] = {}
        for id_, request in self._open.items():
            written = [stretch.completion.tokens for stretch in self._written.get(id_, ())]
            count = sum(map(len, written))
            tokens = np.concatenate([request.tokens, *written])
            most = request.sampling.max_response_tokens - count
            yield replace(
                request,
                tokens=tokens,
                sampling=request.sampling.model_copy(update={"max_response_tokens": most}),
                position=request.position + count,
                prefix=numbers.setdefault(tokens.tobytes(), len(numbers)),
            )

"""Keep the open requests of a rollout rank, and which weights drew which of their tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from backends.completions import Completion, SampleRequest
from backends.protocol import RolloutEngine
from specs.wire.batch import Batch

NO_VERSION = -1  # of a token that was not sampled here


class OpenRequests:
    """Requests that an engine is to complete. While it is suspended, its weights may change; then each continues after
    what it has written, with the keys and values of the older weights where the engine keeps them."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._open: dict[int, SampleRequest] = {}
        self._written: dict[int, Completion] = {}  # what the engine has handed over of those that are open
        self._versions: defaultdict[int, list[NDArray[np.int64]]] = defaultdict(list)  # of the tokens so far
        self._drawn_by: dict[int, NDArray[np.int64]] = {}  # by completion: versions of the weights of each token
        self._came_late: list[Sequence[SampleRequest]] = []  # while it was suspended, call by call
        self.suspended = False

    def __len__(self) -> int:
        return len(self._open)

    def add(self, requests: Sequence[SampleRequest]) -> None:
        """Begin requests, or note them while the engine is suspended."""
        if self.suspended:
            self._came_late.append(requests)
        else:
            self._engine.add(requests)
        self._open |= {request.id: request for request in requests}

    def step(self, version: int) -> list[Completion]:
        """Draw a token or more of each with the weights of this version; return what has finished, from its first token
        on. An error leaves none open."""
        try:
            found = self._engine.step()
        except BaseException:
            for kept in (self._open, self._written, self._versions, self._drawn_by):
                kept.clear()
            raise
        return [self._whole(completion, version) for completion in found]

    def suspend(self, version: int) -> None:
        """Break off what this version draws. What comes from now on waits, also where nothing is open."""
        for completion in self._engine.suspend() if self._open and not self.suspended else ():
            whole = self._so_far(completion, version)
            if not self._engine.open_requests:
                self._written[completion.id] = whole
        self.suspended = True

    def resume(self) -> None:
        """Go on with what was broken off, and begin what came meanwhile."""
        if self.suspended and self._open:
            for requests in self._came_late if self._engine.open_requests else [[*self._continued()]]:
                self._engine.add(requests)
        self.suspended, self._came_late = False, []

    def versions_of(self, batch: Batch) -> Batch:
        """Return completions with the versions of the weights that drew each token, and of each sample the oldest."""
        drawn = [self._drawn_by.pop(id_) for id_ in batch["id_B"].tolist()]
        version_T = np.full(batch.num_tokens, NO_VERSION)
        version_T[batch["loss_mask_T"] != 0] = np.concatenate(drawn)
        return batch.with_columns(version_T=version_T, version_B=np.array([each.min() for each in drawn]))

    def _so_far(self, found: Completion, version: int) -> Completion:
        """Return all that was written, from its first token on; what is new of it was drawn by this version."""
        if (earlier := self._written.pop(found.id, None)) is not None:
            tokens = np.concatenate([earlier.tokens, found.tokens])
            found = replace(found, tokens=tokens, logprobs=np.concatenate([earlier.logprobs, found.logprobs]))
        versions = self._versions[found.id]
        versions.append(np.full(len(found.tokens) - sum(map(len, versions)), version))
        return found

    def _whole(self, found: Completion, version: int) -> Completion:
        whole = self._so_far(found, version)
        del self._open[found.id]
        self._drawn_by[found.id] = np.concatenate(self._versions.pop(found.id))
        return whole

    def _continued(self) -> Iterable[SampleRequest]:
        """Yield the open requests after what is written of them, in the order in which they came. Those that still
        have equal tokens share their computation."""
        numbers: dict[bytes, int] = {}
        for id_, request in self._open.items():
            written = [self._written[id_].tokens] if id_ in self._written else []
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

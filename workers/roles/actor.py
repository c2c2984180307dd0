"""The actor: the model that learns, and the source of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backends.protocol import Rank
from specs.wire import bodies
from workers.roles import handlers_of
from workers.roles.learner import Learner
from workers.serve import Emit, Handlers, Reply, Request
from workers.transports.base import Readers
from workers.transports.ends import Exporter


class Actor(Learner):
    """A rank of the actor."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self._exporter: Exporter | None = None

    @property
    def exporter(self) -> Exporter:
        assert self._exporter is not None, "export_begin comes first"
        return self._exporter

    def proof(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Mapping[str, Any]:
        """Greedy completions."""
        completions = self.engine.greedy(prompts, new_tokens)
        return {"answers": [{"tokens": written.tokens, "margins": written.margins} for written in completions]}

    def probe(self, call: Request[bodies.Nothing], emit: Emit) -> Reply:
        batch = call.batch
        return {}, {"logprob_T": self.engine.forward(batch.with_columns(loss_mask_T=batch.predicted_T))}

    def export_begin(self, call: Request[bodies.ExportBegin], emit: Emit) -> Reply:
        body = call.body
        if self._exporter is None:
            self._exporter = Exporter(self.engine, self.rank.rank, body.transport, body.options)
        readers = Readers(body.hosts, body.renew, body.held)
        return self.exporter.begin(body.dtype, body.bucket_bytes, readers, body.form), {}

    def export_bucket(self, call: Request[bodies.ExportBucket], emit: Emit) -> Reply:
        return self.exporter.write(call.body.bucket), {}

    def export_end(self, call: Request[bodies.ExportEnd], emit: Emit) -> Reply:
        """End a pass: all readers are done; with `broken_off`, one is gone, and the next begins with all."""
        if not call.body.broken_off:
            self.exporter.end()
        elif self._exporter is not None:
            self._exporter.break_off()
        return {}, {}

    def close(self, call: Request[bodies.Nothing], emit: Emit) -> Reply:
        if self._exporter is not None:
            self._exporter.close()
        return super().close(call, emit)


def handlers(rank: Rank) -> Handlers:
    return handlers_of(Actor(rank))

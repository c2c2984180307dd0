"""The actor: the model that learns, and the source of the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from backends import memory
from backends.protocol import LossScale, Rank
from specs.errors import RlctlError
from specs.wire import bodies
from specs.wire.messages import Verb
from workers.roles.trainer import Trainer
from workers.saved_files import FileMark, settle
from workers.serve import Emit, Handler, Reply, Request, TypedHandler, typed
from workers.transports.ends import Exporter

PROOF_FILE = "greedy_proof.json"


class Actor(Trainer):
    """A rank of the actor."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self._exporter: Exporter | None = None

    @property
    def exporter(self) -> Exporter:
        assert self._exporter is not None, "export_begin comes first"
        return self._exporter

    def update(self, call: Request[bodies.Update], emit: Emit) -> Reply:
        """Loss and gradients of this rank's share of the mini-batch; weights are not changed yet."""
        self.describe(call)
        scale = LossScale(**call.body.scale.model_dump())
        return {"sums": dict(self.engine.forward_backward(call.batch, call.body.loss, scale))}, {}

    def step(self, call: Request[bodies.Nothing], emit: Emit) -> Reply:
        """The optimizer step, from the gradients of `update`."""
        step = self.engine.optim_step()
        return {
            "grad_norm": step.grad_norm,
            "lr": step.lr,
            "skipped": step.skipped,
            "peak_GiB": memory.peak_GiB(self.device),
            "used_GiB": self.used_GiB,
        }, {}

    def probe(self, call: Request[bodies.Nothing], emit: Emit) -> Reply:
        batch = call.batch
        mask_T = np.ones(batch.num_tokens, dtype=np.uint8)
        mask_T[batch.offsets[:-1]] = 0  # no token precedes the first
        return {}, {"logprob_T": self.engine.forward(batch.with_columns(loss_mask_T=mask_T))}

    def export_begin(self, call: Request[bodies.ExportBegin], emit: Emit) -> Reply:
        body = call.body
        if self._exporter is None:
            self._exporter = Exporter(self.engine, self.rank.rank, body.transport, body.options)
        return self.exporter.begin(body.dtype, body.bucket_bytes, body.readers, body.renew, body.form), {}

    def export_bucket(self, call: Request[bodies.ExportBucket], emit: Emit) -> Reply:
        return self.exporter.write(call.body.bucket), {}

    def export_end(self, call: Request[bodies.ExportEnd], emit: Emit) -> Reply:
        """End a pass: all readers are done; with `broken_off`, one is gone, and the next pass begins with all anew."""
        if not call.body.broken_off:
            self.exporter.end()
        elif self._exporter is not None:
            self._exporter.break_off()
        return {}, {}

    def save(self, call: Request[bodies.Save], emit: Emit) -> Reply:
        """Save into `folder`, with the greedy completions that an export must reproduce; returns marks of the files."""
        folder = Path(call.body.folder)
        if not folder.is_dir():
            hint = "the run directory must lie on a file system that all hosts of the run share"
            raise RlctlError(f"cannot write the checkpoint: this host has no {folder}", hint=hint)
        try:
            return {"files": self._write(folder, call.body)}, {}
        except (OSError, SafetensorError) as error:
            hint = "older checkpoints are whole: free some space if the disk is full, then use --resume"
            raise RlctlError(f"cannot write the checkpoint {folder}: {error}", hint=hint) from error

    def _write(self, folder: Path, asked: bodies.Save) -> dict[str, FileMark]:
        """The engine's files and the proof; their marks."""
        written = [*self.engine.save(folder)]
        completions = self.engine.greedy(asked.proof_prompts, asked.proof_tokens)
        if self.rank.rank == 0:
            proof = {
                "prompts": asked.proof_prompts,
                "answers": [{"tokens": written.tokens, "margins": written.margins} for written in completions],
            }
            (folder / PROOF_FILE).write_text(json.dumps(proof))
            written.append(folder / PROOF_FILE)
        return settle(folder, written)

    def load(self, call: Request[bodies.Load], emit: Emit) -> Reply:
        self.engine.load(Path(call.body.folder))
        return {}, {}

    def close(self, call: Request[bodies.Nothing], emit: Emit) -> Reply:
        if self._exporter is not None:
            self._exporter.close()
        return super().close(call, emit)

    def handlers(self) -> Mapping[Verb, Handler]:
        verbs: Mapping[Verb, TypedHandler] = {
            Verb.UPDATE: self.update,
            Verb.STEP: self.step,
            Verb.PROBE: self.probe,
            Verb.EXPORT_BEGIN: self.export_begin,
            Verb.EXPORT_BUCKET: self.export_bucket,
            Verb.EXPORT_END: self.export_end,
            Verb.SAVE: self.save,
            Verb.LOAD: self.load,
        }
        return {**super().handlers(), **typed(verbs, {Verb.PROBE: bodies.Nothing})}


def handlers(rank: Rank) -> Mapping[Verb, Handler]:
    return Actor(rank).handlers()

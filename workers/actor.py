"""The actor: the model that learns, and the source of the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from backends import memory
from backends.protocol import LossScale, Rank
from specs.algorithms import Grpo
from specs.errors import RlctlError
from specs.messages import Message, Verb
from workers.saved_files import settle
from workers.serve import Emit, Handler, Reply
from workers.trainer import Trainer
from workers.weights import Exporter

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

    def update(self, message: Message, emit: Emit) -> Reply:
        """Loss and gradients of this rank's share of the mini-batch; nothing is learned yet."""
        scale = LossScale(**message.body["scale"])
        algorithm = Grpo.model_validate(message.body["algorithm"])
        return {"sums": dict(self.engine.forward_backward(message.batch, algorithm, scale))}, {}

    def step(self, message: Message, emit: Emit) -> Reply:
        """The optimizer step with what `update` left."""
        step = self.engine.optim_step()
        return {
            "grad_norm": step.grad_norm,
            "lr": step.lr,
            "skipped": step.skipped,
            "peak_GiB": memory.peak_GiB(self.device),
            "used_GiB": self.used_GiB,
        }, {}

    def probe(self, message: Message, emit: Emit) -> Reply:
        batch = message.batch
        mask_T = np.ones(batch.num_tokens, dtype=np.uint8)
        mask_T[batch.offsets[:-1]] = 0  # nothing comes before a first token
        return {}, {"logprob_T": self.engine.forward(batch.with_columns(loss_mask_T=mask_T))}

    def export_begin(self, message: Message, emit: Emit) -> Reply:
        body = message.body
        if self._exporter is None:
            self._exporter = Exporter(self.engine, self.rank.rank, body["road"], body["options"])
        size, readers = int(body["bucket_bytes"]), int(body["readers"])
        return self.exporter.begin(body["dtype"], size, readers, bool(body["renew"]), body["form"]), {}

    def export_bucket(self, message: Message, emit: Emit) -> Reply:
        return self.exporter.write(int(message.body["bucket"])), {}

    def export_end(self, message: Message, emit: Emit) -> Reply:
        """Everything has arrived; with `broken_off`, it will not, and the next pass meets every reader anew."""
        if not message.body.get("broken_off"):
            self.exporter.end()
        elif self._exporter is not None:
            self._exporter.break_off()
        return {}, {}

    def save(self, message: Message, emit: Emit) -> Reply:
        """Save into `folder`, with the greedy answers that an export must repeat; answers with marks of the files."""
        folder = Path(message.body["folder"])
        if not folder.is_dir():
            hint = "the run directory must lie on a file system that all hosts of the run share"
            raise RlctlError(f"cannot write the checkpoint: this host has no {folder}", hint=hint)
        try:
            written = [*self.engine.save(folder)]
        except (OSError, SafetensorError) as error:
            hint = "older checkpoints are whole: free some space if the disk is full, then use --resume"
            raise RlctlError(f"cannot write the checkpoint {folder}: {error}", hint=hint) from error
        answers = self.engine.greedy(message.body["proof_prompts"], int(message.body["proof_tokens"]))
        if self.rank.rank == 0:
            proof = {
                "prompts": message.body["proof_prompts"],
                "answers": [{"tokens": answer.tokens, "margins": answer.margins} for answer in answers],
            }
            (folder / PROOF_FILE).write_text(json.dumps(proof))
            written.append(folder / PROOF_FILE)
        return {"files": settle(folder, written)}, {}

    def load(self, message: Message, emit: Emit) -> Reply:
        self.engine.load(Path(message.body["folder"]))
        return {}, {}

    def close(self, message: Message, emit: Emit) -> Reply:
        if self._exporter is not None:
            self._exporter.close()
        return super().close(message, emit)

    def handlers(self) -> Mapping[Verb, Handler]:
        return {
            **super().handlers(),
            Verb.UPDATE: self.update,
            Verb.STEP: self.step,
            Verb.PROBE: self.probe,
            Verb.EXPORT_BEGIN: self.export_begin,
            Verb.EXPORT_BUCKET: self.export_bucket,
            Verb.EXPORT_END: self.export_end,
            Verb.SAVE: self.save,
            Verb.LOAD: self.load,
        }


def handlers(rank: Rank) -> Mapping[Verb, Handler]:
    return Actor(rank).handlers()

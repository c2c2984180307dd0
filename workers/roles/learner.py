"""Base of the roles whose model learns: loss and gradients, optimizer steps, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError

from backends import memory
from backends.protocol import LossScale
from specs.errors import RlctlError
from specs.schema.roles import PROOF_FILES, ROLES, RoleName
from specs.wire import bodies
from specs.wire.messages import Verb
from workers.roles.trainer import Trainer
from workers.saved_files import FileMark, settle
from workers.serve import Emit, Handler, Reply, Request, TypedHandler, typed


class Learner(Trainer):
    """A rank whose model learns."""

    role: ClassVar[RoleName]

    def proof(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Mapping[str, Any]:
        """What the model makes of these prompts now. All ranks compute it together."""
        raise NotImplementedError

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

    def save(self, call: Request[bodies.Save], emit: Emit) -> Reply:
        """Save into `folder`, with the proof that an export must repeat; returns marks of the files."""
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
        proof = self.proof(asked.proof_prompts, asked.proof_tokens)
        if self.rank.rank == 0:
            path = folder / PROOF_FILES[ROLES[self.role].head]
            path.write_text(json.dumps({"prompts": asked.proof_prompts, **proof}))
            written.append(path)
        return settle(folder, written)

    def load(self, call: Request[bodies.Load], emit: Emit) -> Reply:
        self.engine.load(Path(call.body.folder))
        return {}, {}

    def handlers(self) -> Mapping[Verb, Handler]:
        verbs: Mapping[Verb, TypedHandler] = {
            Verb.UPDATE: self.update,
            Verb.STEP: self.step,
            Verb.SAVE: self.save,
            Verb.LOAD: self.load,
        }
        return {**super().handlers(), **typed(verbs, {})}

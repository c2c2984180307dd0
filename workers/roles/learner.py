"""Base of the roles whose model learns: loss and gradients, optimizer steps, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from backends import memory
from specs.errors import PeerGone, RlctlError
from specs.schema.roles import PROOF_FILES, ROLES
from specs.wire import bodies
from workers.roles.trainer import Trainer
from workers.saved_files import settle
from workers.serve import Emit, Reply, Request


class Learner(Trainer):
    """A rank whose model learns."""

    def proof(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Mapping[str, Any]:
        """Return what the model completes these prompts with now. All ranks compute it together."""
        raise NotImplementedError

    def update(self, call: Request[bodies.Update], emit: Emit) -> Reply:
        """Loss and gradients of this rank's share of the mini-batch; weights are not changed yet."""
        self.describe(call)
        return {"sums": dict(self.engine.forward_backward(call.batch, call.body.loss, call.body.scale))}, {}

    def evaluate(self, call: Request[bodies.Update], emit: Emit) -> Reply:
        """Loss of this rank's share of a batch, without gradients."""
        self.describe(call)
        return {"sums": dict(self.engine.evaluate(call.batch, call.body.loss, call.body.scale))}, {}

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
        """Save the state into `folder`, or the proof that an export of it must repeat; return marks of the files. What
        fails in a proof is an answer: the state is saved by then."""
        folder = Path(call.body.folder)
        if not folder.is_dir():
            hint = "the run directory must lie on a file system that all hosts of the run share"
            raise RlctlError(f"cannot write the checkpoint: this host has no {folder}", hint=hint)
        try:
            if call.body.proof_prompts:
                return self._prove(folder, call.body), {}
            return {"files": settle(folder, [*self.engine.save(folder)])}, {}
        except (OSError, SafetensorError) as error:
            hint = "older checkpoints are whole: free some space if the disk is full, then use --resume"
            raise RlctlError(f"cannot write the checkpoint {folder}: {error}", hint=hint) from error

    def _prove(self, folder: Path, asked: bodies.Save) -> dict[str, Any]:
        try:
            proof = self.proof(asked.proof_prompts, asked.proof_tokens)
        except PeerGone:
            raise
        except Exception as error:  # of the model's own code: any
            return {"files": {}, "unproven": f"{type(error).__name__}: {error}"}
        try:
            text = json.dumps({"prompts": asked.proof_prompts, **proof}, allow_nan=False)
        except ValueError:
            return {"files": {}, "unproven": "its weights give NaN or infinity"}
        if self.rank.rank != 0:
            return {"files": {}}
        path = folder / PROOF_FILES[ROLES[self.config.role].head]
        path.write_text(text)
        return {"files": settle(folder, [path])}

    def load(self, call: Request[bodies.Load], emit: Emit) -> Reply:
        self.engine.load(Path(call.body.folder))
        if call.body.schedule_steps is not None:
            self.engine.start_schedule_at(call.body.schedule_steps)
        return {}, {}

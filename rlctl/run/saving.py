"""Save and resume a run: between the roles and the files of `rlctl/run/checkpoints.py`."""

from __future__ import annotations

import platform
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rlctl import __version__
from rlctl.loop.driver import Driver
from rlctl.models.paths import lineage
from rlctl.processes.groups import Groups
from rlctl.processes.placement import Plan
from rlctl.processes.role_configs import model_paths
from rlctl.run import checkpoints
from rlctl.run.lineage import Fork, check_same_base, saved_roles
from rlctl.run.resume import about_model, check_fits
from rlctl.run.run_dir import RunDir
from rlctl.show.metrics_file import read_metrics
from rlctl.show.progress import Progress
from specs.errors import CheckpointError
from specs.json_file import read_object
from specs.schema.roles import RoleName
from specs.wire import bodies
from specs.wire.messages import Verb

PROOF_TOKENS = 16  # greedy tokens per proof prompt that an export must repeat, where completions are as long


def find_checkpoint(run: RunDir, progress: Progress) -> checkpoints.Checkpoint | None:
    """Find the checkpoint that a resume continues from; None: from the start. Raises CheckpointError where it is of
    another model, or where there should be one and none is whole, and RunDirError; then nothing was changed."""
    fork, checkpoint = Fork.of(run.path), checkpoints.newest(run.checkpoints, progress.warning, saved_roles(run.spec))
    last = max((record["step"] for record in read_metrics(run.metrics)), default=0)
    if checkpoint is not None:
        check_fits(checkpoint.manifest, run.spec, run.spec_dir)
        if last < checkpoint.step:
            progress.warning(f"{run.metrics} ends at step {last}: what came before the checkpoint is missing there")
    elif last - (fork.step if fork else 0) > (every := _checkpoints_were_due_every(run)):
        raise CheckpointError(
            f"{run.checkpoints} holds no checkpoint, but {last} steps were made, and one was due every {every}",
            hint=f"put its newest folder step_… back; {checkpoints.START_OVER}",
        )
    checkpoints.set_aside_after(run.checkpoints, checkpoint.step if checkpoint else 0)
    if checkpoint is None:
        begin = f"step {fork.step + 1}, as forked" if fork else "step 1"
        progress.message(f"no checkpoint to resume from: starting at {begin}")
    return checkpoint


def _checkpoints_were_due_every(run: RunDir) -> int:
    """Return the steps between checkpoints, in the attempt that made fewest."""
    every = []
    for file in run.path.glob("resolved*.json"):
        with suppress(ValueError, LookupError, TypeError):
            every.append(int(read_object(file)["checkpoint"]["every"]))
    return max(every)


class Saver:
    """Save and restore the state of the roles of one attempt."""

    def __init__(self, run: RunDir, plan: Plan, groups: Groups, progress: Progress) -> None:
        self.run, self.spec, self.plan, self.groups, self.progress = run, run.spec, plan, groups, progress
        # Now: the run directory may be moved during the run.
        self._actor_versions = dict(read_object(run.as_built)[self.spec.lead][0]["versions"])
        self.saved = -1  # step of the newest checkpoint that this attempt wrote or started from

    def save(self, driver: Driver, step: int) -> None:
        """Checkpoint the state after a step, and only then prove it: whatever fails in a proof costs no step."""
        with driver.phase("save", step):
            folder = checkpoints.save(
                self.run.checkpoints,
                step,
                about={**self._about(step), "proven": False},
                write_roles={role: partial(self._write_role, role, step) for role in saved_roles(self.spec)},
                write_driver=driver.save,
            )
            self.saved = step
            self._prove(driver, folder, step)
        self.progress.checkpoint(step)

    def _write_role(self, role: RoleName, step: int, folder: Path) -> list[checkpoints.Marks]:
        return [saved.files for saved in self._save_role(role, folder, step)]

    def _save_role(self, role: RoleName, folder: Path, step: int, **proof: Any) -> list[bodies.Saved]:
        request = bodies.Save(folder=str(folder), **proof)
        return [bodies.Saved.of(answer) for answer in self.groups[role].call(Verb.SAVE, request, step=step)]

    def _prove(self, driver: Driver, folder: Path, step: int) -> None:
        """Add what an export of this state must repeat, on the run's own first prompts, and only then drop older ones.
        A checkpoint without it can be resumed from."""
        prompts = driver.proof_prompts()
        room = self.spec.max_sequence_tokens - max(map(len, prompts))
        new_tokens = max(1, min(PROOF_TOKENS, room, self.spec.max_response_tokens))
        proof = {"proof_prompts": prompts, "proof_tokens": new_tokens}
        written: dict[str, Any] = {}
        failed: list[str] = []
        for role in saved_roles(self.spec):
            for saved in self._save_role(role, folder / role, step, **proof):
                written |= {f"{role}/{file}": mark for file, mark in saved.files.items()}
                failed += [f"the {role}'s: {saved.unproven}"] if saved.unproven else []
        if failed:
            unproven = f"step {step} is saved without its proof, so that no export is made of it: {failed[0]}"
            self.progress.warning(unproven)
        checkpoints.add_files(folder, written, {"proven": not failed})
        checkpoints.prune(self.run.checkpoints, self.spec.checkpoint.keep)

    def restore(self, driver: Driver, checkpoint: checkpoints.Checkpoint) -> int:
        """Put the roles back into the state after the checkpoint's step, which it returns."""
        self._load(checkpoint)
        left_out = driver.restore(checkpoint.path / "driver", checkpoint.state)
        checkpoint.pin.release()
        if not checkpoint.manifest.get("proven"):  # what saved it was killed, or its proof failed
            with driver.phase("save", checkpoint.step):
                self._prove(driver, checkpoint.path, checkpoint.step)
        steps = self.spec.run.steps
        left = "" if checkpoint.step < steps else f"; no step is left: run.steps = {steps}; --set run.steps=N continues"
        self.progress.message(f"resumed from {checkpoint.path}{left}")
        if left_out:
            span = f"{min(left_out)} to {max(left_out)}" if len(left_out) > 1 else f"{min(left_out)}"
            self.progress.warning(
                f"{sum(left_out.values())} samples drawn ahead for step {span} are dropped: older than "
                "rollout.max_staleness allows, or not graded. Others are drawn in their place"
            )
        return checkpoint.step

    def begin_from(self, driver: Driver, fork: Fork) -> int:
        """Give the roles what a checkpoint of another run holds: weights and optimizer state, and which prompts come
        next. Returns its step, from which this run counts on, and its learning rates too."""
        checkpoint = fork.checkpoint(self.spec, self.run.spec_dir)
        check_same_base(self.spec, self.run.as_built, checkpoint)
        self._load(checkpoint, forked_at=fork.step)
        driver.begin_at(checkpoint.path / "driver", checkpoint.state)
        checkpoint.pin.release()
        self.progress.message(f"forked from {checkpoint.path}")
        return fork.step

    def _load(self, checkpoint: checkpoints.Checkpoint, forked_at: int | None = None) -> None:
        for role in saved_roles(self.spec):
            steps = None if forked_at is None else self.spec.optimizer_steps(role, forked_at)
            if steps == checkpoint.manifest["roles"].get(role, {}).get("planned_optimizer_steps"):
                steps = None  # the clock goes on as it is, without steps that were left out
            self.groups[role].call(Verb.LOAD, bodies.Load(folder=str(checkpoint.path / role), schedule_steps=steps))
        self.saved = checkpoint.step
        self.progress.start_at(checkpoint.step)

    def _about(self, step: int) -> dict[str, Any]:
        """Describe the run after a step in the manifest."""
        spec, fork, paths = self.spec, Fork.of(self.run.path), model_paths(self.spec, self.run.spec_dir)
        roles = {
            role: {"model_path": paths[role], "python": self.plan.role(role).python, "dtype": spec.dtype(role)}
            | {"planned_optimizer_steps": spec.optimizer_steps(role, step)}
            for role in saved_roles(spec)
        }
        return {
            "run": spec.run.name,
            "attempt": self.run.attempt,
            "forked_from": [str(fork.run), fork.step] if fork else None,
            "spec_sha256": checkpoints.spec_hash(spec),
            **about_model(spec, self.run.spec_dir),
            "inputs": self.run.inputs,
            "actor_ranks": spec.lead_section.processes,
            "roles": roles,
            **roles[spec.lead],
            "lineage": {role: lineage(paths[role]) for role in roles},
            "trust_remote_code": spec.model.trust_remote_code,
            "versions": {"python": platform.python_version(), "rlctl": __version__, **self._actor_versions},
        }

"""What a run saves, and how it goes on from it: between the roles and the files of `rlctl/checkpoints.py`."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

from rlctl import __version__, ahead_files, checkpoints
from rlctl.build import model_paths
from rlctl.driver import Driver
from rlctl.groups import Groups
from rlctl.plan import Plan
from rlctl.progress import Progress
from rlctl.resume import about_model, check_fits
from rlctl.run_dir import RunDir
from rlctl.step_metrics import Clock
from specs.messages import Verb
from specs.schema import Spec

PROOF_TOKENS = 16  # greedy tokens per proof prompt that an export must repeat


def find_checkpoint(spec: Spec, spec_dir: Path, run: RunDir, progress: Progress) -> checkpoints.Checkpoint | None:
    """The checkpoint that a resume goes on from; None: from the start. Raises CheckpointError where it is of another
    model."""
    checkpoint = checkpoints.newest(run.checkpoints, progress.warning)
    if checkpoint is not None:
        check_fits(checkpoint.manifest, spec, spec_dir)
    checkpoints.set_aside_after(run.checkpoints, checkpoint.step if checkpoint else 0)
    if checkpoint is None:
        progress.message("no checkpoint to resume from: starting at step 1")
    return checkpoint


class Saver:
    """Saves and restores the state of the roles of one attempt."""

    def __init__(self, spec: Spec, spec_dir: Path, run: RunDir, plan: Plan, groups: Groups, progress: Progress) -> None:
        self.spec, self.spec_dir, self.run, self.plan = spec, spec_dir, run, plan
        self.groups, self.progress = groups, progress
        self.saved = -1  # step of the newest checkpoint that this attempt wrote or started from

    def save(self, driver: Driver, step: int) -> None:
        """Checkpoint the state after a step."""
        driver.residency.enter("save", step=step)
        self.progress.phase("checkpoint")
        prompts = self._proof_prompts()

        def write_actor(folder: Path) -> list[checkpoints.Marks]:
            body = {"folder": str(folder), "proof_prompts": prompts, "proof_tokens": PROOF_TOKENS}
            return [answer.body["files"] for answer in self.groups["actor"].call(Verb.SAVE, body, step=step)]

        def write_driver(folder: Path) -> dict[str, Any]:
            ahead = driver.ahead
            return {"position": ahead.cursor, "ahead": ahead_files.write(folder, ahead.drain(Clock()))}

        checkpoints.save(
            self.run.checkpoints,
            step,
            about=self._about(),
            write_actor=write_actor,
            write_driver=write_driver,
            keep=self.spec.checkpoint.keep,
        )
        self.saved = step
        self.progress.checkpoint(step)

    def restore(self, driver: Driver, checkpoint: checkpoints.Checkpoint) -> None:
        """Put the roles back into the state after the checkpoint's step."""
        self.groups["actor"].call(Verb.LOAD, {"folder": str(checkpoint.path / "actor")})
        state = checkpoint.state
        kept = ahead_files.read(checkpoint.path / "driver", state.get("ahead", ()))
        too_old = driver.ahead.restore(int(state["position"]), kept)
        self.saved = checkpoint.step
        self.progress.start_at(checkpoint.step)
        self.progress.message(f"resumed from {checkpoint.path}")
        if too_old:
            steps = f"{min(too_old)} to {max(too_old)}" if len(too_old) > 1 else f"{min(too_old)}"
            self.progress.warning(
                f"{sum(too_old.values())} samples drawn ahead for step {steps} are dropped: older than "
                f"rollout.max_staleness = {self.spec.rollout.max_staleness} allows. Their prompts are drawn again"
            )

    def _proof_prompts(self) -> list[list[int]]:
        """Two of the run's own first prompts."""
        body = {"what": "train", "position": 0, "count": 2, "group_size": 1}
        batch = self.groups["reward"].call(Verb.PROMPTS, body)[0].batch
        return [tokens.tolist() for tokens in batch.sequences("tokens_T")]

    def _about(self) -> dict[str, Any]:
        spec = self.spec
        return {
            "run": spec.run.name,
            "attempt": self.run.attempt,
            "spec_sha256": checkpoints.spec_hash(spec),
            **about_model(spec, self.spec_dir),
            "actor_ranks": spec.actor.processes,
            "dtype": spec.actor.dtype,
            "model_path": model_paths(spec, self.spec_dir)["actor"],
            "trust_remote_code": spec.model.trust_remote_code,
            "python": next(role.python for role in self.plan.roles if role.role == "actor"),
            "versions": {"python": platform.python_version(), "rlctl": __version__, **self._actor_versions()},
        }

    def _actor_versions(self) -> dict[str, str]:
        return json.loads(self.run.as_built.read_text())["actor"][0]["versions"]  # type: ignore[no-any-return]

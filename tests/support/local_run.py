"""A whole run in this process: the roles' real handlers, started, synced and stepped by the run's own code, without
processes and sockets. For what the steps compute; only the graders are processes."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from local_group import LocalGroup
from safetensors.numpy import save_file

from backends.fake import bigram
from backends.protocol import Rank
from rlctl.loop.driver import StepRecord, UpdateWindow
from rlctl.models.paths import BUILTIN_FOLDER
from rlctl.processes.placement import make_plan
from rlctl.recipes.rl import Rl
from rlctl.run.checkpoints import Checkpoint
from rlctl.run.run_dir import RunDir
from rlctl.run.saving import Saver, find_checkpoint
from rlctl.run.startup import start
from specs.errors import Interrupted
from specs.load.load import load_spec
from specs.schema.recipes import RlSpec
from specs.schema.roles import ROLES
from specs.wire.messages import Verb


class LocalGroups(dict[str, LocalGroup]):
    def __init__(self, spec: RlSpec) -> None:
        super().__init__()
        self.spec = spec
        self.ranks = SimpleNamespace(
            allow_restarts=lambda policy: None,
            failed=lambda role: (),
            dropped=lambda role: (),
            late=lambda role: (),
            restarts=Counter(),
            policy_of=lambda role: SimpleNamespace(least=spec.role(role).min_processes),
        )

    def arrived(self, role: str) -> list[int]:
        return []

    def start(self) -> None:
        for role in self.spec.roles:
            module, _, name = (ROLES[role].worker or f"workers.roles.{role}:handlers").partition(":")
            handlers, size = getattr(import_module(module), name), self.spec.role(role).processes
            self[role] = LocalGroup(role, [handlers(Rank(rank, size)) for rank in range(size)])

    def close(self) -> None:
        for group in self.values():
            if Verb.CLOSE in group.handlers[0]:
                group.call(Verb.CLOSE)


@dataclass
class Said:
    """Stands in for the progress line, and keeps what it is told."""

    warnings: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def warning(self, text: str) -> None:
        self.warnings.append(text)

    def message(self, text: str) -> None:
        self.messages.append(text)

    def __getattr__(self, name: str) -> Any:
        return lambda *values: None


@dataclass
class LocalRun:
    spec: RlSpec
    driver: Rl
    saver: Saver
    said: Said
    done: int

    def steps(self, until: int, *, save: Sequence[int] = ()) -> list[StepRecord]:
        """Those that are left up to `until`, as `rlctl train` makes them."""
        records = []
        if self.done == 0:
            self.driver.begin(0)
        for step in range(self.done + 1, until + 1):
            records.append(self.driver.step(step))
            self.done = step
            if step in save:
                self.saver.save(self.driver, step)
        return records

    def break_off(self, patch: pytest.MonkeyPatch, kind: type, wait: str, number: int) -> None:
        """Let a Ctrl-C come in the `number`-th `wait` of a kind in the next step, and save what it leaves."""
        real, waits = getattr(kind, wait), itertools.count(1)

        def interrupted(waiting: Any) -> Any:
            if next(waits) == number:
                raise Interrupted("interrupted (SIGINT)")
            return real(waiting)

        patch.setattr(kind, wait, interrupted)
        with pytest.raises(Interrupted):
            self.driver.step(self.done + 1)
        self.saver.save(self.driver, self.done)


def bigram_folder(folder: Path, *, likes: str, by: float = 4.0) -> Path:
    """A model of the fake engine, with the files of builtin:tiny-digits, whose logits of the digits `likes` are higher
    by so much wherever it stands."""
    shutil.copytree(BUILTIN_FOLDER / "tiny-digits", folder)
    ids = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    weights = {name: np.zeros(shape, np.float32) for name, shape in bigram.shapes(len(ids)).items()}
    weights["bias.weight"][[ids[digit] for digit in likes]] = by
    save_file(weights, folder / "model.safetensors")
    return folder


@contextmanager
def local_run(spec_path: Path, run_path: Path, *overrides: str, resume: bool = False) -> Iterator[LocalRun]:
    spec, spec_dir, said = load_spec(spec_path, overrides), spec_path.absolute().parent, Said()
    run, plan, groups = RunDir(run_path), make_plan(spec, spec_dir), LocalGroups(spec)
    run.open(spec, spec_path, resume=resume)
    try:
        checkpoint: Checkpoint | None = find_checkpoint(run, said) if resume else None
        driver = start(run, plan, groups, UpdateWindow(), said)
        saver = Saver(run, plan, groups, said)
        done = saver.restore(driver, checkpoint) if checkpoint else 0
        if done:
            driver.begin(done)
        yield LocalRun(spec, driver, saver, said, done)
    finally:
        groups.close()
        run.release()

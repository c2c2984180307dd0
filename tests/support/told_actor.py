"""A driver whose actor notes what each of its ranks is told to learn, and a drawn batch for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from local_group import LocalGroup
from local_run import Said
from running import preset

from rlctl.loop.driver import UpdateWindow
from rlctl.loop.residency import Residency
from rlctl.loop.sampling import Scored
from rlctl.recipes.rl import Rl
from specs.load.load import load_spec
from specs.wire.batch import Batch
from specs.wire.messages import Verb

GROUPS, SIZE, RANKS, LIMIT = 8, 4, 2, 8  # the preset `fake`: 8 prompts × 4 completions of at most 8 tokens


STEPPED = {"grad_norm": 1.0, "lr": 0.1, "skipped": False, "peak_GiB": 0.0}


class Actor:
    """Two ranks that note what each is told to learn."""

    def __init__(self) -> None:
        self.told: list[list[tuple[Batch, dict[str, int]]]] = [[] for _ in range(RANKS)]
        ranks = [
            {Verb.UPDATE: self.updater(rank), Verb.STEP: lambda call, emit: (STEPPED, {})} for rank in range(RANKS)
        ]
        self.group = LocalGroup("actor", ranks)

    def updater(self, rank):
        def update(call, emit):
            self.told[rank].append((call.batch, call.body["scale"]))
            return {"sums": {"tokens": 1.0, "logprob_gap": 0.0, "logprob_gap_max": 0.0}}, {}

        return update


def drawn() -> tuple[Batch, Scored]:
    """A prompt token and 0 to 3 loss tokens, with two of a tool after the first of them; rewards of a group lie near 10
    times its number, and one was not graded."""
    rng = np.random.default_rng(3)
    masks = [[0, 1, 0, 0, 1, 1][: 3 + count] if count else [0] for count in rng.integers(0, 4, GROUPS * SIZE)]
    length_B, group_B = np.array([len(mask) for mask in masks]), np.repeat(np.arange(GROUPS), SIZE)
    mask_T = np.concatenate(masks).astype(np.uint8)
    zeros_T = np.zeros(len(mask_T), np.float32)
    columns = {"tokens_T": np.arange(len(mask_T)), "loss_mask_T": mask_T, "length_B": length_B, "group_B": group_B}
    columns |= {"rollout_logprob_T": zeros_T, "old_logprob_T": zeros_T, "id_B": np.arange(len(group_B))}
    columns["rollout_B"] = columns["id_B"] + 50
    reward_B = (10 * group_B + rng.normal(size=len(group_B))).astype(np.float32)
    scored_B = np.ones(len(group_B), dtype=bool)
    scored_B[5] = False
    return Batch(columns), Scored(reward_B, scored_B, {}, [])


def rl_driver(
    folder: Path,
    groups: Mapping[str, LocalGroup],
    *overrides: str,
    name: str = "fake",
    steady: Any = None,
    limits: Any = None,
    devices: Mapping[str, frozenset[int]] | None = None,
) -> Rl:
    """Return the driver of a preset with these groups; the others that `rl` has always answer nothing."""
    spec = load_spec(preset(name, folder), [*overrides])
    groups = {role: LocalGroup(role, [{}]) for role in ("rollout", "data", "reward")} | {**groups}
    residency = Residency(False, [groups["rollout"]], devices=devices)
    limits = limits or SimpleNamespace(broken_by=lambda gap: False)
    return Rl(spec, groups, residency, steady or SimpleNamespace(), limits, UpdateWindow(), Said())


def driver_of(tmp_path: Path, *overrides: str) -> tuple[Rl, Actor]:
    actor = Actor()
    return rl_driver(tmp_path, {"actor": actor.group}, *overrides), actor

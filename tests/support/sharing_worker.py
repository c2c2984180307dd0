"""One of four ranks that share batches; started by torchrun. Every rank holds roles of three meshes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
torch.set_num_threads(1)

from train_helpers import grpo, make_batch, scale_of, train_config  # noqa: E402

from backends import activity  # noqa: E402
from backends.ddp.engine import DdpTrainEngine  # noqa: E402
from backends.protocol import LossScale, Rank  # noqa: E402
from backends.ulysses import split_attention  # noqa: E402
from backends.ulysses.sequence_group import ALONE, SequenceGroup, sequence_group  # noqa: E402
from backends.ulysses.shared_batch import share_batch, sum_of_ranks  # noqa: E402
from specs.schema.algorithms.algorithm_tables import ValueLoss  # noqa: E402
from specs.wire.batch import Batch  # noqa: E402
from specs.wire.partition import shards  # noqa: E402
from specs.wire.role_config import TrainConfig  # noqa: E402
from specs.wire.sequence_work import SequenceWork  # noqa: E402

CPU = torch.device("cpu")
DEGREES = {"actor": 4, "ref": 1, "critic": 2}
SAMPLES = {0: [0, 1, 2], 1: [], 2: [3], 3: [4, 5]}  # of each rank


def shared(group: SequenceGroup, rank: Rank) -> dict[str, Any]:
    """What the group has of a batch, and what comes back of it."""
    whole = make_batch(6)
    own = whole.select(SAMPLES[rank.rank])
    activity.begin("update", 1, counted=True)
    activity.describe("update", "micro-batch", counted=True)
    activity.describe_samples(len(own), own.num_tokens)
    inside = share_batch(own, group.group, CPU)
    said = activity.read()
    activity.end()
    assert inside.batch.columns.keys() == own.columns.keys()
    assert all(inside.batch[name].dtype == column.dtype for name, column in own.columns.items())
    assert inside.batch["tokens_T"][inside.own_T].tolist() == own["tokens_T"].tolist()
    assert inside.batch["length_B"][inside.own_B].tolist() == own["length_B"].tolist()
    part = np.zeros(inside.batch.num_tokens, dtype=np.float32)
    part[group.rank :: group.size] = 1 + group.rank
    assert said is not None
    tokens = inside.batch["tokens_T"].tolist()
    return {"tokens": tokens, "joined": sum_of_ranks(part, group.group, CPU).tolist(), "said": said.words()}


def several_meshes(model: Path, rank: Rank) -> dict[str, Any]:
    """Engines of three meshes in one process, by turns."""
    engines = {role: DdpTrainEngine.build(engine_config(model, role, degree), rank) for role, degree in DEGREES.items()}
    found: dict[str, Any] = {role: [] for role in DEGREES}
    for step in range(2):
        batch = step_batch(step)
        for role, engine in engines.items():
            mine = shards(SequenceWork.of(batch), rank.world_size, DEGREES[role])[rank.rank]
            told_T, norm = step_of(engine, batch.select(mine), scale_of(batch))
            told = dict(zip(batch.token_index(mine).tolist(), told_T.tolist(), strict=True))
            found[role].append({"told": told, "norm": norm})
            assert split_attention._in_effect is ALONE
    return found


def engine_config(model: Path, role: str, degree: int) -> TrainConfig:
    changes = {"sequence_parallel": degree, "micro_batch_tokens": 64 // degree}
    if role == "ref":
        changes["optimizer"] = None
    return train_config(model, role=role, model={"head": "value" if role == "critic" else "lm"}, **changes)


def step_batch(step: int) -> Batch:
    batch = make_batch(seed=step)
    return batch.with_columns(value_T=batch["ref_logprob_T"] + 3, return_T=batch["advantage_T"])


def step_of(engine: Any, batch: Batch, scale: LossScale) -> tuple[Any, float]:
    """Values or log-probs, and, of an engine that learns, the gradient's norm."""
    values = engine.config.model.head == "value"
    told_T = engine.values(batch) if values else engine.forward(batch)
    if engine.config.optimizer is None:
        return told_T, 0.0
    loss = ValueLoss(value_clip=0.3) if values else grpo(kl_coef=0.1)
    engine.forward_backward(batch, loss, scale)
    return told_T, engine.optim_step().grad_norm


def main(model: Path, out: Path) -> None:
    rank = Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    engines = several_meshes(model, rank)  # joins the group
    groups = {role: sequence_group(rank, degree) for role, degree in DEGREES.items()}
    report = {"engines": engines, "shared": {role: shared(group, rank) for role, group in groups.items()}}
    (out / f"rank{rank.rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""One rank of the tests of the engine `megatron`; started by torchrun of the interpreter that has Megatron-core.

Jobs: those of `sharded_worker.run`, or a family's model: what is read is exported at once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(Path(__file__).parent), str(root), str(root / "scripts")]

import make_megatron_options
import sharded_worker
from sharded_worker import MEGATRON
from stock_model import PROMPTS, TEMPERATURE, family_batch
from train_helpers import train_config, weights_of

from backends.protocol import Rank, StepResult
from backends.registry import train_engine


def offload_and_back(engine: Any) -> None:
    """Between gradients and step, nothing may be lost; after the step, gradients are zero and are let go of. (On the
    CPU nothing else leaves: weights that a checksum has seen cannot be emptied there.)"""
    _, grads = engine.core.buffers()
    before = [grad.clone() for grad in grads]
    assert any(grad.any() for grad in before)
    for move in (engine.offload, engine.offload, engine.onload, engine.onload):
        move()
    assert all(torch.equal(grad, kept) for grad, kept in zip(grads, before, strict=True))
    step = type(engine).optim_step

    def step_and_leave() -> StepResult:
        result: StepResult = step(engine)
        engine.offload()
        assert not any(grad.untyped_storage().nbytes() for grad in grads)
        engine.onload()
        return result

    engine.optim_step = step_and_leave


def read_family(job: dict[str, Any], rank: Rank) -> None:
    """Job: `case`; `family`: the folder of its model; `out`. Weights as they were read, log-probs and a proof."""
    given = {**MEGATRON[job["case"]], "model": {"from_scratch": False}, "temperature": TEMPERATURE}
    engine = train_engine("megatron").build(train_config(Path(job["family"]), **given), rank)
    batch, out = family_batch(), Path(job["out"])
    mine = list(range(rank.rank, len(batch), rank.world_size))
    part = batch.select(mine)
    out.mkdir(parents=True, exist_ok=True)
    found = {"token_N": batch.token_index(np.array(mine)), "logprob_N": engine.forward(part)}
    weights, grads = engine.core.buffers()  # type: ignore[attr-defined]
    moments = 2 * sum(held.nbytes for held in engine.weights.masters())  # type: ignore[attr-defined]
    found["bytes"] = np.array([sum(each.nbytes for each in weights), sum(each.nbytes for each in grads), moments])
    np.savez(out / f"rank{rank.rank}.npz", **found)
    exported, answers = weights_of(engine), engine.greedy(PROMPTS, 4)
    if rank.rank == 0:
        np.savez(out / "weights.npz", **exported)
        (out / "greedy.json").write_text(json.dumps([answer.tokens for answer in answers]))


def main(jobs_file: Path) -> None:
    rank = Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    given = json.loads(jobs_file.read_text())
    if rank.rank == 0:
        jobs_file.with_name("megatron_options.py").write_text(make_megatron_options.source())
    for job in given["jobs"]:
        if "family" in job:
            read_family(job, rank)
            continue
        if job["case"].endswith("offload"):
            sharded_worker.offload_and_back = offload_and_back
            job["offload"] = True
        sharded_worker.run(Path(given["model"]), job, rank)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

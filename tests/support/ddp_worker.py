"""One rank of the data-parallel test; started by torchrun. Writes what it saw to the folder it is given."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
torch.set_num_threads(1)

from train_helpers import grpo, gspo, make_batch, scale_of, train_config  # noqa: E402

from backends.ddp.engine import DdpTrainEngine  # noqa: E402
from backends.protocol import ENGINE_SUMS, Rank  # noqa: E402
from specs.wire.partition import shards  # noqa: E402
from specs.wire.sequence_work import SequenceWork  # noqa: E402


def main(model: Path, out: Path, steps: int) -> None:
    rank = Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    engine = DdpTrainEngine.build(train_config(model), rank)
    losses = [loss(kl_coef=0.1, entropy_coef=0.01, loss_aggregation="seq-mean-token-mean") for loss in (grpo, gspo)]
    history = []
    for step in range(steps):
        # The last step has one sequence only: a rank with nothing to do must still take part.
        batch = make_batch(1 if step == steps - 1 else 12, seed=step)
        shard = shards(SequenceWork.of(batch), rank.world_size)[rank.rank]
        loss = losses[step % 2]
        sums = engine.forward_backward(batch.select(shard), loss, scale_of(batch))
        result = engine.optim_step()
        history.append({**{name: sums[name] for name in (*ENGINE_SUMS, *loss.summed())}, "grad_norm": result.grad_norm})
    bad = make_batch()
    if rank.rank == rank.world_size - 1:  # one rank alone sees a bad number; all must skip
        bad["advantage_T"][:] = float("inf")
    shard = shards(SequenceWork.of(bad), rank.world_size)[rank.rank]
    engine.forward_backward(bad.select(shard), losses[0], scale_of(bad))
    skipped = engine.optim_step().skipped
    folder = out / "state"
    if rank.rank == 0:
        folder.mkdir()
    if rank.world_size > 1:
        torch.distributed.barrier()
    engine.save(folder)
    checksum = engine.built().weights_checksum
    report = {"history": history, "skipped": skipped, "checksum": checksum}
    (out / f"rank{rank.rank}.json").write_text(json.dumps(report))
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))

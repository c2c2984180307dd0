"""One rank that measures what train engines hold, tensor by tensor; started by torchrun (`test_held_model.py`)."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
torch.set_num_threads(1)

from sharded_worker import loss_of  # noqa: E402
from train_helpers import make_batch, scale_of, train_config  # noqa: E402

from backends.protocol import Rank  # noqa: E402
from backends.registry import train_engine  # noqa: E402
from specs.wire.partition import shards  # noqa: E402
from specs.wire.sequence_work import SequenceWork  # noqa: E402

_LET_GO_S = 0.05  # gloo's threads hold a buffer for a moment longer than who waits for it


def sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address → bytes of each storage that the tensors lie in."""
    found = {}
    for tensor in tensors:
        if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if tensor.device.type != "meta" and storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def alive() -> dict[int, int]:
    """Every tensor of this process, gradients too: those have no Python object until they are asked for."""
    time.sleep(_LET_GO_S)
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    grads = [grad for tensor in tensors for grad in (tensor.grad if tensor.is_leaf else None,) if grad is not None]
    whole = tensors + grads
    locals_ = [tensor.to_local() for tensor in whole if hasattr(tensor, "to_local")]
    return sizes([*whole, *locals_])


def measure(model: Path, changes: dict[str, Any], rank: Rank) -> dict[str, int]:
    """Bytes: `held` between two micro-batches' gradients and the optimizer step, `moments` of that, `between` steps."""
    before = set(alive())
    config = train_config(model, micro_batch_tokens=32, **changes)
    engine: Any = train_engine(config.engine.kind).build(config, rank)
    moments = sum(sizes(shard.flat for shard in engine._moment_shards()).values())
    batch = make_batch(12)
    batch = batch.with_columns(value_T=batch["ref_logprob_T"], return_T=batch["advantage_T"])
    mine = batch.select(shards(SequenceWork.of(batch), rank.world_size)[rank.rank].tolist())
    if config.optimizer is None:
        engine.forward(mine)
        held = between = alive()
    else:
        engine.forward_backward(mine, loss_of(engine, 0), scale_of(batch))
        held = alive()
        engine.optim_step()
        between = alive()
    engine.policy = engine.optimizer = None
    return {
        "held": sum(nbytes for address, nbytes in held.items() if address not in before),
        "between": sum(nbytes for address, nbytes in between.items() if address not in before),
        "moments": moments,
    }


def main(jobs_file: Path) -> None:
    rank = Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    given = json.loads(jobs_file.read_text())
    from memory_cases import CASES

    found = {name: measure(Path(given["model"]), CASES[name], rank) for name in given["cases"]}
    (jobs_file.parent / f"held{rank.rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

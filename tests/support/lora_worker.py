"""One rank of the test of LoRA on several ranks; started by torchrun. Trains each model with the engine named after it,
in turn."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
torch.set_num_threads(1)

from sharded_worker import CASES, export_in_bf16  # noqa: E402
from train_helpers import learn, make_batch, train_config, weights_of  # noqa: E402

from backends.hf.adapter_names import is_on_the_wire  # noqa: E402
from backends.protocol import Rank  # noqa: E402
from backends.registry import train_engine  # noqa: E402
from specs.schema.role_section import Lora  # noqa: E402
from specs.wire.batch import Batch  # noqa: E402
from specs.wire.partition import shards  # noqa: E402
from specs.wire.sequence_work import SequenceWork  # noqa: E402


def of_rank(rank: Rank, batch: Batch) -> Any:
    return shards(SequenceWork.of(batch), rank.world_size)[rank.rank]


def main(out: Path, jobs: list[str]) -> None:
    rank = Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    for model, case in zip(map(Path, jobs[::2]), jobs[1::2], strict=True):
        config = train_config(model, lora=Lora(rank=4, alpha=12.0), **CASES[case])
        engine = train_engine(config.engine.kind).build(config, rank)
        norms = learn(engine, select=partial(of_rank, rank))[1::2]
        built, weights = engine.built(), weights_of(engine)
        counts = np.array([built.parameters, built.trainable_parameters])
        if config.model.head == "value":
            if rank.rank == 0:
                np.savez(out / f"{model.name} {case}.npz", norms=norms, counts=counts, **weights)
            continue
        base_T, apart = engine.forward(make_batch(), adapters=False), weights_of(engine, form="apart")
        assert all(export_in_bf16(engine, form)[0]["same"] for form in ("merged", "apart", "adapters")), case
        alone = weights_of(engine, form="adapters")
        assert alone.keys() == {name for name in apart if is_on_the_wire(name)}
        assert all((alone[name] == apart[name]).all() for name in alone)
        weights |= {f"apart {name}": value for name, value in apart.items()}
        if rank.rank == 0:
            np.savez(out / f"{model.name} {case}.npz", norms=norms, base_T=base_T, counts=counts, **weights)
    torch.distributed.destroy_process_group()  # once: the engines share it


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

#!/usr/bin/env python
"""Score a batch again that was kept because sampler and trainer disagreed: `RUN/gap_step_NNNNNN.safetensors`.

    .venv/bin/python scripts/rescore.py RUN/gap_step_000012.safetensors [--dtype fp32] [--step N] [--rows 10]

The actor is built as the run had it, but in one process, on the CPU and in fp32 unless `--dtype` says otherwise, with
the weights of the run's checkpoint (by default the one that the run left when it stopped). The table has the samples
whose log-probs are furthest apart, and where each begins to differ; the last line says whose log-probs stand alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backends.protocol import Rank, TrainEngine
from backends.registry import train_engine
from rlctl.loop.logprob_gap import HEADER, worst_samples
from rlctl.run import checkpoints
from rlctl.show.streams import visible_streams
from specs.errors import RlctlError, UsageError
from specs.schema.engines.ddp_table import DdpTable
from specs.schema.engines.engine_registry import table_of
from specs.wire.batch import Batch
from specs.wire.role_config import TrainConfig

BEGINS = 0.1  # a sample begins to differ where a token's gap is this share of its largest
FAIR = 2.0  # whose mean gap is this much smaller agrees with the new scores


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batch", type=Path)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--step", type=int, help="checkpoint to score with; 0: the model the run started from")
    parser.add_argument("--rows", type=int, default=10)
    asked = parser.parse_args()
    try:
        rescore(asked.batch, asked.dtype, asked.step, asked.rows)
    except RlctlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def rescore(path: Path, dtype: str, step: int | None, rows: int) -> None:
    """Print the table for the batch at `path`. Raises RlctlError."""
    batch, about = read(path)
    engine = actor(about, dtype)
    try:
        held = load_weights(engine, path.parent, about["step"] - 1 if step is None else step)
        again_T = engine.forward(batch.only(("tokens_T", "loss_mask_T")))
    finally:
        engine.close()
    print(
        f"{path.name}: {len(batch)} samples of step {about['step']}; scored in {dtype} with the weights of step {held}"
    )
    if held != about["step"] - 1:
        print(f"note: the batch was drawn with the weights of step {about['step'] - 1}; updates since are in the gaps")
    print_table(batch, again_T, rows)
    print(whose_are_off(batch, again_T))


def read(path: Path) -> tuple[Batch, dict[str, Any]]:
    try:
        with safe_open(path, "np") as file:
            about = json.loads(file.metadata()[HEADER])
            return Batch({name: file.get_tensor(name) for name in [*file.keys()]}), about
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        hint = "pass a gap_step_NNNNNN.safetensors of a run directory"
        raise UsageError(f"{path} is not a kept batch: {error}", hint=hint) from None


def actor(about: dict[str, Any], dtype: str) -> TrainEngine:
    """Build the run's actor, alone in this process."""
    body = about["actor"]
    written_by = table_of("train", body["engine"]["kind"])
    ddp = DdpTable()
    alike = written_by is not None and getattr(written_by, "checkpoint_format", None) == ddp.checkpoint_format
    engine = ddp.model_dump() if alike else body["engine"]
    model = {**body["model"], "dtype": dtype, "device": "cpu", "attn_implementation": "auto"}
    config = TrainConfig.model_validate({**body, "engine": engine, "model": model, "gradient_checkpointing": False})
    return train_engine(config.engine.kind).build(config, Rank())


def load_weights(engine: TrainEngine, run_dir: Path, step: int) -> int:
    """Load the checkpoint of `step`, or the newest before it; return its step. 0: as built."""
    root = run_dir / "checkpoints"
    best = max((found for found in checkpoints.steps_in(root) if found <= step), default=0)
    if best:
        engine.load(checkpoints.read(checkpoints.step_path(root, best)).path / "actor")
    return best


def print_table(batch: Batch, again_T: np.ndarray, rows: int) -> None:
    """Print the worst samples: mean |Δ| of sampler and of trainer from the new scores; where the larger begins."""
    print(f"{'id':>10} {'row':>8} {'tokens':>7} {'sampler':>10} {'trainer':>10} {'apart':>10}  begins at loss token")
    mask_T = batch["loss_mask_T"] > 0
    for sample in worst_samples(batch, batch["trainer_logprob_T"])[:rows]:
        part = slice(batch.offsets[sample.index], batch.offsets[sample.index + 1])
        chosen = mask_T[part]
        sampler_N, trainer_N = (
            np.abs(batch[name][part][chosen] - again_T[part][chosen])
            for name in ("rollout_logprob_T", "trainer_logprob_T")
        )
        apart_N = np.abs(batch["rollout_logprob_T"][part][chosen] - batch["trainer_logprob_T"][part][chosen])
        begins = int(np.argmax(~(apart_N < BEGINS * sample.largest)))
        print(
            f"{batch['id_B'][sample.index]:>10} {batch['row_B'][sample.index]:>8} {int(chosen.sum()):>7} "
            f"{sampler_N.mean():>10.3g} {trainer_N.mean():>10.3g} {sample.mean:>10.3g}  {begins}"
        )


def whose_are_off(batch: Batch, again_T: np.ndarray) -> str:
    mask_T = batch["loss_mask_T"] > 0
    sampler, trainer = (
        float(np.abs(batch[name] - again_T)[mask_T].mean()) for name in ("rollout_logprob_T", "trainer_logprob_T")
    )
    found = f"mean |Δ| from the new scores: sampler {sampler:.3g}, trainer {trainer:.3g}"
    if not sampler <= FAIR * trainer:
        return f"{found}: the sampler's log-probs are off"
    if not trainer <= FAIR * sampler:
        return f"{found}: the trainer's log-probs are off"
    return f"{found}: neither agrees with the new scores better than the other"


if __name__ == "__main__":
    with visible_streams():
        sys.exit(main())

"""One rank of the contract test of engines with several ranks; started by torchrun, or called in the test's process.

It works through a list of jobs, each a case (an engine's settings) that is trained, or resumed, in a fresh engine. To
put another engine under contract, add its line to `CASES`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
torch.set_num_threads(1)

from families import EXPORTED  # noqa: E402
from stock_model import ADAM, PROMPTS, TEMPERATURE, family_batch  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from train_helpers import (  # noqa: E402
    grpo,
    gspo,
    make_batch,
    make_units,
    objective,
    scale_of,
    train_config,
    unit_scale,
    weights_of,
)

from backends.protocol import UNIT_SUMS, Rank, TrainEngine  # noqa: E402
from backends.registry import train_engine  # noqa: E402
from backends.train.offload import Offloader  # noqa: E402
from specs.schema.algorithms.algorithm import AnyLoss  # noqa: E402
from specs.schema.algorithms.algorithm_tables import ValueLoss  # noqa: E402
from specs.schema.engines.ddp_table import DdpTable  # noqa: E402
from specs.schema.engines.fsdp2_table import Fsdp2Table  # noqa: E402
from specs.schema.engines.megatron_table import MegatronTable  # noqa: E402
from specs.schema.engines.zero_table import ZeroTable  # noqa: E402
from specs.schema.spec import WeightForm  # noqa: E402
from specs.wire.batch import Batch  # noqa: E402
from specs.wire.partition import shards, unit_shards  # noqa: E402
from specs.wire.sequence_work import SequenceWork  # noqa: E402

MICRO_BATCH_TOKENS = 32
BF16: dict[str, Any] = {"model": {"dtype": "bf16"}}
VALUES: dict[str, Any] = {"role": "critic", "model": {"head": "value"}}
EAGER: dict[str, Any] = {"model": {"attn_implementation": "eager"}}


def sequences(degree: int) -> dict[str, Any]:
    """Ranks that share samples, with rows as long as those of ranks that do not."""
    return {"sequence_parallel": degree, "micro_batch_tokens": MICRO_BATCH_TOKENS // degree}


ONE_AGAIN: dict[str, Any] = {"gradient_checkpointing": 1, "activation_offload": True}
# Changes to `train_config`, by the name of a case. One that starts with "4:" runs on four ranks, others on two.
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": DdpTable()},
    "ddp bf16": {"engine": DdpTable(), **BF16},
    "fsdp2": {"engine": Fsdp2Table()},
    "fsdp2 bf16": {"engine": Fsdp2Table(), **BF16},
    "fsdp2 replicas": {"engine": Fsdp2Table(shard=1, replicate=2)},
    "fsdp2 offload": {"engine": Fsdp2Table(offload="cpu")},
    "fsdp2 recompute one, offload activations": {"engine": Fsdp2Table(), **ONE_AGAIN},
    "ddp critic": {"engine": DdpTable(), **VALUES},
    "fsdp2 critic": {"engine": Fsdp2Table(), **VALUES},
    "4:fsdp2 2x2": {"engine": Fsdp2Table(shard=2, replicate=2)},
    "4:fsdp2 2x2 sync every micro-batch": {
        "engine": Fsdp2Table(shard=2, replicate=2, sync_every_micro_batch=True),
    },
    "4:fsdp2": {"engine": Fsdp2Table()},
    "fsdp2 sequences": {"engine": Fsdp2Table(), **sequences(2)},
    "fsdp2 critic sequences recompute": {
        "engine": Fsdp2Table(),
        **sequences(2),
        **VALUES,
        "gradient_checkpointing": True,
    },
    "4:ddp sequences 4": {"engine": DdpTable(), **sequences(4)},
    "4:fsdp2 2x2 sequences 2": {"engine": Fsdp2Table(shard=2, replicate=2), **sequences(2)},
}
if find_spec("deepspeed") is not None:
    # By default stage 3 leaves parameters of less than 100,000 elements whole, and these models have no others.
    CUT_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    ZERO3, ON_HOST = {"stage": 3, "deepspeed": CUT_ALL}, {"offload_optimizer": True}
    CASES |= {
        "zero1": {"engine": ZeroTable(stage=1)},
        "zero2": {"engine": ZeroTable(stage=2)},
        "zero3": {"engine": ZeroTable(**ZERO3)},
        "zero2 bf16": {"engine": ZeroTable(stage=2), **BF16},
        "zero3 bf16": {"engine": ZeroTable(**ZERO3), **BF16},
        "zero3 critic": {"engine": ZeroTable(**ZERO3), **VALUES},
        "zero3 offload": {"engine": ZeroTable(**ZERO3, **ON_HOST, offload_parameters=True)},
        "zero3 small ones whole": {"engine": ZeroTable(stage=3)},
        "4:zero3 sequences 2 eager": {"engine": ZeroTable(**ZERO3), **sequences(2), **EAGER},
    }
# In an interpreter of their own (`tests/backends/megatron/test_megatron.py`).
FUSED_NORMS = {"transformer_impl": "transformer_engine"}
FUSED = {"bias_activation_fusion": True, "bias_dropout_fusion": True, "deterministic_mode": True}
SENT = {"batch_p2p_comm": False, "deallocate_pipeline_outputs": True}
CUT: dict[str, Any] = {"tensor_parallel": 2, "tensor_sequence_parallel": True}
MEGATRON: dict[str, dict[str, Any]] = {
    "tensor": {"engine": MegatronTable(tensor_parallel=2)},
    "pipeline": {"engine": MegatronTable(pipeline_parallel=2)},
    "data": {"engine": MegatronTable()},
    "tensor bf16": {"engine": MegatronTable(tensor_parallel=2), **BF16},
    "data bf16": {"engine": MegatronTable(), **BF16},
    "data overlapped": {"engine": MegatronTable(megatron={"overlap_grad_reduce": True, "bucket_size": 5000})},
    "tensor recompute": {"engine": MegatronTable(**CUT, megatron=FUSED), "gradient_checkpointing": True},
    "pipeline recompute": {"engine": MegatronTable(pipeline_parallel=2, megatron=SENT), "gradient_checkpointing": 1},
    "tensor critic": {"engine": MegatronTable(tensor_parallel=2), **VALUES},
    "pipeline critic": {"engine": MegatronTable(pipeline_parallel=2), **VALUES},
    "pipeline offload": {"engine": MegatronTable(pipeline_parallel=2)},
    "context recompute": {"engine": MegatronTable(context_parallel=2), "gradient_checkpointing": True},
    "4:tensor pipeline": {"engine": MegatronTable(tensor_parallel=2, pipeline_parallel=2)},
    "4:context tensor": {"engine": MegatronTable(**CUT, context_parallel=2)},
    # Of a model with experts.
    "experts": {"engine": MegatronTable(expert_parallel=2)},
    "experts, tensor": {"engine": MegatronTable(**CUT, expert_parallel=2, expert_tensor_parallel=1)},
    "experts, fused norms": {
        "engine": MegatronTable(**CUT, expert_parallel=2, expert_tensor_parallel=1, megatron=FUSED_NORMS),
    },
    "4:experts, pipeline data": {
        "engine": MegatronTable(pipeline_parallel=2, virtual_pipeline=2, expert_parallel=2),
    },
    "4:experts, context pipeline": {
        "engine": MegatronTable(context_parallel=2, pipeline_parallel=2, virtual_pipeline=2, expert_parallel=2),
    },
    "4:experts, tensor pipeline": {
        "engine": MegatronTable(**CUT, pipeline_parallel=2, expert_parallel=2, expert_tensor_parallel=1)
    },
}
# What one rank can show of an engine; on a GPU held against `ddp` on the CPU.
SEVERAL = {"replicas", "sequences"}
ON_ONE_RANK = [name for name in CASES if name[1] != ":" and name != "ddp bf16" and not SEVERAL & set(name.split())]
FUSED_ON_GPU: dict[str, dict[str, Any]] = {}
if find_spec("liger_kernel") is not None:
    FUSED_ON_GPU["ddp liger"] = {"engine": DdpTable(kernels="liger")}
    FUSED_ON_GPU["ddp liger bf16"] = {"engine": DdpTable(kernels="liger"), **BF16}
GPU_BF16: dict[str, Any] = {"model": {"dtype": "bf16", "device": "cuda"}}
MEGATRON_ON_GPU: dict[str, dict[str, Any]] = {
    "local layers": {"engine": MegatronTable(megatron={"transformer_impl": "local"}), **GPU_BF16},
    "fused layers": {"engine": MegatronTable(megatron=FUSED_NORMS), **GPU_BF16},
    "layers by themselves": {"engine": MegatronTable(), **GPU_BF16},
}
STEPS = 3
EMPTY_STEP, UNEVEN_STEP = 1, 2
LOSS = {"corrected": True, "kl_coef": 0.1, "entropy_coef": 0.01, "loss_aggregation": "seq-mean-token-mean"}


class OffloadsAll(Offloader):
    """offloads what lies in host memory too, so that offload has something to do on a machine without a GPU."""

    def _stays(self, tensor: torch.Tensor) -> bool:
        return False


def shares(step: int, rank: Rank) -> tuple[Batch, list[int]]:
    """The batch of a step, and which of its sequences are this rank's."""
    batch = make_batch(1 if step == EMPTY_STEP else 12, seed=step)
    batch = batch.with_columns(value_T=batch["ref_logprob_T"] + 3, return_T=batch["advantage_T"])
    if step == UNEVEN_STEP and rank.world_size > 1:
        return batch, [list(range(11)), [11], [], []][rank.rank]
    return batch, shards(SequenceWork.of(batch), rank.world_size)[rank.rank].tolist()


def loss_of(engine: Any, step: int) -> AnyLoss:
    """Where ranks differ in work, one that makes a pass without gradients first."""
    if engine.config.model.head == "value":
        return ValueLoss(value_clip=0.3, loss_aggregation=LOSS["loss_aggregation"])
    return gspo(**LOSS) if step in (EMPTY_STEP, UNEVEN_STEP) else grpo(**LOSS)


def step_of(engine: TrainEngine, step: int, rank: Rank, between: Callable[[], None]) -> dict[str, Any]:
    """An optimizer step; `between`: what happens before gradients are used."""
    batch, mine = shares(step, rank)
    part = batch.select(mine)
    told_T = told(engine, part)
    sums = engine.forward_backward(part, loss_of(engine, step), scale_of(batch))
    between()
    result = engine.optim_step()
    return {
        "loss": sums["loss"],
        "micro_batches": sums["micro_batches"],
        "grad_norm": result.grad_norm,
        "skipped": result.skipped,
        "told": dict(zip(batch.token_index(np.array(mine, dtype=np.int64)).tolist(), told_T.tolist(), strict=True)),
    }


def told(engine: Any, batch: Batch) -> Any:
    """Log-probs, or a critic's values."""
    return engine.values(batch) if engine.config.model.head == "value" else engine.forward(batch)


def proof(engine: Any, rank: Rank) -> list[Any]:
    """What is the same on all ranks: greedy tokens, or, put together from ranks that differ in work, scores."""
    if engine.config.model.head == "lm":
        return [answer.tokens for answer in engine.greedy([[1, 2, 3], [4]], 4)]
    batch, mine = shares(UNEVEN_STEP, rank)
    own = dict(zip(mine, engine.scores(batch.select(mine)).tolist(), strict=True))
    everyone: list[Any] = [own] * rank.world_size
    if rank.world_size > 1:
        torch.distributed.all_gather_object(everyone, own)
    scores = {i: score for each in everyone for i, score in each.items()}
    return [scores[i] for i in sorted(scores)]


def bad_step(engine: TrainEngine, rank: Rank) -> bool:
    """One rank alone sees a number that is not finite. Whether this rank skipped the step."""
    batch, mine = shares(0, rank)
    if rank.rank == rank.world_size - 1:
        batch["advantage_T"][:] = float("inf")
        batch["return_T"][:] = float("inf")
    engine.forward_backward(batch.select(mine), loss_of(engine, 0), scale_of(batch))
    return engine.optim_step().skipped


def offload_and_back(engine: Any) -> None:
    """Twice each way, as it must be safe; in between nothing may be left in memory."""
    engine.offloading = OffloadsAll()
    storages = [shard.flat.untyped_storage() for shard in (*engine._weight_shards(), *engine._moment_shards())]
    assert sum(storage.nbytes() for storage in storages) > 0
    engine.offload()
    engine.offload()
    assert sum(storage.nbytes() for storage in storages) == 0
    engine.onload()
    engine.onload()


def train(engine: TrainEngine, job: dict[str, Any], rank: Rank) -> dict[str, Any]:
    between = (lambda: offload_and_back(engine)) if job.get("offload") else (lambda: None)
    history = [step_of(engine, step, rank, between) for step in range(STEPS)]
    checksum = engine.built().weights_checksum
    skipped = bad_step(engine, rank)
    state = Path(job["out"]) / "state"
    state.mkdir(parents=True, exist_ok=True)
    engine.save(state)
    return {"history": history, "checksum": checksum, "skipped": skipped}


def resume(engine: TrainEngine, folder: Path) -> dict[str, Any]:
    engine.load(folder)
    return {"history": [], "checksum": engine.built().weights_checksum}


# What an export may call, and which argument is this rank's.
COLLECTIVES = {"_c10d_functional::all_gather_into_tensor": 0, "c10d::_allgather_base_": 1, "c10d::allreduce_": 0}


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank hands to collectives."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # seen again, as what it does to this rank's rows
        if (position := COLLECTIVES.get(func.name())) is not None:
            given = args[position]
            self.nbytes += sum(tensor.nbytes for tensor in (given if isinstance(given, list) else [given]))
        return func(*args, **(kwargs or {}))


def export_in_bf16(engine: TrainEngine, form: WeightForm = "merged") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Whether an export in bf16 is the one in fp32, cast, and what each sent; and the weights in fp32."""
    with Sent() as in_fp32:
        weights = weights_of(engine, form=form)
    with Sent() as in_bf16:
        bf16 = weights_of(engine, "bf16", form)
    same = weights.keys() == bf16.keys()
    for name, value in weights.items():
        cast = torch.from_numpy(value).to(torch.bfloat16).view(-1).view(torch.uint8)
        same = same and bool((cast == torch.from_numpy(bf16[name])).all())
    return {"same": same, "sent": [in_fp32.nbytes, in_bf16.nbytes]}, weights


def objective_steps(engine: Any, rank: Rank) -> list[dict[str, float]]:
    """Optimizer steps with objectives: all ranks have units, one alone has one, one has all but one. Sums that the
    ranks report, those of an evaluation before, and the norm."""
    pairs = [objective("mixture", mixture=[{"kind": "dpo"}, {"kind": "nll"}]), objective("orpo"), objective("kto")]
    if engine.config.model.head == "value":
        pairs = [objective("bradley_terry", center_coef=0.1)] * 3
    found = []
    for step, given in enumerate([*pairs, objective("dft")] if engine.config.model.head == "lm" else pairs):
        batch = make_units(1 if step == 1 else 7, seed=step)
        if given.unit == "sequence":
            batch = Batch({**batch.columns, "unit_B": np.arange(len(batch))})
        mine = unit_shards(SequenceWork.of(batch), batch["unit_B"], rank.world_size)[rank.rank]
        if step == 2 and rank.world_size > 1:
            mine = [np.arange(12), np.array([12, 13]), *[np.zeros(0, dtype=np.int64)] * 2][rank.rank]
        asked = batch.select(mine).only(given.columns), given, unit_scale(batch)
        measured, sums = engine.evaluate(*asked), engine.forward_backward(*asked)
        assert measured == sums, "the same numbers without gradients"
        known = {name: sums[name] for name in (*given.summed(), *UNIT_SUMS) if name in sums}
        found.append({**known, "grad_norm": engine.optim_step().grad_norm / rank.world_size})
    return found


def run(model: Path, job: dict[str, Any], rank: Rank) -> TrainEngine:
    """Job: `case`; `out`: folder for what it leaves; `load`: state to resume after `STEPS` steps (absent: train them);
    `offload`: whether to leave the device in every step; `model`: if not the one given; `device`: if not the CPU. One
    more step follows."""
    model = Path(job.get("model", model))
    case = (CASES | MEGATRON | MEGATRON_ON_GPU | FUSED_ON_GPU)[job["case"]]
    given = {**case.get("model", {}), **({"device": job["device"]} if "device" in job else {})}
    config = train_config(model, **{"micro_batch_tokens": MICRO_BATCH_TOKENS, **case, "model": given})
    engine = train_engine(config.engine.kind).build(config, rank)
    policy: Any = engine.policy  # type: ignore[attr-defined]
    if policy.offload is not None:
        policy.offload.smallest_bytes = 0
    built = engine.built()
    report = resume(engine, Path(job["load"])) if "load" in job else train(engine, job, rank)
    unchanged = engine.built().weights_checksum == report["checksum"]
    proven = proof(engine, rank)
    report["history"].append(step_of(engine, STEPS, rank, lambda: None))
    report["bf16"], weights = export_in_bf16(engine)
    end = engine.built().weights_checksum
    out = Path(job["out"])
    out.mkdir(parents=True, exist_ok=True)
    if rank.rank == 0:
        np.savez(out / "weights.npz", **weights)
    start = out.with_name("one rank critic" if engine.config.model.head == "value" else "one rank") / "state"  # type: ignore[attr-defined]
    if not {"load", "model"} & job.keys() and config.model.dtype == "fp32" and start.exists():
        engine.load(start)
        report["objectives"], weights = objective_steps(engine, rank), weights_of(engine)
        if rank.rank == 0:
            np.savez(out / "objectives.npz", **weights)
    report |= {"mesh": built.mesh, "options": built.options, "unchanged": unchanged, "proof": proven, "end": end}
    (out / f"rank{rank.rank}.json").write_text(json.dumps(report))
    return engine


def run_family(job: dict[str, Any], rank: Rank) -> None:
    """Job: `case`; `family`: the folder of its model; `out`. One step of the plain policy gradient."""
    case = CASES[job["case"]]
    model = {**case.get("model", {}), "from_scratch": False}
    given = {**case, "model": model, "optimizer": ADAM, "temperature": TEMPERATURE}
    config = train_config(Path(job["family"]), **given)
    engine = train_engine(config.engine.kind).build(config, rank)
    batch, out = family_batch(), Path(job["out"])
    mine = shards(SequenceWork.of(batch), rank.world_size)[rank.rank]
    part = batch.select(mine.tolist())
    (out / "state").mkdir(parents=True, exist_ok=True)
    np.savez(out / f"rank{rank.rank}.npz", token_N=batch.token_index(mine), logprob_N=engine.forward(part))
    engine.forward_backward(part, grpo(anchor="current"), scale_of(batch))
    engine.optim_step()
    engine.save(out / "state")
    weights = weights_of(engine)
    written = engine.greedy(PROMPTS, 4) if job["case"] in EXPORTED else []
    if rank.rank == 0:
        np.savez(out / "weights.npz", **weights)
        answers = [{"tokens": answer.tokens, "margins": answer.margins} for answer in written]
        (out / "state" / "greedy_proof.json").write_text(json.dumps({"prompts": PROMPTS, "answers": answers}))


def keep_what_lives() -> None:
    """Collect garbage, and leave what is not garbage out of every later collection: engines ask for full ones, which
    would walk through all modules of torch, transformers and DeepSpeed each time."""
    gc.collect()
    gc.freeze()


def share_gpus(rank: Rank) -> None:
    """Where there are fewer than ranks: NCCL refuses two ranks of one host on one GPU, so each is on a host of its
    own."""
    if torch.cuda.device_count() < rank.world_size:
        os.environ["NCCL_HOSTID"] = f"rank{rank.rank}"


def main(jobs_file: Path) -> None:
    rank = Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    share_gpus(rank)
    given = json.loads(jobs_file.read_text())
    for job in given["jobs"]:
        keep_what_lives()
        if "family" in job:
            run_family(job, rank)
        else:
            run(Path(given["model"]), job, rank)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

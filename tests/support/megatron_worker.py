"""Ranks of the tests of the engine `megatron`, in the interpreter that has Megatron-core.

Megatron-core is imported once, and every rank of every launch is a fork: importing it in each would take as long as
their work. Jobs: those of `sharded_worker.run`, or a family's model: what is read is exported at once.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(Path(__file__).parent), str(root)]

import sharded_worker
from sharded_worker import MEGATRON
from stock_model import PROMPTS, TEMPERATURE, family_batch
from train_helpers import VOCAB, grpo, scale_of, train_config, weights_of

from backends.megatron.megatron_start import import_megatron
from backends.protocol import Rank, StepResult
from backends.registry import train_engine
from specs.errors import ModelError
from specs.schema.engines.megatron_table import MegatronTable
from specs.wire.role_config import TrainConfig
from workers.watchdog import die_with_parent


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


def kept(job: dict[str, Any], rank: Rank) -> None:
    """Job: `kept`: the folder of a model; `options` of Megatron-core; `out`. Bytes that autograd keeps of one row, less
    weights, and its tokens."""
    from memory_peaks import full_batch

    given = {"engine": MegatronTable(megatron=job["options"]), "model": {"dtype": "bf16"}, "micro_batch_tokens": 1024}
    engine: Any = train_engine("megatron").build(train_config(Path(job["kept"]), **given), rank)
    weights = {weight.untyped_storage().data_ptr() for weight in engine.core.chunks[0].parameters()}
    batch, storages = full_batch(1024, 64, VOCAB), dict[int, Any]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage  # which lives, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.forward_backward(batch, grpo(anchor="current"), scale_of(batch))
    nbytes = sum(storage.nbytes() for storage in storages.values())
    Path(job["out"]).write_text(json.dumps([nbytes, 1024 - 1024 // 64]))  # nothing is computed of last tokens


def layers_of(case: str) -> AbstractContextManager[None]:
    """Where there is no GPU, TransformerEngine's are computed by Megatron-core's own."""
    if case not in MEGATRON or "transformer_impl" not in MEGATRON[case]["engine"].megatron:
        return nullcontext()
    from fused_layers import instead_of_transformer_engine

    return instead_of_transformer_engine()


def copies_of_the_model(processes: int) -> dict[str, list[list[int]]]:
    """Case → the ranks of each copy, as Megatron numbers those that hold a model together."""
    from megatron.core.parallel_state import RankGenerator

    found = {}
    for name, case in MEGATRON.items():
        table = case["engine"]
        replicas = table.mesh(processes).replicate
        if table.group * replicas == processes:
            order = RankGenerator(
                tp=table.tensor_parallel,
                ep=1,
                dp=replicas,
                pp=table.pipeline_parallel,
                cp=table.context_parallel,
                order=table.order,
            )
            found[name] = order.get_ranks("tp-cp-pp")
    return found


def own_options() -> list[str]:
    """Return what is said of options that a spec adds; "" where they are taken."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from backends.megatron.own_options import check_options, with_options

    def config(role: str, **options: Any) -> TrainConfig:
        learns = role == "actor"
        table = MegatronTable(megatron=options)
        return train_config(Path(), role=role, engine=table, **({} if learns else {"optimizer": None}))

    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    calls: list[Callable[[], Any]] = [
        lambda: check_options(config("actor", overlap_grad_reduce=True, bias_dropout_fusion=True)),
        lambda: check_options(config("actor", deallocate_pipeline_output=True)),
        lambda: check_options(config("actor", bias_dropout_fusion=1)),
        lambda: check_options(config("ref", overlap_grad_reduce=True)),
        lambda: with_options(TransformerConfig, shape, {"hidden_size": 64}),
        lambda: with_options(TransformerConfig, {**shape, "tensor_model_parallel_size": 2}, {"num_query_groups": 3}),
    ]
    return [said(call) for call in calls]


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except ModelError as error:
        return error.message
    return ""


def forget_groups() -> None:
    """Megatron-core drops its groups when it makes others, but torch keeps them, and each has two threads: without
    this, the twentieth engine has a thousand of them beside it, and most of the time is theirs."""
    from megatron.core import parallel_state
    from torch.distributed import distributed_c10d as c10d

    if not torch.distributed.is_initialized():
        return
    parallel_state.destroy_model_parallel()
    sharded_worker.keep_what_lives()
    torch.distributed.barrier()
    for group in [*c10d._world.pg_map]:
        if group is not c10d.GroupMember.WORLD:
            torch.distributed.destroy_process_group(group)


def work(jobs_file: Path, rank: Rank) -> None:
    given = json.loads(jobs_file.read_text())
    for job in given["jobs"]:
        forget_groups()
        if "family" in job:
            read_family(job, rank)
            continue
        if "kept" in job:
            kept(job, rank)
            continue
        if job["case"].endswith("offload"):
            sharded_worker.offload_and_back = offload_and_back
            job["offload"] = True
        with layers_of(job["case"]):
            sharded_worker.run(Path(given["model"]), job, rank)
    if rank.rank == 0:
        facts = {"copies": copies_of_the_model(16), "own options": own_options()}
        jobs_file.with_name("megatron_facts.json").write_text(json.dumps(facts))
    torch.distributed.destroy_process_group()


def fork(jobs_file: Path, rank: Rank, port: int) -> int:
    """Return the pid of the rank, which works through the jobs and exits with 0."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        die_with_parent()
        sharded_worker.share_gpus(rank)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank.rank), "WORLD_SIZE": str(rank.world_size), "LOCAL_RANK": str(rank.rank)}
        work(jobs_file, rank)
        code = 0
    except BaseException:  # the edge of the process
        print(f"[rank {rank.rank}] {traceback.format_exc()}".replace("\n", f"\n[rank {rank.rank}] "), file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)


def launch(processes: int, jobs_file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pids = [fork(jobs_file, Rank(number, processes, number), port) for number in range(processes)]
    if any([os.waitpid(pid, 0)[1] for pid in pids]):  # all are waited for
        sys.exit(f"a rank of {jobs_file} failed")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        import_megatron("cpu")
    sharded_worker.keep_what_lives()
    for number, path in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        launch(int(number), Path(path))

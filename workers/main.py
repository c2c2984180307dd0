"""The process of a role: `python -m workers.main --role actor`, started by the driver, by torchrun, or by anything else
that sets the same environment.

    RLCTL_ADDRESS                 address of the driver
    RLCTL_SECRET                  CURVE secret key of this run's ranks
    RLCTL_CURVE_KEY               CURVE public key of the driver
    RLCTL_RANK, RLCTL_SIZE        place among the role's processes; else RANK and WORLD_SIZE, as torchrun and deepspeed
                                  set them, else SLURM_PROCID and SLURM_NTASKS
    RLCTL_START                   how often this rank was started before; else 0
    RLCTL_LOCAL_SIZE              how many of them are on this host
    RLCTL_SPAN                    folder in which the nodes of a rank that spans RLCTL_SPAN_NODES find one another; with
                                  RLCTL_SPAN_NODE above 0 this process is no rank, it holds that node's part of one
    RLCTL_GROUP_STORE             file in which ranks that are all on one host meet; else at MASTER_ADDR:MASTER_PORT
    RLCTL_GROUP_SIZE              1 for independent replicas (rollout, reward): RANK and WORLD_SIZE are then hidden
    RLCTL_PARENT_PID              the driver, or its deputy on this host: the rank exits when that process ends
    RLCTL_DEVICES                 replaces CUDA_VISIBLE_DEVICES if the launcher overwrote it
    RLCTL_LOG_DIR                 redirect stdout and stderr to rank<N>.log in it
    RLCTL_DUMP_DIR                where the flight recorder of torch.distributed is dumped
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TextIO, cast

from backends import flight_recorder
from backends.protocol import Rank
from backends.replica_span import ReplicaSpan
from specs.errors import ChannelError
from specs.terminal import VisibleStream
from workers.connection import Dial, Link
from workers.network import address_towards, interface_towards
from workers.serve import Handlers, error_message, serve
from workers.watchdog import die_with_parent, set_process_name, watch_process


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.main", description="One rank of a role.")
    parser.add_argument("--role", required=True)
    parser.add_argument(
        "--module",
        default="",
        help="module:function that makes the role's handlers from its rank; default: workers.roles.<role>:handlers",
    )
    args = parser.parse_args(argv)
    gc.disable()  # until the role is built (`workers/serve.py`): a tenth of the time that its imports take
    _adopt_slurm_place()
    index, rank = place_from_env()
    _redirect_output(index)
    sys.stdout, sys.stderr = (cast(TextIO, VisibleStream(stream, log=True)) for stream in (sys.stdout, sys.stderr))
    _follow_the_driver(args.role, index)
    _see_own_device(rank.local_rank)
    _use_interface_of_group(rank)
    if rank.span is not None and rank.span.node > 0:
        os.environ.pop("RLCTL_SECRET", None)  # it does not dial
        rank.span.announce()
        import_module(f"workers.roles.{args.role}").hold_part(rank.span)
        return 1
    if rank.span is not None:
        rank.span.await_parts()
    _record_collectives(rank)
    link = Link(Dial.from_env(args.role, index))
    try:
        link.connect()
    except ChannelError as error:
        print(f"{args.role} rank {index}: {error}", file=sys.stderr, flush=True)
        return 1
    try:
        return _work(link, args.module or f"workers.roles.{args.role}:handlers", rank)
    finally:
        link.close()


def _adopt_slurm_place() -> None:
    """Under srun, set torchrun's variables from SLURM's: engines read torchrun's."""
    env = os.environ
    if "SLURM_PROCID" not in env or "RANK" in env or "RLCTL_RANK" in env:
        return
    env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"] = env["SLURM_PROCID"], env["SLURM_NTASKS"], env["SLURM_LOCALID"]
    env.pop("RLCTL_PARENT_PID", None)  # a process id on the driver's host, which need not be this host


def place_from_env() -> tuple[int, Rank]:
    """Return the index among the role's processes, and the place in the group that computes together. Independent
    replicas lose the variables of a launcher that counts them as one group, so that no engine takes them for one."""
    env = os.environ
    index = int(env.get("RLCTL_RANK", env.get("RANK", "0")))
    size = int(env.get("RLCTL_SIZE", env.get("WORLD_SIZE", "1")))
    local = int(env.get("LOCAL_RANK", str(index)))
    if int(env.get("RLCTL_GROUP_SIZE", str(size))) == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            env.pop(name, None)
        return index, Rank(rank=index, world_size=1, local_rank=local, span=_span_from_env())
    return index, Rank(rank=index, world_size=size, local_rank=local)


def _span_from_env() -> ReplicaSpan | None:
    env = os.environ
    if "RLCTL_SPAN" not in env:
        return None
    nodes, node = int(env["RLCTL_SPAN_NODES"]), int(env.get("RLCTL_SPAN_NODE", "0"))
    own = address_towards(env["RLCTL_ADDRESS"].rpartition("/")[2].rpartition(":")[0])
    return ReplicaSpan(nodes, node, own, Path(env["RLCTL_SPAN"]))


def _work(link: Link, target: str, rank: Rank) -> int:
    try:
        module, _, name = target.partition(":")
        handlers: Handlers = getattr(import_module(module), name)(rank)
    except Exception as error:  # every error is reported to the driver
        link.send(error_message(error))
        return 1
    try:
        serve(link, handlers)
    except ChannelError as error:
        print(f"channel: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _redirect_output(index: int) -> None:
    folder = os.environ.get("RLCTL_LOG_DIR")
    if not folder:
        return
    log = os.open(Path(folder) / f"rank{index}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _follow_the_driver(role: str, index: int) -> None:
    """Ignore Ctrl-C, which the driver handles; exit when the driver dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the driver requests a stack dump of a rank that missed a deadline
    set_process_name(f"rlctl-{role}{index}")
    if parent := os.environ.get("RLCTL_PARENT_PID"):
        die_with_parent()
        watch_process(int(parent))


def _see_own_device(local_rank: int) -> None:
    """Leave visible only this rank's share of the role's GPUs on this host: to every engine they count from 0. The
    share is one GPU, or those that a replica is split across."""
    if (devices := os.environ.get("RLCTL_DEVICES")) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    visible = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("RLCTL_LOCAL_SIZE", str(len(visible)))))
    if len(visible) > 1 and local_rank < processes <= len(visible):
        each = len(visible) // processes
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[local_rank * each : (local_rank + 1) * each])


def _use_interface_of_group(rank: Rank) -> None:
    """Have ranks on several hosts, and the nodes of one, meet on the network that leads to the first, or to the
    driver, not where the host's name points."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", rank.world_size))
    first = os.environ.get("MASTER_ADDR", "") if rank.span is None else rank.span.address
    if (local_size == rank.world_size and rank.span is None) or not (interface := interface_towards(first)):
        return
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface)


def _record_collectives(rank: Rank) -> None:
    """Set torch's variables for recording collectives, before it is imported."""
    folder = os.environ.get("RLCTL_DUMP_DIR")
    if folder and rank.world_size > 1:
        for name, value in flight_recorder.environment(Path(folder)).items():
            os.environ.setdefault(name, value)


if __name__ == "__main__":
    sys.exit(main())

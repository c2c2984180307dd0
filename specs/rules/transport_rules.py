"""Choose the transport of the weights, by where the actor and the rollouts are; find transports that cannot work."""

from __future__ import annotations

import re
from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.rank_groups import hosts_of_rank
from specs.schema.recipes import SamplingSpec
from specs.schema.roles import ACTOR, ROLLOUT
from specs.schema.spec import TransportKind
from specs.text import show

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # of torch's memory on a GPU


def same_host(spec: SamplingSpec) -> bool:
    """Return whether every replica is on the host of the actor's rank 0, which is the driver's."""
    return not any(hosts_of_rank(spec.rollout, rank)[0] for rank in range(spec.rollout.processes))


def choose_transport(spec: SamplingSpec) -> tuple[TransportKind, str]:
    """Return the transport of a run, and why in a few words."""
    if spec.sync.transport != "auto":
        return spec.sync.transport, "as asked"
    if not same_host(spec):
        return "folder", "some replicas are on other hosts"
    if not (spec.actor.devices or spec.rollout.devices):
        return "shm", "actor and rollout share a host"
    # CUDA IPC spares the way over the host, and takes expandable segments from the actor, whose memory then fragments;
    # NCCL has not been run yet.
    return "shm", "actor and rollout share a host; the transports between GPUs are there when asked for"


def transport_problems(spec: SamplingSpec) -> Iterator[Problem]:
    """Yield transports that cannot work for this placement, and keys of another transport."""
    sync, (transport, _) = spec.sync, choose_transport(spec)
    if transport == "shm" and not same_host(spec):
        message = "shared memory stays on one host, and some replicas are on others"
        yield Problem("sync.transport", message, 'write "folder" or "auto"')
    if transport == "cuda_ipc":
        yield from _cuda_ipc(spec)
    if transport == "folder" and not same_host(spec) and re.match(r"/(?:dev/shm|run)(?:/|$)", sync.folder):
        message = "is memory of one host, and some replicas are on others"
        yield Problem("sync.folder", message, "name a folder that all hosts see")
    for key, given in (("folder", "folder" in sync.model_fields_set), ("delta", sync.delta)):
        if given and transport != "folder":
            hint = 'set sync.transport = "folder", or remove the key'
            yield Problem(f"sync.{key}", f'has no effect: the transport is "{transport}"', hint)
    if "bucket_MiB" in sync.model_fields_set and transport == "shm":
        message = 'has no effect: the transport is "shm", on which weights do not travel in buckets'
        yield Problem("sync.bucket_MiB", message, "remove the key, or choose another sync.transport")


def _cuda_ipc(spec: SamplingSpec) -> Iterator[Problem]:
    """Yield why memory of a GPU cannot be shared: of another GPU, or in expandable segments, which are shared by a file
    descriptor taken out of the other process, as containers forbid."""
    on_cpu = [role for role in (ACTOR, ROLLOUT) if not spec.role(role).devices]
    if on_cpu:
        message = f"shares memory of a GPU, and the {on_cpu[0]} runs on the CPU"
        yield Problem("sync.transport", message, 'write "shm" or "auto"')
    elif spec.rollout.devices != spec.actor.devices[:1] or not same_host(spec):
        message = "joins one rollout with the actor's rank 0 on one GPU; rank 0 is on "
        message += f"{spec.actor.devices[0]}, the rollouts on {show(spec.rollout.devices)}"
        yield Problem("sync.transport", message, 'write "group" for GPUs apart, "shm" or "auto"')
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in spec.actor.env.get(name, "").lower():
            message = "memory in expandable segments cannot be shared with the rollout"
            yield Problem(
                f"actor.env.{name}", message, 'leave expandable_segments out, or write sync.transport = "shm"'
            )

"""Which road weights take from the actor to the rollouts, from where both are; and roads that cannot lead there."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import Problem
from specs.explain import show
from specs.schema import RoadKind, Spec


def same_host(spec: Spec) -> bool:
    """Whether every replica is on the host of the actor's rank 0, which is the driver's."""
    return spec.rollout.nodes == 1


def same_gpu(spec: Spec) -> bool:
    """Whether the only replica sits on the GPU of the actor's rank 0, from which all weights come."""
    return bool(spec.actor.devices) and spec.rollout.devices == spec.actor.devices[:1] and same_host(spec)


def choose_road(spec: Spec) -> tuple[RoadKind, str]:
    """The road of a run, and why in a few words."""
    if spec.sync.road != "auto":
        return spec.sync.road, "as asked"
    if not same_host(spec):
        return "folder", "the rollouts are on several hosts"
    if not (spec.actor.devices or spec.rollout.devices):
        return "shm", "actor and rollout share a host"
    # CUDA IPC and NCCL would spare the way over the host, but have not been run yet.
    return "shm", "actor and rollout share a host; the roads between GPUs are there when asked for"


def road_problems(spec: Spec) -> Iterator[Problem]:
    """Roads that cannot work for this placement, and keys of another road."""
    sync, (road, _) = spec.sync, choose_road(spec)
    if road == "shm" and not same_host(spec):
        message = f"shared memory stays on one host, and the rollouts are on {spec.rollout.nodes}"
        yield Problem("sync.road", message, 'write "folder" or "auto"', show(sync.road))
    if road == "cuda_ipc" and not same_gpu(spec):
        yield _not_one_gpu(spec)
    if "folder" in sync.model_fields_set and road != "folder":
        message = f'has no effect: the road is "{road}"'
        yield Problem("sync.folder", message, 'set sync.road = "folder", or remove the key', show(sync.folder))
    if "bucket_MiB" in sync.model_fields_set and road == "shm":
        message = 'has no effect: the road is "shm", on which weights do not travel in buckets'
        yield Problem("sync.bucket_MiB", message, "remove the key, or choose another sync.road", show(sync.bucket_MiB))


def _not_one_gpu(spec: Spec) -> Problem:
    on_cpu = [role for role in ("actor", "rollout") if not spec.role(role).devices]
    if on_cpu:
        message = f"shares memory of a GPU, and the {on_cpu[0]} runs on the CPU"
        return Problem("sync.road", message, 'write "shm" or "auto"', show(spec.sync.road))
    message = (
        f"joins one rollout with the actor's rank 0 on one GPU; "
        f"rank 0 is on {spec.actor.devices[0]}, the rollouts on {show(spec.rollout.devices)}"
    )
    return Problem("sync.road", message, 'write "group" for GPUs apart, "shm" or "auto"', show(spec.sync.road))

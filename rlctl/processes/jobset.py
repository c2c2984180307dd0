"""Write a run for Kubernetes: a JobSet manifest (jobset.x-k8s.io/v1alpha2) with a pod for each host of a spec.

The driver's pod is the first host. The others wait in theirs until the driver opens a shell there with `kubectl exec`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from specs.errors import UsageError
from specs.schema.roles import ROLES
from specs.schema.spec import Spec

REMOTE_SHELL = '["kubectl", "exec", "-i", "job/{host}", "--", "sh"]'
SHARED = "/shared"  # where the claim is mounted in every pod
DRIVER = "driver"
_TEMPLATE = Path(__file__).with_name("jobset.yaml.j2")
_LONGEST_NAME = 40  # with a job's name and two numbers behind it, still a DNS label


@dataclass(frozen=True)
class Pods:
    """Pods that are alike, one for each of `hosts` (numbers of the spec's hosts). `slots`: ranks of a role that fit."""

    name: str
    hosts: range
    gpus: int
    slots: int


def manifest_name(spec_file: Path) -> str:
    """Return the name of a spec's objects: a DNS label that begins with a letter, and that YAML reads as text."""
    return f"rlctl-{re.sub('[^a-z0-9]+', '-', spec_file.stem.lower())}"[:_LONGEST_NAME].strip("-")


def pods_of(spec: Spec) -> list[Pods]:
    """Return a spec's hosts as pods, the driver's first. Raise UsageError for a spec that pods cannot run."""
    sections = spec.sections()
    for role, section in sections:
        if section.launcher == "srun":
            hint = f'write {role}.launcher = "torchrun", or use --launcher slurm'
            raise UsageError(f'--launcher kubernetes: {role}.launcher is "srun"', hint=hint)
    trained = max(section.hosts.stop for role, section in sections if ROLES[role].together)
    stop = max(section.hosts.stop for _, section in sections)
    for number in range(stop):
        if not any(number in section.hosts for _, section in sections):
            hint = f"set rollout.first_node = {trained}"
            raise UsageError(f"--launcher kubernetes: no role is on host {number + 1} of {stop}", hint=hint)

    def alike(name: str, hosts: range) -> Pods:
        here = [section for _, section in sections if set(section.hosts) & set(hosts)]
        gpus = 1 + max((number for section in here for number in section.devices), default=-1)
        slots = max(section.processes // section.nodes for section in here)
        return Pods(name, hosts, gpus, max(gpus, slots))

    groups = [(DRIVER, range(1)), ("trainers", range(1, trained)), ("samplers", range(trained, stop))]
    return [alike(name, hosts) for name, hosts in groups if hosts]


def job_names(name: str, pods: Sequence[Pods]) -> list[tuple[str, int]]:
    """Return per host, in the spec's order, the Job that JobSet makes for it, and its slots."""
    return [(f"{name}-{one.name}-{index}", one.slots) for one in pods for index in range(len(one.hosts))]


def manifest(spec: Spec, spec_file: Path, manifest_file: Path) -> str:
    """Return the YAML of `manifest_file` for a run of `spec`. Raise UsageError for a spec that pods cannot run."""
    name, pods = manifest_name(spec_file), pods_of(spec)
    ordered = [*pods[1:], pods[0]]  # the driver starts when the others are ready
    before = {after.name: first.name for first, after in pairwise(ordered)}
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        name=name,
        spec_file=shlex.quote(spec_file.name),
        manifest_file=shlex.quote(manifest_file.name),
        shared=SHARED,
        several=len(pods) > 1,
        pods=ordered,
        before=before,
        driver=DRIVER,
        hosts=job_names(name, pods),
        run_dir=f"{SHARED}/runs/{spec.run.name}",
        remote_shell=shlex.quote(f"cluster.remote_shell={REMOTE_SHELL}"),
    )

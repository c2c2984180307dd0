"""A run on Kubernetes: a JobSet manifest (jobset.x-k8s.io/v1alpha2) with a pod for each host of a spec.

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
_LONGEST_NAME = 40  # with a job's name and two numbers behind it, still a DNS label


@dataclass(frozen=True)
class Pods:
    """Pods that are alike, one for each of `hosts` (numbers of the spec's hosts). `slots`: ranks of a role that fit."""

    name: str
    hosts: range
    gpus: int
    slots: int


def manifest_name(spec_file: Path) -> str:
    """What the objects of a spec are called: a DNS label that begins with a letter, and that YAML reads as text."""
    return f"rlctl-{re.sub('[^a-z0-9]+', '-', spec_file.stem.lower())}"[:_LONGEST_NAME].strip("-")


def pods_of(spec: Spec) -> list[Pods]:
    """A spec's hosts as pods, the driver's first. Raises UsageError for a spec that pods cannot run."""
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
    """Per host, in the spec's order, the Job that JobSet makes for it, and its slots."""
    return [(f"{name}-{one.name}-{index}", one.slots) for one in pods for index in range(len(one.hosts))]


def manifest(spec: Spec, spec_file: Path, manifest_file: Path) -> str:
    """What `manifest_file` holds, for a run of `spec`: YAML. Raises UsageError for a spec that pods cannot run."""
    name, pods = manifest_name(spec_file), pods_of(spec)
    ordered = [*pods[1:], pods[0]]  # the driver starts when the others are ready
    before = {after.name: first.name for first, after in pairwise(ordered)}
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(_MANIFEST).render(
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


_MANIFEST = """\
# One run of {{ spec_file }} on Kubernetes, with JobSet (https://jobset.sigs.k8s.io) 0.8 or newer in the cluster.
#
#     kubectl create configmap {{ name }}-spec --from-file=spec.toml={{ spec_file }}
#     kubectl create secret generic {{ name }}-tokens --from-literal=HF_TOKEN=...    # tokens; may be left out
#     kubectl apply -f {{ manifest_file }}
#     kubectl logs -f job/{{ name }}-{{ driver }}-0
#
# Again, or on after an end: kubectl delete jobset {{ name }}, then apply. A run that is on the claim is resumed.
# Pods and GPUs are those of the spec when this file was written: write it again when its nodes or devices change.
#
# Fill in: IMAGE, once: rlctl with its engines, and bash{{ ", kubectl" if several }}; the claim's size and class.
# Paths of the spec begin at {{ shared }}, which is the claim: put data, reward files and interpreters there.
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ name }}
spec:
  accessModes: [{{ "ReadWriteMany" if several else "ReadWriteOnce" }}]
  # storageClassName: NAME
  resources:
    requests:
      storage: 500Gi
---
# Ranks talk to each other without encryption: nobody else may reach them.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ name }}
spec:
  podSelector:
    matchLabels:
      jobset.sigs.k8s.io/jobset-name: {{ name }}
  policyTypes: [Ingress]
  ingress:
    - from:
        - podSelector:
            matchLabels:
              jobset.sigs.k8s.io/jobset-name: {{ name }}
---
{% if several %}
# The driver enters the other pods with kubectl exec. Its token opens every pod of this namespace, and reward functions
# run beside it: give runs a namespace of their own.
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ name }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ name }}
rules:
  - apiGroups: [batch]
    resources: [jobs]
    verbs: [get]
  - apiGroups: [""]
    resources: [pods]
    verbs: [get, list, watch]
  - apiGroups: [""]
    resources: [pods/exec]
    verbs: [get, create]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ name }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ name }}
subjects:
  - kind: ServiceAccount
    name: {{ name }}
---
{% endif %}
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {{ name }}
spec:
  network:
    enableDNSHostnames: true
    publishNotReadyAddresses: true
  successPolicy:
    operator: All
    targetReplicatedJobs: [{{ driver }}]
  failurePolicy:
    maxRestarts: 3
    rules:
      - name: badInput
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
        targetReplicatedJobs: [{{ driver }}]
  replicatedJobs:
{% for one in pods %}
    - name: {{ one.name }}
      replicas: {{ one.hosts | length }}
{% if one.name in before %}
      dependsOn:
        - name: {{ before[one.name] }}
          status: Ready
{% endif %}
      template:
        spec:
          parallelism: 1
          completions: 1
          backoffLimit: {{ 0 if one.name == driver else 6 }}
{% if one.name == driver %}
          podFailurePolicy:
            rules:
              - action: FailJob  # exit code 2 is bad input: no restart mends it
                onExitCodes:
                  containerName: rlctl
                  operator: In
                  values: [2]
{% endif %}
          template:
            spec:
              restartPolicy: Never
              shareProcessNamespace: true  # its first process reaps what ranks leave behind
{% if one.name == driver %}
              terminationGracePeriodSeconds: 120  # rlctl saves the last finished step
{% endif %}
{% if one.name == driver and several %}
              serviceAccountName: {{ name }}
{% else %}
              automountServiceAccountToken: false
{% endif %}
              containers:
                - name: rlctl
                  image: {{ "&image IMAGE" if loop.first else "*image" }}
                  workingDir: {{ shared }}
{% if one.gpus %}
                  resources:
                    limits:
                      nvidia.com/gpu: {{ one.gpus }}
{% endif %}
{% if one.name == driver %}
                  env:
                    - name: HF_HOME
                      value: {{ shared }}/huggingface
                    - name: POD_IP
                      valueFrom:
                        fieldRef:
                          fieldPath: status.podIP
                  envFrom:
                    - secretRef:
                        name: {{ name }}-tokens
                        optional: true
                  command:
                    - bash
                    - -c
                    - |
                      set -euo pipefail
                      cp /etc/rlctl/spec.toml {{ name }}.toml
                      more=()
                      [ ! -e {{ run_dir }}/resolved.json ] || more+=(--resume)
{% if several %}
                      printf '%s\\n' >{{ name }}.hosts \\
{% for host, slots in hosts %}
                          '{{ host }} slots={{ slots }}'{{ "" if loop.last else " \\\\" }}
{% endfor %}
                      exec rlctl train {{ name }}.toml --run-dir {{ run_dir }} \\
                          --set cluster.hostfile={{ shared }}/{{ name }}.hosts \\
                          --set cluster.address="$POD_IP" \\
                          --set {{ remote_shell }} \\
                          "${more[@]}"
{% else %}
                      exec rlctl train {{ name }}.toml --run-dir {{ run_dir }} "${more[@]}"
{% endif %}
{% else %}
                  command:
                    - sh
                    - -c
                    - |
                      trap 'exit 143' TERM
                      while :; do sleep 3600 & wait $!; done
{% endif %}
                  volumeMounts:
                    - name: shared
                      mountPath: {{ shared }}
                    - name: shm
                      mountPath: /dev/shm
{% if one.name == driver %}
                    - name: spec
                      mountPath: /etc/rlctl
                      readOnly: true
{% endif %}
              volumes:
                - name: shared
                  persistentVolumeClaim:
                    claimName: {{ name }}
                - name: shm  # Kubernetes leaves 64 MiB: too little for weights, and for NCCL
                  emptyDir:
                    medium: Memory
{% if one.name == driver %}
                - name: spec
                  configMap:
                    name: {{ name }}-spec
{% endif %}
{% endfor %}
"""

"""The manifest of `rlctl init --launcher kubernetes`: published schemas, the spec's placement, shell that runs.

`test_hosts.py` runs a driver's script among network namespaces.
"""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError
from running import preset
from typer.main import get_command

from rlctl.cli import Machine, app, init
from rlctl.presets import write_manifest
from rlctl.processes.jobset import manifest_name, pods_of
from rlctl.processes.placement import make_plan
from specs.errors import UsageError
from specs.load.load import load_spec

yaml = importlib.import_module("yaml")  # comes with transformers

# ── the fields that the manifest uses, as Kubernetes' API and JobSet's CRD publish them ─────────────

Label = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Count = Annotated[int, Field(ge=0, strict=True)]
Choice = Annotated[int, Field(ge=1, strict=True)]


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Meta(Fields):
    name: Label


class Requests(Fields):
    storage: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*[KMGTP]i$")]


class ClaimResources(Fields):
    requests: Requests


class ClaimSpec(Fields):
    accessModes: list[Literal["ReadWriteOnce", "ReadWriteMany"]] = Field(min_length=1)
    resources: ClaimResources


class Claim(Fields):
    apiVersion: Literal["v1"]
    kind: Literal["PersistentVolumeClaim"]
    metadata: Meta
    spec: ClaimSpec


class Selector(Fields):
    matchLabels: dict[str, Label] = Field(min_length=1)


class Peer(Fields):
    podSelector: Selector


class IngressRule(Fields):
    from_: list[Peer] = Field(alias="from", min_length=1)


class PolicySpec(Fields):
    podSelector: Selector
    policyTypes: list[Literal["Ingress", "Egress"]]
    ingress: list[IngressRule]


class Policy(Fields):
    apiVersion: Literal["networking.k8s.io/v1"]
    kind: Literal["NetworkPolicy"]
    metadata: Meta
    spec: PolicySpec


class Account(Fields):
    apiVersion: Literal["v1"]
    kind: Literal["ServiceAccount"]
    metadata: Meta


class Rule(Fields):
    apiGroups: list[str]
    resources: list[str]
    verbs: list[Literal["get", "list", "watch", "create"]]


class Role(Fields):
    apiVersion: Literal["rbac.authorization.k8s.io/v1"]
    kind: Literal["Role"]
    metadata: Meta
    rules: list[Rule]


class RoleRef(Fields):
    apiGroup: Literal["rbac.authorization.k8s.io"]
    kind: Literal["Role"]
    name: Label


class Subject(Fields):
    kind: Literal["ServiceAccount"]
    name: Label


class Binding(Fields):
    apiVersion: Literal["rbac.authorization.k8s.io/v1"]
    kind: Literal["RoleBinding"]
    metadata: Meta
    roleRef: RoleRef
    subjects: list[Subject]


class Limits(Fields):
    gpus: Choice = Field(alias="nvidia.com/gpu")


class Resources(Fields):
    limits: Limits


class FieldRef(Fields):
    fieldPath: Literal["status.podIP"]


class ValueFrom(Fields):
    fieldRef: FieldRef


class Variable(Fields):
    name: str
    value: str | None = None
    valueFrom: ValueFrom | None = None


class SecretRef(Fields):
    name: Label
    optional: bool = False


class FromSecret(Fields):
    secretRef: SecretRef


class Mount(Fields):
    name: Label
    mountPath: Annotated[str, StringConstraints(pattern="^/")]
    readOnly: bool = False


class Container(Fields):
    name: Label
    image: str
    command: list[str]
    workingDir: str
    volumeMounts: list[Mount]
    resources: Resources | None = None
    env: list[Variable] = []
    envFrom: list[FromSecret] = []


class ClaimName(Fields):
    claimName: Label


class EmptyDir(Fields):
    medium: Literal["", "Memory"]


class Volume(Fields):
    name: Label
    persistentVolumeClaim: ClaimName | None = None
    emptyDir: EmptyDir | None = None
    configMap: Meta | None = None


class PodSpec(Fields):
    restartPolicy: Literal["Never", "OnFailure"]  # all that a Job takes; podFailurePolicy asks for Never
    shareProcessNamespace: bool
    containers: list[Container] = Field(min_length=1)
    volumes: list[Volume]
    serviceAccountName: Label | None = None
    automountServiceAccountToken: bool = True
    terminationGracePeriodSeconds: Count = 30


class PodTemplate(Fields):
    spec: PodSpec


class ExitCodes(Fields):
    containerName: Label
    operator: Literal["In", "NotIn"]
    values: list[int] = Field(min_length=1, max_length=255)


class PodRule(Fields):
    action: Literal["FailJob", "FailIndex", "Ignore", "Count"]
    onExitCodes: ExitCodes


class PodFailurePolicy(Fields):
    rules: list[PodRule] = Field(max_length=20)


class JobSpec(Fields):
    parallelism: Count
    completions: Count
    backoffLimit: Count
    template: PodTemplate
    podFailurePolicy: PodFailurePolicy | None = None


class JobTemplate(Fields):
    spec: JobSpec


class DependsOn(Fields):
    name: Label
    status: Literal["Ready", "Complete"]


class ReplicatedJob(Fields):
    name: Label
    replicas: Choice
    template: JobTemplate
    dependsOn: list[DependsOn] = Field([], max_length=1)  # more only in the newest versions


class Network(Fields):
    enableDNSHostnames: bool
    publishNotReadyAddresses: bool


class SuccessPolicy(Fields):
    operator: Literal["All", "Any"]
    targetReplicatedJobs: list[Label]


class FailureRule(Fields):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    action: Literal["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
    onJobFailureReasons: list[Literal["BackoffLimitExceeded", "DeadlineExceeded", "PodFailurePolicy"]]
    targetReplicatedJobs: list[Label]


class FailurePolicy(Fields):
    maxRestarts: Count
    rules: list[FailureRule]


class JobSetSpec(Fields):
    network: Network
    successPolicy: SuccessPolicy
    failurePolicy: FailurePolicy
    replicatedJobs: list[ReplicatedJob] = Field(min_length=1)


class JobSet(Fields):
    apiVersion: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Meta
    spec: JobSetSpec


PUBLISHED: TypeAdapter[Any] = TypeAdapter(
    Annotated[Claim | Policy | Account | Role | Binding | JobSet, Field(discriminator="kind")]
)

# ── what a manifest says ──────────────────────────────────────────────────────────────────────────


def objects_in(file: Path) -> list[Any]:
    return [PUBLISHED.validate_python(one) for one in yaml.safe_load_all(file.read_text())]


def jobs_in(file: Path) -> dict[str, ReplicatedJob]:
    """Those of its JobSet, by name."""
    return {job.name: job for job in objects_in(file)[-1].spec.replicatedJobs}


def container_of(job: ReplicatedJob) -> Container:
    return job.template.spec.template.spec.containers[0]


def gpus_of(job: ReplicatedJob) -> int:
    resources = container_of(job).resources
    return resources.limits.gpus if resources else 0


def written(folder: Path, name: str, rollout: str = "", spec_name: str = "") -> tuple[Path, Path]:
    """A preset with more under [rollout], and its manifest."""
    spec = preset(name, folder)
    text = spec.read_text()
    if rollout:
        head, section, rest = re.split(r"(?m)^\[rollout\]\n((?:(?!\[).*\n?)*)", text, maxsplit=1)
        new = {line.split()[0] for line in rollout.splitlines()}
        kept = [line for line in section.splitlines(keepends=True) if (line.split() or [""])[0] not in new]
        text = f"{head}[rollout]\n{rollout}{''.join(kept)}{rest}"
        text += "" if "[cluster]" in text else '\n[cluster]\nhostfile = "hosts"\n'
    spec = folder / (spec_name or spec.name)
    spec.write_text(text)
    return spec, write_manifest(spec, force=False)


def run_bash(*words: str, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, input=text, capture_output=True, text=True, check=False)


CASES = [
    ("quickstart", "", {"driver": (1, 0)}),
    ("fsdp2-8gpu", "", {"driver": (1, 8)}),
    ("megatron-70b-64gpu", "", {"trainers": (7, 8), "driver": (1, 8)}),
    ("quickstart", "processes = 2\nfirst_node = 1\nnodes = 2\n", {"samplers": (2, 0), "driver": (1, 0)}),
    (
        "megatron-70b-64gpu",
        "processes = 2\nfirst_node = 8\nnodes = 2\n",
        {"trainers": (7, 8), "samplers": (2, 8), "driver": (1, 8)},
    ),
]


@pytest.mark.parametrize(("name", "rollout", "pods"), CASES)
def test_pods_and_gpus_are_those_of_the_spec(
    tmp_path: Path, name: str, rollout: str, pods: dict[str, tuple[int, int]]
) -> None:
    spec_file, file = written(tmp_path, name, rollout)
    jobs = jobs_in(file)
    assert {name: (job.replicas, gpus_of(job)) for name, job in jobs.items()} == pods
    assert [job.dependsOn[0].name for job in jobs.values() if job.dependsOn] == [*pods][:-1]  # the driver comes last
    spec = load_spec(spec_file)
    gpus = {gpu for role in spec.roles for gpu in spec.gpus(role)}
    assert sum(job.replicas * gpus_of(job) for job in jobs.values()) == len(gpus)


@pytest.mark.parametrize(("name", "rollout", "pods"), CASES)
def test_the_driver_knows_the_jobs_as_its_hosts(
    tmp_path: Path, name: str, rollout: str, pods: dict[str, tuple[int, int]]
) -> None:
    spec_file, file = written(tmp_path, name, rollout)
    told = told_by(container_of(jobs_in(file)["driver"]).command, tmp_path)
    overrides = [after for flag, after in pairwise(told) if flag == "--set"]
    plan = make_plan(load_spec(spec_file, overrides), tmp_path)
    label = manifest_name(spec_file)
    made = {f"{label}-{job}-{index}" for job, (count, _) in pods.items() for index in range(count)}
    assert set(plan.hosts) == made - {f"{label}-driver-0"}
    for role in plan.roles:
        for node in role.remote:
            assert node.shell == ("kubectl", "exec", "-i", f"job/{node.host}", "--", "sh")


def told_by(command: Sequence[str], folder: Path) -> list[str]:
    """What a driver's script tells rlctl, where claim and ConfigMap are `folder`."""
    assert command[:2] == ["bash", "-c"]
    (folder / "spec.toml").touch()
    script = command[2].replace("/shared", str(folder)).replace("/etc/rlctl", str(folder))
    program = f'rlctl() {{ printf "%s\\n" "$@"; }}; cd {folder}; POD_IP=10.0.0.7\n' + script.replace(
        "exec rlctl", "rlctl"
    )
    done = run_bash("bash", text=program)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_shell_in_pods_is_right_and_calls_rlctl_as_it_is(tmp_path: Path) -> None:
    _, file = written(tmp_path, "quickstart", "processes = 2\nfirst_node = 1\nnodes = 2\n")
    for job in jobs_in(file).values():
        shell, option, script = container_of(job).command
        assert option == "-c"
        assert run_bash(shell, "-n", text=script).returncode == 0
    command, spec, *options = told_by(container_of(jobs_in(file)["driver"]).command, tmp_path)
    assert (command, spec) == ("train", "rlctl-quickstart.toml")
    known = {name for parameter in get_command(app).commands["train"].params for name in parameter.opts}  # type: ignore[attr-defined]
    assert {word for word in options if word.startswith("--")} <= known


def test_a_run_on_the_claim_is_resumed(tmp_path: Path) -> None:
    _, file = written(tmp_path, "quickstart")
    command = container_of(jobs_in(file)["driver"]).command
    first = told_by(command, tmp_path)
    run = Path(first[first.index("--run-dir") + 1])
    assert "--resume" not in first
    run.mkdir(parents=True)
    (run / "resolved.json").touch()  # `RunDir.resolved`
    assert told_by(command, tmp_path) == [*first, "--resume"]


@pytest.mark.parametrize("spec_name", ["My run.toml", "7b.toml", "true.toml", f"{'x' * 80}.toml", "_._.toml", "ü.toml"])
def test_any_spec_has_names_that_kubernetes_takes(tmp_path: Path, spec_name: str) -> None:
    _, file = written(tmp_path, "quickstart", "processes = 2\nfirst_node = 1\nnodes = 2\n", spec_name=spec_name)
    claim, *_, jobset = objects_in(file)
    label = claim.metadata.name
    for job in jobset.spec.replicatedJobs:
        TypeAdapter(Label).validate_python(f"{label}-{job.name}-{job.replicas - 1:03}-0")  # a pod's host name
        assert job.template.spec.template.spec.volumes[0].persistentVolumeClaim.claimName == label


def test_only_the_driver_may_enter_pods_and_only_where_there_are_others(tmp_path: Path) -> None:
    _, file = written(tmp_path, "quickstart", "processes = 2\nfirst_node = 1\nnodes = 2\n")
    pods = {name: job.template.spec.template.spec for name, job in jobs_in(file).items()}
    label = manifest_name(tmp_path / "quickstart.toml")
    assert (pods["driver"].serviceAccountName, pods["driver"].automountServiceAccountToken) == (label, True)
    assert (pods["samplers"].serviceAccountName, pods["samplers"].automountServiceAccountToken) == (None, False)
    alone = preset("fake", tmp_path)
    kinds = [type(one) for one in objects_in(write_manifest(alone, force=False))]
    assert kinds == [Claim, Policy, JobSet]


def test_an_object_that_is_not_as_published_is_refused(tmp_path: Path) -> None:
    _, file = written(tmp_path, "quickstart")
    jobset = [*yaml.safe_load_all(file.read_text())][-1]
    jobset["spec"]["replicatedJobs"][0]["replica"] = 1
    with pytest.raises(ValidationError, match="replica"):
        PUBLISHED.validate_python(jobset)


def test_specs_that_pods_cannot_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no role is on host 2 of 4"):
        written(tmp_path, "quickstart", "processes = 2\nfirst_node = 2\nnodes = 2\n")
    spec = load_spec(preset("quickstart", tmp_path), ["actor.launcher=srun", "actor.processes=2", "actor.nodes=2"])
    with pytest.raises(UsageError, match=r'actor\.launcher is "srun"'):
        pods_of(spec)


def test_init_writes_both_or_keeps_the_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my.toml"
    init(path, "fake", False, False, "kubernetes", Machine.here)
    assert capsys.readouterr().out.startswith(f"wrote {path}\nwrote {path.with_suffix('.jobset.yaml')}\n")
    with pytest.raises(UsageError, match=r"my\.jobset\.yaml: exists already"):
        init(path, "", False, False, "kubernetes", Machine.here)
    spec = path.read_text().replace("steps = 6", "steps = 7")
    path.write_text(spec)
    init(path, "", False, True, "kubernetes", Machine.here)
    assert capsys.readouterr().out.startswith(f"wrote {path.with_suffix('.jobset.yaml')}\n")
    assert path.read_text() == spec
